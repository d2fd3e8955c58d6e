# Everything a newcomer needs: `make serve`, `make test`, `make check`. Each sets up .venv first.
# `make test` shows every promise once; `make test-all` runs it and then whatever else there is.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations 20

# Instruction sets that the CPU kernels can be compiled for on this machine, besides its own.
FLAGS := $(shell grep -m 1 ^flags /proc/cpuinfo 2>/dev/null)
ISAS := $(if $(filter avx512f,$(FLAGS)),avx512) $(if $(filter avx_vnni,$(FLAGS)),avx2-vnni) $(if $(filter avx2,$(FLAGS)),avx2) portable
# PyTorch's own name for each: a machine without the instructions has a PyTorch without them.
ATEN_avx512 := avx512
ATEN_avx2-vnni := avx2
ATEN_avx2 := avx2
ATEN_portable := default
ISA_TESTS := tests/runners/cpu tests/runners/test_step.py $(addprefix tests/conformance/test_,equality.py forks.py constrained.py fp8.py logits.py)

.PHONY: serve test test-all test-exhaustive test-isas $(ISAS:%=test-isa-%) check setup clean

serve: setup
	$(BIN)/slipstream serve

test: setup
	$(PYTEST) -m "not exhaustive"

test-all: test test-exhaustive test-isas

test-exhaustive: setup
	$(PYTEST) -m exhaustive

test-isas: $(ISAS:%=test-isa-%)

$(ISAS:%=test-isa-%): test-isa-%: setup
	SLIPSTREAM_CPU_ISA=$* ATEN_CPU_CAPABILITY=$(ATEN_$*) $(PYTEST) $(ISA_TESTS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,check]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
