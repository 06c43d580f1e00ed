# Every target works on a fresh clone: the first one makes .venv from the lock.
PYTHON ?= $(shell sh .ci/find-python)
RUN := .venv/bin/python

.PHONY: demo test bench check format lock clean

demo: .venv/installed  ## compare all planners on a trace; figure and numbers go to out/
	$(RUN) -m experiments.run compare

test: .venv/installed  ## the whole test suite
	$(RUN) -m pytest

bench: .venv/installed  ## planning time beside its peers, in one run
	$(RUN) -m experiments.bench

check: .venv/installed  ## format, lint, types, tests (import arrows among them)
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m mypy
	$(MAKE) test

format: .venv/installed
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

.venv/installed: requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)"
	test -x $(RUN) || "$(PYTHON)" -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Development is pinned to the oldest JAX that we support; addresses of registries stay out of the lock.
lock:
	"$(PYTHON)" -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv
	printf 'jax==0.11.2\njaxlib==0.11.2\n' > .venv-lock/pins
	.venv-lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --extra dev --python "$(PYTHON)" -c .venv-lock/pins -o requirements-dev.lock pyproject.toml
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-lock out
