# make demo and make test share one environment, .venv, made on first use. An interrupted run starts again where the
# last finished stamp left it.
PYTHON ?= python3
# Any torch from 2.11 on. Where pip would fetch a CUDA build and a CPU one is wanted, name its index here.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# The projection first, as the README shows them.
LINEAR_RESULTS = $(sort $(wildcard bench/results/*/norm_concat_linear*.json))
RESULTS = $(LINEAR_RESULTS) $(filter-out $(LINEAR_RESULTS),$(sort $(wildcard bench/results/*/*.json)))
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test lint bench-host report clean

demo: $(VENV)/package.stamp
	$(BIN)/eagle-kernels info
	$(BIN)/python examples/gemma3_input_stage.py
	$(BIN)/eagle-kernels bench --device cpu --preset llama3.1-8b --tokens 1,8,64,512 --baselines eager,compile,inductor-max

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/package.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What a call costs on the host. `make test` runs each of these once; here they are measured.
bench-host: $(VENV)/package.stamp
	$(BIN)/python -m pytest tests/host_overhead --benchmark-enable --benchmark-columns=median,iqr,min,rounds \
	    --benchmark-sort=name --benchmark-disable-gc

# The README's tables and plots, from every saved run: each device's go between its own marks.
report: $(VENV)/package.stamp
	$(BIN)/eagle-kernels report --readme README.md --plots $(RESULTS)

$(VENV)/torch.stamp:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77" "cmake>=3.26" ninja "pybind11>=2.13"
	touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[demo,test]"
	touch $@

clean:
	rm -rf $(VENV) build dist
	find . -name '*.so' -path './python/*' -delete
