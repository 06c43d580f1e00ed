# Every target works on a fresh clone: the first one makes .venv from the lock. `make help` lists them.
PYTHON ?= $(shell sh .ci/find-python)
# Where tests run: .venv has the lowest JAX that pyproject.toml allows, .venv-newest the newest.
VENV ?= .venv
RUN := $(VENV)/bin/python
PIP := -m pip install --quiet --disable-pip-version-check
# XLA's compiler for CUDA comes as wheels for x86-64 Linux only.
AOT := .venv-aot/bin/python
AOT_HERE := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

.PHONY: help demo compare claims attack lint types quick test test-slow all-tests docs bench aot aot-quick aot-compilers aot-full check check-long lowest x64 format hooks wheel \
    audit lock clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /@/' | column -t -s @

demo: $(VENV)/installed  ## train a small policy with routing replay, balanced; the figure and numbers go to out/
	$(RUN) -m experiments.run demo

compare: $(VENV)/installed  ## compare all planners on a trace; figures and numbers go to out/
	$(VENV)/bin/relibra compare

claims: $(VENV)/installed  ## compare published claims with ours on the trace that RELIBRA_TRACE names; half an hour
	$(RUN) -m experiments.claims

lint: $(VENV)/installed  ## check format and style
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check

types: $(VENV)/installed  ## check types
	$(RUN) -m mypy

quick: $(VENV)/installed  ## run the tests nearest to what has changed, for a minute
	$(RUN) tests/quick.py

test: $(VENV)/installed  ## run the fast tests, examples in docstrings among them
	$(RUN) -m pytest -m "not slow and not long"

test-slow: $(VENV)/installed  ## run the tests that take several seconds each
	$(RUN) -m pytest -m "slow and not long"

all-tests: $(VENV)/installed  ## run all tests but the long ones, in one run that shares compiled programs
	$(RUN) -m pytest

attack: $(VENV)/installed  ## attack training runs at random, and count how they end; minutes
	$(RUN) tests/attack.py

docs: $(VENV)/installed  ## build the documentation site in out/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --site-dir out/site

bench: $(VENV)/installed  ## time planning beside its baselines, in one run
	$(RUN) -m experiments.bench

aot: .venv-aot/installed  ## compile for GPUs without one, and check what the compiled programs promise
	$(AOT) -m experiments.aot

aot-compilers: .venv-aot-ptxas/installed .venv-aot-newest/installed  ## install other compilers, with which make aot then compiles kernels too

aot-full: .venv-aot/installed  ## compile updates and generation of whole published models, and check that they fit; half an hour
	JAX_PLATFORMS=cpu $(AOT) -m experiments.aot.whole

aot-quick: .venv-aot/installed  ## the same for what runs by default, for one model and GPU
	$(AOT) -m experiments.aot --quick

check: lint types all-tests docs  ## what CI runs with the locked versions: all but the long tests
	$(if $(AOT_HERE),$(MAKE) aot-quick,@echo "make aot-quick skipped: XLA's compiler for CUDA is for x86-64 Linux, this is $$(uname -sm)")

# What every user meets first, and what a plan and a layer promise.
CONTRACT := tests/test_imports.py tests/test_public_api.py tests/test_planners.py tests/test_plan_batch.py \
    tests/test_moe.py tests/test_moe_layer.py tests/test_balancer.py tests/test_migration.py tests/test_checkpoint.py

lowest: .venv-lowest/installed  ## run the contract's tests with the lowest version of every dependency
	.venv-lowest/bin/python -m pytest -m "not slow and not long" relibra_jax pallas_kernels tests/test_cli.py \
	    tests/test_cli_errors.py tests/test_rl_tokens.py $(CONTRACT)

x64: $(VENV)/installed  ## run the contract's tests with 64-bit types switched on
	JAX_ENABLE_X64=1 $(RUN) -m pytest -m "not slow and not long" $(CONTRACT) tests/test_plan.py tests/test_plan_guard.py \
	    tests/test_replication.py tests/test_placement.py tests/test_assignment.py tests/test_token_split.py

check-long: $(VENV)/installed  ## run what takes minutes: long tests, other versions, 64-bit types, the ablation, buffer sizes, all of aot
	$(RUN) -m pytest -m long
	$(MAKE) lowest
	$(MAKE) x64
	$(VENV)/bin/relibra compare --ablation
	$(RUN) -m experiments.count_buffers
	$(MAKE) attack
	$(if $(AOT_HERE),$(MAKE) aot-compilers)
	$(if $(AOT_HERE),$(MAKE) aot aot-full)

format: $(VENV)/installed  ## format the code
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

hooks: .venv/installed  ## check format and style before every commit
	.venv/bin/pre-commit install

