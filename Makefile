# Every target does its own set-up in .venv; nothing has to be installed by hand but Python 3.11 or newer.

PYTHON ?= python3
COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLES := $(VENV)/.installed-examples
SITE := $(VENV)/.installed-docs

# More than eight workers spend longer starting than testing. What hands out groups looks through all that ran at each test.
PYTEST_WORKERS ?= -n auto --maxprocesses 8 --dist worksteal
PYTEST_ARGS ?=
# Any word: it chooses what `make test TURN=...` adds.
TURN ?=
SOURCES := asyncflow tests examples benchmarks docs
PROSE := README.md CONTRIBUTING.md RELEASING.md SECURITY.md CHANGELOG.md $(wildcard docs)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-full test-adversary mutants check reference docs doctest bench size subjects gpu-check package clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

define install
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("asyncflow needs Python 3.11 or newer, and " \
		+ sys.executable + " is " + sys.version.split()[0] + "; choose another with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(1)]'
	@touch $@
endef

$(STAMP): pyproject.toml
	$(call install,dev)

# What `setup` installs has these, too.
$(EXAMPLES): pyproject.toml
	$(call install,demo$(COMMA)serve)

$(SITE): pyproject.toml
	$(call install,docs)

setup: $(STAMP) ## Make the virtual environment .venv with the package and all tools

demo: $(EXAMPLES) ## Run the main job: an LSTM learns to write from the documentation of Python, with its timeline
	$(BIN)/python examples/character_lstm.py --output demo-out

serve: $(EXAMPLES) ## Serve three models from one session, with a page that shows their batches, on http://localhost:8000
	$(BIN)/python examples/server.py

test: $(STAMP) ## Run the tests, but for slow ones, in the five cells that find what any finds; TURN=word adds a part
	$(BIN)/python -m pytest -q $(PYTEST_WORKERS) $(if $(TURN),--turn="$(TURN)",-m 'not slow') $(PYTEST_ARGS)

test-full: $(STAMP) ## Run every test, the slow ones too, in every cell
	$(BIN)/python -m pytest -q $(PYTEST_WORKERS) --full $(PYTEST_ARGS)

# One function of tests in SHARE has its turn with each seed; `TURN` begins the seeds.
SEEDS ?= 1
SHARE ?= 1
CONCURRENT := $(addprefix tests/,conformance runtime serving faults streams devices vertex state)
test-adversary: $(STAMP) ## Run the tests of concurrent code on a machine that pauses and stops them, with SEEDS=20 seeds
	@set -e; for seed in $$(seq $(SEEDS)); do set -x; \
		$(BIN)/python -m pytest -q $(PYTEST_WORKERS) -m 'not slow' --adversary="$(TURN)$$seed" --share=$(SHARE) \
		$(PYTEST_ARGS) $(CONCURRENT); { set +x; } 2>/dev/null; done

mutants: $(STAMP) ## Put faults of one line into copies of the code, and write down which of the five cells find each
	$(BIN)/python -m tests.mutants

check: $(STAMP) ## Lint, format, types, layers, spelling
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell $(SOURCES) $(PROSE)

reference: $(STAMP) ## Write docs/reference.md and the table of passes anew, from signatures and docstrings
	$(BIN)/python docs/write_reference.py
	$(BIN)/python docs/write_passes.py

# With DOCS_RUN=0 no example is run, and the gallery has no timelines.
DOCS_RUN ?= 1
docs: $(SITE) ## Build the documentation site in build/docs, with warnings as errors
	ASYNCFLOW_DOCS_RUN=$(DOCS_RUN) $(BIN)/python -m sphinx -b html -W --keep-going -q -j auto -d build/docs-cache docs build/docs

doctest: $(STAMP) ## Run the examples in docstrings and in the README
	$(BIN)/python -m pytest -q --doctest-modules --doctest-glob=README.md asyncflow README.md

bench: $(STAMP) ## Measure beside NumPy, TensorFlow, PyTorch and JAX, where they are installed
	$(BIN)/python -m benchmarks

BASE ?=
size: $(STAMP) ## Hold the lines of code of each room to caps, and count what changed since main, or since BASE=commit
	@$(BIN)/python -m benchmarks.code_size $(BASE)

subjects: $(STAMP) ## Judge the subjects of the commits since main, or on main since the last release
	@$(BIN)/python -m tests.packaging.subjects

# On the Python that has CuPy, which `.venv` has not; it needs pytest besides, and nothing else of what `setup` installs.
OUT ?= gpu-out
GPU_CHECK_ARGS ?=
gpu-check: ## Run tests/gpu on this machine's card, in two parts of at most nine minutes; results go to OUT=folder
	@status=0; for part in A B; do \
		ASYNCFLOW_REQUIRE_GPU=1 $(PYTHON) -m tests.gpu.check $$part --out $(OUT) $(GPU_CHECK_ARGS) || status=1; \
	done; exit $$status

# The wheel is built from the sdist, so both are complete. What was tried lies in dist/.
package: $(STAMP) ## Build sdist and wheel, check their contents, try the wheel and the README on each supported Python
	@rm -rf dist; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; set -x; \
	$(BIN)/python -m build --outdir dist . >"$$log" 2>&1 || { cat "$$log"; exit 1; }
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.packaging.release dist/*.whl

clean: ## Remove what the targets made, the virtual environment too
	rm -rf $(VENV) build dist demo-out gpu-out .cupy_cache *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf docs/generated
	find asyncflow tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
