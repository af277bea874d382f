# make run   see it work, on any machine: no GPU needed
# make test  the whole suite: lint, types, tests
# make docs  the documentation as a site: build/site/index.html, opens without a server
# make setup only the environment

PYTHON ?= python3
# Any torch from 2.6 on will do; this one is tested. `make TORCH=torch` takes the newest.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# A file's tests stay together, since they share what is slow to make; in order, so that the many short ones come last.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: run test docs setup clean

run: .venv/.run-ready
	$(BIN)/zerotune demo --out run

test: .venv/.test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

docs: .venv/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

setup: .venv/.test-ready

.venv/.run-ready: pyproject.toml setup.py
	@echo "Setting .venv up, once. If torch is not there it is downloaded: that may be gigabytes, and minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install "$(TORCH)"
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.test-ready: .venv/.run-ready
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv run build *.egg-info agent/nccl/plugin/*.so
