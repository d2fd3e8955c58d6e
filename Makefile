# Everything a newcomer needs: `make serve`, `make test`, `make check`. Each sets up .venv first; plain `make` only that.
# `make serve MODEL=folder-or-hub-name DRAFT=adaptive|off|1..8 PORT=8000 ARGS='--dtype int8'`; without MODEL the default.
# `make test` shows every promise once; `make test-all` runs it and then the other cases.
# `make clients NAMES='ollama aiperf'` runs other people's clients against the server (clients/README.md); without NAMES all.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

# The extra that serving needs on this machine: MLX on Apple silicon, Triton next to an NVIDIA GPU.
PLATFORM := $(shell uname -sm)
EXTRA ?= $(if $(filter Darwin-arm64,$(subst $() ,-,$(PLATFORM))),mlx,$(if $(shell command -v nvidia-smi 2>/dev/null),cuda))
SERVE := $(if $(MODEL),'$(MODEL)') $(if $(DRAFT),--draft $(DRAFT)) $(if $(PORT),--port $(PORT)) $(ARGS)
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt --editable

# Tests start more than a hundred processes; where the environment forbids to keep compiled modules, each compiles them all.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal --durations 20

# Instruction sets that the CPU kernels can be compiled for on this machine, besides its own.
FLAGS := $(shell grep -m 1 ^flags /proc/cpuinfo 2>/dev/null)
ISAS := $(if $(filter avx512f,$(FLAGS)),avx512) $(if $(filter avx_vnni,$(FLAGS)),avx2-vnni) $(if $(filter avx2,$(FLAGS)),avx2) portable
# PyTorch's own name for each: a machine without the instructions has a PyTorch without them.
ATEN_avx512 := avx512
ATEN_avx2-vnni := avx2
ATEN_avx2 := avx2
ATEN_portable := default
ISA_TESTS := tests/runners/cpu tests/runners/test_step.py $(addprefix tests/conformance/test_,equality.py forks.py constrained.py fp8.py logits.py)

.PHONY: install serve test test-all test-exhaustive test-isas $(ISAS:%=test-isa-%) clients check setup clean

install: $(VENV)/.serve-ready

serve: install
	$(BIN)/slipstream serve $(SERVE)

test: setup
	$(PYTEST) -m "not exhaustive"

test-all: test test-exhaustive test-isas

test-exhaustive: setup
	$(PYTEST) -m exhaustive

test-isas: $(ISAS:%=test-isa-%)

$(ISAS:%=test-isa-%): test-isa-%: setup
	SLIPSTREAM_CPU_ISA=$* ATEN_CPU_CAPABILITY=$(ATEN_$*) $(PYTEST) $(ISA_TESTS)

clients: install
	$(BIN)/python -m clients $(NAMES)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.ready

# Two stamps: serving does not install the tools of the tests, and after them it has nothing to install.
$(VENV)/.serve-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.$(if $(EXTRA),[$(EXTRA)])'
	touch $@

$(VENV)/.ready: $(VENV)/.serve-ready
	$(INSTALL) '.[test,check]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
