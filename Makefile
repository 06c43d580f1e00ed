# Every target works on a fresh clone: the first one makes .venv from the lock.
PYTHON ?= $(shell sh .ci/find-python)
RUN := .venv/bin/python
# XLA's compiler for CUDA comes as wheels for x86-64 Linux only.
AOT := .venv-aot/bin/python
AOT_HERE := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

.PHONY: demo compare claims test bench aot check check-long lowest x64 format lock clean

demo: .venv/installed  ## reinforcement learning with routing replay, balanced; figure and numbers go to out/
	$(RUN) -m experiments.run demo

compare: .venv/installed  ## all planners on a trace; figures and numbers go to out/
	.venv/bin/relibra compare

claims: .venv/installed  ## what papers claim beside ours, on the trace that RELIBRA_TRACE names; a report in out/, half an hour
	.venv/bin/relibra claims

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

# What every user meets first, and what a plan and a layer promise.
CONTRACT := tests/test_imports.py tests/test_public_api.py tests/test_planners.py tests/test_plan_batch.py \
    tests/test_moe.py tests/test_moe_layer.py tests/test_balancer.py tests/test_migration.py tests/test_checkpoint.py

lowest: .venv-lowest/installed  ## import, doctests and the layer's tests on the lowest versions that we allow
	.venv-lowest/bin/python -m pytest -m "not slow" relibra_jax pallas_kernels tests/test_cli.py \
	    tests/test_cli_refusals.py tests/test_rl_tokens.py $(CONTRACT)

x64: .venv/installed  ## plans, equivalence, checkpoints and migration where 64-bit types are on
	JAX_ENABLE_X64=1 $(RUN) -m pytest -m "not slow" $(CONTRACT) tests/test_plan.py tests/test_plan_guard.py \
	    tests/test_replication.py tests/test_placement.py tests/test_assignment.py tests/test_token_split.py

check-long: .venv/installed  ## what takes minutes: long tests, other versions, 64-bit types, the ablation and the buffers of a trace
	$(RUN) -m pytest -m long
	$(MAKE) lowest
	$(MAKE) x64
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

.venv-lowest/installed: requirements-lowest.lock pyproject.toml
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-lowest.lock
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Development is pinned to the oldest JAX that we support; addresses of registries stay out of the lock.
lock:
	"$(PYTHON)" -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	printf 'jax==0.11.2\njaxlib==0.11.2\n' > .venv-lock/pins
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --extra dev --python "$(PYTHON)" -c .venv-lock/pins -o requirements-dev.lock pyproject.toml
	rm -f requirements-lowest.lock  # or its versions would be kept
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --resolution lowest-direct --extra dev --python "$(PYTHON)" -o requirements-lowest.lock pyproject.toml
	printf 'jax-cuda13-plugin==0.11.2\njax-cuda13-pjrt==0.11.2\nnvidia-cuda-nvcc==13.5.37\nnvidia-nvvm==13.5.37\n' | .venv-lock/bin/uv pip compile --quiet --no-deps \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python "$(PYTHON)" \
	    -o requirements-aot.lock -
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-aot .venv-lock .venv-lowest out