# TAG, if given, must name the version of the package: v0.1.0 for 0.1.0. What builds the wheel and what it runs with
# are packages of the lock, by their hashes. The wheel itself says which of them it needs.
wheel: .venv/installed .venv-audit/installed  ## build a release in dist/, try its wheel, and list its parts in out/sbom.cdx.json
	rm -rf dist .venv-wheel
	.venv/bin/python -m build --no-isolation
	.venv/bin/python -m twine check --strict dist/*
	test -z "$(TAG)" || test -e dist/relibra_jax-$(TAG:v%=%)-py3-none-any.whl
	.venv/bin/python -m venv --without-pip .venv-wheel
	.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	    -r requirements-dev.lock -d .venv-wheel/packages
	.venv/bin/python -m pip --python .venv-wheel/bin/python install --quiet --disable-pip-version-check --no-index \
	    --find-links .venv-wheel/packages "$$(echo dist/*.whl)[cli]"
	cd .venv-wheel && bin/relibra compare --rows static relibra
	mkdir -p out
	.venv-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	    -o out/sbom.cdx.json .venv-wheel/bin/python
	rm -rf .venv-wheel

# Without requirements-lowest.lock, which has old versions on purpose.
audit: .venv-audit/installed  ## look up the packages of the locks in the list of known vulnerabilities
	for lock in dev aot audit; do \
	    .venv-audit/bin/pip-audit --disable-pip --require-hashes -r requirements-$$lock.lock || exit 1; \
	done

.venv-audit/installed: requirements-audit.lock
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv --clear .venv-audit
	.venv-audit/bin/python $(PIP) --require-hashes -r requirements-audit.lock
	@touch $@

.venv/installed: requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)"
	test -x .venv/bin/python || "$(PYTHON)" -m venv .venv
	.venv/bin/python $(PIP) --require-hashes -r requirements-dev.lock
	.venv/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Without a lock: it says whether today's releases break anything.
.venv-newest/installed: pyproject.toml
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv --clear .venv-newest
	.venv-newest/bin/python $(PIP) --upgrade -e ".[dev]"
	@touch $@

# A venv of its own, so that JAX finds no CUDA plugin in .venv; all else it takes from there.
.venv-aot/installed: .venv/installed requirements-aot.lock
	@test -n "$(AOT_HERE)" || { echo "make aot: XLA's compiler for CUDA is for x86-64 Linux, this is $$(uname -sm)" >&2; exit 1; }
	.venv/bin/python -m venv --clear --without-pip .venv-aot
	echo "import site; site.addsitedir('$$(.venv/bin/python $(SITE))')" > "$$($(AOT) $(SITE))/base.pth"
	.venv/bin/python -m pip --python $(AOT) install --quiet --disable-pip-version-check --no-deps --require-hashes \
	    -r requirements-aot.lock
	@touch $@

# The assembler of the oldest CUDA that has these wheels. It is not a venv, since CUDA_ROOT chooses it.
.venv-aot-ptxas/installed: .venv-aot/installed
	rm -rf .venv-aot-ptxas
	.venv/bin/python $(PIP) --no-deps --target .venv-aot-ptxas nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88
	@touch $@

# Without a lock, like .venv-newest.
.venv-aot-newest/installed: .venv-aot/installed
	.venv/bin/python -m venv --clear --without-pip .venv-aot-newest
	cp "$$($(AOT) $(SITE))/base.pth" "$$(.venv-aot-newest/bin/python $(SITE))"
	.venv/bin/python -m pip --python .venv-aot-newest/bin/python install --quiet --disable-pip-version-check --no-deps \
	    --upgrade jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

.venv-lowest/installed: requirements-lowest.lock pyproject.toml
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv --clear .venv-lowest
	.venv-lowest/bin/python $(PIP) --require-hashes -r requirements-lowest.lock
	.venv-lowest/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Development is pinned to the oldest JAX that we support; addresses of registries stay out of the lock.
lock:  ## renew the locks
	"$(PYTHON)" -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	printf 'jax==0.11.2\njaxlib==0.11.2\n' > .venv-lock/pins
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --extra dev --python "$(PYTHON)" -c .venv-lock/pins -o requirements-dev.lock pyproject.toml
	rm -f requirements-lowest.lock  # or its versions would be kept
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --resolution lowest-direct --extra dev --python "$(PYTHON)" -o requirements-lowest.lock pyproject.toml
	printf 'jax-cuda13-plugin==0.11.2\njax-cuda13-pjrt==0.11.2\nnvidia-cuda-nvcc==13.5.37\nnvidia-cuda-nvdisasm==13.5.37\nnvidia-nvvm==13.5.37\n' | .venv-lock/bin/uv pip compile --quiet --no-deps \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python "$(PYTHON)" \
	    -o requirements-aot.lock -
	printf 'cyclonedx-bom\npip-audit\n' | .venv-lock/bin/uv pip compile --quiet --universal --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --no-header --no-annotate --python "$(PYTHON)" -o requirements-audit.lock -
	rm -rf .venv-lock

clean:  ## remove environments and output
	rm -rf .venv .venv-aot .venv-aot-newest .venv-aot-ptxas .venv-audit .venv-lock .venv-lowest .venv-newest .venv-wheel out dist
