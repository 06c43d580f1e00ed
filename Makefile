# Every target works on a fresh clone: the first one makes .venv from the lock.
PYTHON ?= $(shell sh .ci/find-python)
RUN := .venv/bin/python
# XLA's compiler for CUDA comes as wheels for x86-64 Linux only.
AOT := .venv-aot/bin/python
AOT_HERE := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

.PHONY: demo compare test bench aot check check-long format lock clean

demo: .venv/installed  ## reinforcement learning with routing replay, balanced; figure and numbers go to out/
	$(RUN) -m experiments.run demo

compare: .venv/installed  ## all planners on a trace; figures and numbers go to out/
	.venv/bin/relibra compare

test: .venv/installed  ## the whole test suite
	$(RUN) -m pytest

bench: .venv/installed  ## planning time beside its peers, in one run
	$(RUN) -m experiments.bench

aot: .venv-aot/installed  ## compile for 2 x 4 H100 without a GPU, and hold the programs to what is promised
	$(AOT) -m experiments.aot

check: .venv/installed  ## format, lint, types, tests (import arrows among them), compiled programs
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy
	$(MAKE) test
	$(if $(AOT_HERE),$(MAKE) aot,@echo "make aot skipped: XLA's compiler for CUDA is for x86-64 Linux, this is $$(uname -sm)")

check-long: .venv/installed  ## what takes minutes and tests do not hold: the ablation and the buffers of a trace
	$(RUN) -m experiments.ablation
	$(RUN) -m experiments.count_buffers

format: .venv/installed
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

.venv/installed: requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)"
	test -x $(RUN) || "$(PYTHON)" -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# A venv of its own, so that JAX finds no CUDA plugin in .venv; all else it takes from there.
.venv-aot/installed: .venv/installed requirements-aot.lock
	@test -n "$(AOT_HERE)" || { echo "make aot: XLA's compiler for CUDA is for x86-64 Linux, this is $$(uname -sm)" >&2; exit 1; }
	$(RUN) -m venv --clear --without-pip .venv-aot
	echo "import site; site.addsitedir('$$($(RUN) $(SITE))')" > "$$($(AOT) $(SITE))/base.pth"
	$(RUN) -m pip --python $(AOT) install --quiet --disable-pip-version-check --no-deps --require-hashes \
	    -r requirements-aot.lock
	@touch $@

# Development is pinned to the oldest JAX that we support; addresses of registries stay out of the lock.
lock:
	"$(PYTHON)" -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	printf 'jax==0.11.2\njaxlib==0.11.2\n' > .venv-lock/pins
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --extra dev --python "$(PYTHON)" -c .venv-lock/pins -o requirements-dev.lock pyproject.toml
	printf 'jax-cuda13-plugin==0.11.2\njax-cuda13-pjrt==0.11.2\nnvidia-cuda-nvcc==13.5.37\nnvidia-nvvm==13.5.37\n' | .venv-lock/bin/uv pip compile --quiet --no-deps \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python "$(PYTHON)" \
	    -o requirements-aot.lock -
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-aot .venv-lock out
