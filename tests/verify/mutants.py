"""`make mutants`: one small fault at a time in the kernels, checks and planners; the tests of that file must find it.

All C++ mutants are compiled once, each as `mutant == n ? fault : original`, and an environment variable picks one
(mutant schemata; a build per mutant would take an hour). A Python mutant is a change in a copy of the package. Mutants
run one per core, each up to the first test that fails; the test that found a mutant the last time runs first. Arguments
are files whose mutants run; without arguments all run.

The kernels of csrc/cuda run emulated (tests/cuda_host). Every synchronization call in their sources is also removed,
one at a time: a test must see wrong numbers, the emulation complain, or ThreadSanitizer see a race. Calls that have no
meaning in the emulation stay: `is_new`, which is for nvcc, and `let_next_kernel_start`, without which a kernel is only
slower.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

from backends import usable_isas
from sanitizers import environment_under
from verify.results import EVERY_CORE, load, run_tests, save
from verify.variant import ROOT, Variant, install, unoptimized

VARIABLE = "EAGLE_KERNELS_MUTANT"
FOLDER = ROOT / "build/mutants"
INTERPRETED = {"TRITON_INTERPRET": "1"}


def of_emulation(folder: Path) -> dict[str, str]:
    """Variables that have the emulation compile the csrc in folder/source. -w because a fault may cause a warning,
    which the emulation makes an error."""
    flags = f"-w -include {folder / 'mutant.h'}"
    return {"EAGLE_KERNELS_TEST_SOURCES": os.fspath(folder / "source"), "EAGLE_KERNELS_TEST_FLAGS": flags}


EMULATED = of_emulation(FOLDER)
# Seconds, after which a mutant counts as hanging, and killed. The slowest tests take 130 alone and 200 beside other
# work: with a limit of 300 a surviving mutant was once counted as killed.
LONGEST = 900
HEADER = f"""#pragma once
#ifdef __cplusplus
#include <cstdlib>
namespace eagle_kernels {{
inline const int mutant = std::getenv("{VARIABLE}") == nullptr ? -1 : std::atoi(std::getenv("{VARIABLE}"));
}}
#endif
"""


@dataclass(frozen=True)
class Mutant:
    """`original` occurs once in the file, or is occurrence number `place`; in C++ both are expressions of one type."""

    file: str
    original: str
    fault: str
    survives: str = ""  # why no test can find it, or need not
    isa: str = ""  # the instruction set that has the kernel; on other CPUs the mutant does not run
    place: int = 0


SIMD = "csrc/cpu/simd.h"
DOT_PRODUCT = "csrc/cpu/project_dot.h"
SCALES = "csrc/cpu/scales.h"
STRIPS = "csrc/cpu/strips.h"
STRIP_PRODUCT = "csrc/cpu/project_strips.h"
LANES = "csrc/cpu/project_lanes.h"
PACK_GROUPS = "csrc/cpu/pack_groups.h"
FLOAT_PRODUCT = "csrc/cpu/project_floats.h"
WIDEN_CODES = "csrc/cpu/widen_codes.h"
AMX = "csrc/cpu/project_amx.h"
AMX_LINES = "csrc/cpu/amx_lines.h"
AMX_CODES = "csrc/cpu/project_amx_codes.h"
WORKSPACE = "csrc/cpu/workspace.h"
DOT_CODES = "csrc/cpu/project_codes.h"
WIDEN_12_BITS = "csrc/cpu/widen_bf16_12bit.h"
BF16_12BIT = "python/eagle_kernels/bf16_12bit.py"
PRIMITIVE = "csrc/norm_concat_linear.cpp"
QUANTIZED_WEIGHT = "python/eagle_kernels/quantized_weight.py"
QUANTIZED_CHECKPOINT = "python/eagle_kernels/quantized_checkpoint.py"
QUANTIZATION_CONFIG = "python/eagle_kernels/quantization_config.py"
QUANTIZED_LINEAR = "python/eagle_kernels/quantized_linear.py"
SOURCES = "python/eagle_kernels/ops/sources.py"
PLAN = "python/eagle_kernels/plan.py"
DISPATCH = "python/eagle_kernels/dispatch.py"
PYTHON_CALL = "csrc/python_call.cpp"
TRITON = "triton_kernels/{}.py".format
CUDA = "csrc/cuda/{}".format

_CHUNKS = ["tests/test_norm_concat.py", "tests/test_norm_concat_linear.py"]
_CHECKS = ["tests/test_primitives.py", "tests/test_worded_errors.py"]
_CODES = ["tests/test_norm_concat_linear_quantized.py"]
_12_BITS = "tests/test_bf16_12bit.py"
_EMULATED = "tests/cuda_host/test_{}.py".format
_SCHEDULES = _EMULATED("schedules")
# By file: the tests of _SCHEDULES (-k) that run its kernels. Files without a product have those named "others".
_KERNELS_OF = {
    "norm_concat_linear.cu": "products and not wgmma",
    "mma_tile.cuh": "products and not wgmma",
    "mma_ring.cuh": "products and not wgmma",
    "mma_product.cuh": "products and not wgmma",
    "norm_concat_linear_finalize.cu": "products and not wgmma",
    "norm_concat_linear_wgmma.cu": "wgmma",
    "h200.h": "products",
    "cut.cuh": "products",
    "ranges.cuh": "products",
    "fused_sums.cuh": "products and not wgmma",
    "cluster_sums.cuh": "wgmma",
    "scales.cuh": "products",
}
_EMULATED_PRODUCTS = [_SCHEDULES, _EMULATED("norm_concat_linear"), _EMULATED("norm_concat_linear_quantized")]
_INTERPRETED_CODES = "tests/interpreter/test_norm_concat_linear_quantized.py"
TESTS = {
    "csrc/checks.h": _CHECKS,
    "csrc/checks.cpp": [*_CHECKS, "tests/test_errors.py", "tests/test_buffers.py"],
    "csrc/sources.cpp": [*_CHECKS, *_CHUNKS],
    "csrc/vocab_parallel_embedding.cpp": [*_CHECKS, "tests/test_vocab_parallel_embedding.py"],
    "csrc/store_context_kv.cpp": _CHECKS,
    "csrc/cpu/vocab_parallel_embedding.cpp": ["tests/test_vocab_parallel_embedding.py"],
    "csrc/cpu/norm_row.h": [*_CHUNKS, "tests/test_add_rms_norm.py"],
    "csrc/cpu/add_rms_norm.cpp": ["tests/test_add_rms_norm.py"],
    "csrc/cpu/capture_hidden.cpp": ["tests/test_capture_hidden.py"],
    "csrc/cpu/norm_concat_linear.cpp": [*_CODES, "tests/test_norm_concat_linear.py"],
    SIMD: ["tests/test_capture_hidden.py", "tests/test_add_rms_norm.py", *_CHUNKS, *_CODES],
    DOT_PRODUCT: ["tests/test_norm_concat_linear.py", "tests/test_soak.py"],
    SCALES: [*_CODES, "tests/test_norm_concat_linear.py"],
    STRIPS: [*_CODES, "tests/test_norm_concat_linear.py"],
    STRIP_PRODUCT: [*_CODES, "tests/test_norm_concat_linear.py"],
    LANES: [*_CODES, "tests/test_norm_concat_linear.py", _12_BITS],
    PACK_GROUPS: [*_CODES, "tests/test_norm_concat_linear.py"],
    FLOAT_PRODUCT: [*_CODES, "tests/test_norm_concat_linear.py"],
    WIDEN_CODES: _CODES,
    AMX: ["tests/test_norm_concat_linear.py", *_CODES],
    AMX_LINES: [*_CODES, _12_BITS],
    AMX_CODES: [*_CODES, _12_BITS],
    WORKSPACE: ["tests/test_norm_concat_linear.py"],
    DOT_CODES: _CODES,
    WIDEN_12_BITS: [_12_BITS],
    BF16_12BIT: [_12_BITS],
    PRIMITIVE: [*_CHECKS, *_CODES, "tests/test_norm_concat_linear.py"],
    QUANTIZED_WEIGHT: ["tests/test_quantized_weight.py"],
    QUANTIZED_CHECKPOINT: [
        "tests/test_quantized_checkpoint.py",
        "tests/test_quantized_linear.py",
        "tests/test_checkpoint.py",
    ],
    QUANTIZATION_CONFIG: ["tests/test_quantized_checkpoint.py", "tests/test_int4_checkpoint.py"],
    QUANTIZED_LINEAR: ["tests/test_quantized_linear.py"],
    PLAN: [
        "tests/test_triton_backend.py",
        "tests/test_cuda_backend.py",
        "tests/test_norm_concat_linear.py",
        "tests/test_norm_concat_linear_quantized.py::test_the_plan_of_few_rows",
        "tests/test_norm_concat_linear_quantized.py::test_beside_tiles_one_row_of_codes_runs_in_dots",
    ],
    DISPATCH: ["tests/test_dispatch.py", "tests/test_python_call.py", "tests/test_registration.py"],
    PYTHON_CALL: ["tests/test_python_call.py", "tests/test_dispatch.py"],
    SOURCES: ["tests/test_errors.py", "tests/test_norm_concat.py", "tests/test_worded_errors.py"],
    TRITON("dialect"): ["tests/interpreter/test_add_rms_norm.py"],
    TRITON("sources"): ["tests/interpreter/test_norm_concat.py"],
    TRITON("vocab_parallel_embedding"): ["tests/interpreter/test_vocab_parallel_embedding.py"],
    TRITON("add_rms_norm"): ["tests/interpreter/test_add_rms_norm.py"],
    TRITON("capture_hidden"): ["tests/interpreter/test_capture_hidden.py"],
    TRITON("norm_concat_linear"): ["tests/interpreter/test_norm_concat_linear.py", _INTERPRETED_CODES],
    TRITON("codes"): [_INTERPRETED_CODES],
    TRITON("dequantize"): [_INTERPRETED_CODES],
    CUDA("add_rms_norm.cu"): [_SCHEDULES, _EMULATED("add_rms_norm")],
    CUDA("capture_hidden.cu"): [_SCHEDULES, _EMULATED("capture_hidden")],
    CUDA("norm_concat.cu"): [_SCHEDULES, _EMULATED("norm_concat")],
    CUDA("vocab_parallel_embedding.cu"): [_SCHEDULES, _EMULATED("vocab_parallel_embedding")],
    CUDA("norm_concat_linear.cu"): [*_EMULATED_PRODUCTS, _EMULATED("launch")],
    CUDA("mma_tile.cuh"): _EMULATED_PRODUCTS,
    CUDA("mma_ring.cuh"): _EMULATED_PRODUCTS,
    CUDA("mma_product.cuh"): _EMULATED_PRODUCTS,
    CUDA("norm_concat_linear_finalize.cu"): _EMULATED_PRODUCTS,
    CUDA("fused_sums.cuh"): _EMULATED_PRODUCTS,
    CUDA("cluster_sums.cuh"): _EMULATED_PRODUCTS,
    CUDA("cut.cuh"): _EMULATED_PRODUCTS,
    CUDA("scales.cuh"): _EMULATED_PRODUCTS,
    CUDA("norm_concat_linear_wgmma.cu"): _EMULATED_PRODUCTS,
    CUDA("h200.h"): _EMULATED_PRODUCTS,
    CUDA("ranges.cuh"): _EMULATED_PRODUCTS,
    CUDA("codes.cuh"): _EMULATED_PRODUCTS,
    CUDA("weight_gain.cuh"): _EMULATED_PRODUCTS,
    CUDA("source_row.cuh"): [_SCHEDULES, _EMULATED("norm_concat"), *_EMULATED_PRODUCTS[1:]],
    CUDA("launch.cuh"): [_EMULATED("launch")],
    CUDA("device.cuh"): [_SCHEDULES, _EMULATED("add_rms_norm"), _EMULATED("norm_concat")],
}

MUTANTS = (
    Mutant("csrc/checks.h", "view.dim == 2", "view.dim >= 1"),
    Mutant("csrc/checks.h", "view.size(1) <= 1 || view.stride(1) == 1", "true"),
    Mutant("csrc/checks.h", "view.size(0) == rows && view.size(1) == columns", "view.size(1) == columns"),
    Mutant("csrc/checks.h", "view.size(0) == rows && view.size(1) == columns", "view.size(0) == rows"),
    Mutant("csrc/checks.h", "view.stride(0) >= view.size(1)", "view.stride(0) >= view.size(1) - 1"),
    Mutant("csrc/checks.h", "view.numel() == length", "view.numel() >= length"),
    Mutant("csrc/checks.h", "view.dtype == like.dtype || view.dtype == kTorchFloat", "view.is_floating()"),
    Mutant("csrc/checks.h", "eps >= 0 && eps <= static_cast<double>(__FLT_MAX__)", "!(eps < 0)"),
    Mutant("csrc/checks.cpp", "a.end() <= b.begin || b.end() <= a.begin", "a.end() < b.begin || b.end() < a.begin"),
    Mutant("csrc/checks.cpp", "data != nullptr || !is_touched || numel() == 0", "true"),
    Mutant("csrc/checks.cpp", "distance < a.row_bytes", "distance <= a.row_bytes"),
    Mutant("csrc/checks.cpp", "distance + b.row_bytes > pitch", "distance + b.row_bytes >= pitch"),
    Mutant("csrc/checks.cpp", "begin + (rows - 1) * pitch + row_bytes", "begin + rows * pitch"),
    Mutant(
        "csrc/store_context_kv.cpp", "cache.stride(1) >= d && cache.stride(0) >= span_of_heads", "cache.stride(1) >= d"
    ),
    Mutant(
        "csrc/store_context_kv.cpp", "cache.stride(0) >= d && cache.stride(1) >= span_of_slots", "cache.stride(0) >= d"
    ),
    Mutant("csrc/store_context_kv.cpp", "view.numel() == 0 || is_disjoint(view)", "true"),
    Mutant("csrc/store_context_kv.cpp", "!touch(k_cache, *input)", "true"),
    Mutant("csrc/store_context_kv.cpp", "!v_cache || !touch(*v_cache, *input)", "true"),
    Mutant("csrc/checks.cpp", "pitch < std::max(a.row_bytes, b.row_bytes)", "false"),
    Mutant("csrc/sources.cpp", "chunks.size(1) % concat.num_chunks == 0", "true"),
    Mutant("csrc/sources.cpp", "source.at(part * chunk->width)", "source.at(0)"),
    Mutant("csrc/sources.cpp", "chunks_[k].column * element_size", "k * element_size"),
    Mutant("csrc/sources.cpp", "has_index || chunks_[k].rows == rows", "has_index || chunks_[k].rows >= rows"),
    Mutant("csrc/sources.cpp", "index.dim == 1 && index.size(0) == out_.size(0)", "index.dim == 1"),
    Mutant("csrc/sources.cpp", "eps.size() == 1 ? 0 : k", "k * 0"),
    Mutant("csrc/sources.cpp", "concat.norm == Norm::kChunk ? concat.num_chunks : 1", "concat.num_chunks"),
    Mutant("csrc/vocab_parallel_embedding.cpp", "added_row <= rows - added", "added_row <= rows - added + 1"),
    Mutant("csrc/vocab_parallel_embedding.cpp", "org_end - org_begin <= rows", "org_end - org_begin <= rows + 1"),
    Mutant("csrc/cpu/vocab_parallel_embedding.cpp", "id >= op.org_begin && id < op.org_end", "id < op.org_end"),
    Mutant(
        "csrc/cpu/vocab_parallel_embedding.cpp",
        "id >= op.org_begin && id < op.org_end",
        "id >= op.org_begin && id <= op.org_end",
    ),
    Mutant("csrc/cpu/vocab_parallel_embedding.cpp", "id - op.added_begin + op.added_row", "id - op.added_begin"),
    Mutant("csrc/cpu/vocab_parallel_embedding.cpp", "i * op.ids_stride", "i"),
    Mutant(
        "csrc/cpu/vocab_parallel_embedding.cpp",
        "__builtin_memset(out, 0, row_bytes)",
        "__builtin_memset(out, 0, row_bytes - 1)",
    ),
    Mutant(
        "csrc/cpu/norm_row.h",
        "mean_square == 0.0f ? 0.0f : 1.0f / __builtin_sqrtf(mean_square)",
        "1.0f / __builtin_sqrtf(mean_square)",
    ),
    Mutant(
        "csrc/cpu/norm_row.h",
        "sum_squares / static_cast<float>(width) + eps",
        "sum_squares / static_cast<float>(width)",
    ),
    Mutant("csrc/cpu/norm_row.h", "row >= 0 && row < chunk.rows", "row >= 0 && row <= chunk.rows"),
    Mutant(
        "csrc/cpu/norm_row.h",
        "round_to(load(x + i, span) + load(residual + i, span), T{})",
        "load(x + i, span) + load(residual + i, span)",
    ),
    Mutant(
        "csrc/cpu/norm_row.h",
        "rsqrt_mean(sum, op.width, op.chunks[0].eps)",
        "rsqrt_mean(sum, op.chunks[0].width, op.chunks[0].eps)",
    ),
    Mutant(
        "csrc/cpu/norm_row.h",
        "norm_offset + load_vector<T>(gain, begin + i, span)",
        "load_vector<T>(gain, begin + i, span)",
    ),
    Mutant(
        "csrc/cpu/add_rms_norm.cpp",
        "sum_of_squares(op.width, add_and_fetch)",
        "sum_of_squares(op.width - 1, add_and_fetch)",
    ),
    Mutant("csrc/cpu/add_rms_norm.cpp", "norm_offset + load_vector<T>(gain, i, span)", "load_vector<T>(gain, i, span)"),
    Mutant("csrc/cpu/capture_hidden.cpp", "round_to(unrounded, T{})", "unrounded"),
    Mutant("csrc/cpu/capture_hidden.cpp", "hidden + s * stride + i", "hidden + i"),
    Mutant("csrc/cpu/capture_hidden.cpp", "Float{}", "-Float{}"),
    Mutant(
        "csrc/cpu/capture_hidden.cpp",
        "load(hidden + i, span) + load(residual + i, span)",
        "load(hidden + i, span)",
    ),
    Mutant(
        "csrc/cpu/norm_concat_linear.cpp",
        "op.source.norm_offset + load_vector<T>(op.post_norm_gain, d, span)",
        "load_vector<T>(op.post_norm_gain, d, span)",
    ),
    Mutant(PLAN, "if problem.rows <= limit:", "if problem.rows < limit:"),
    Mutant(PLAN, "if rows <= max_rows or", "if rows < max_rows or"),
    Mutant(PLAN, "problem.rows <= max_rows or", "problem.rows < max_rows or"),
    Mutant(PLAN, "if rows <= decode and has_clusters", "if rows < decode and has_clusters"),
    Mutant(PLAN, "return capability >= (major, minor)", "return capability > (major, minor)"),
    Mutant(PLAN, "capability[1] >= minor", "capability[1] > minor"),
    Mutant(PLAN, "if major < 8:", "if major <= 8:"),
    Mutant(PLAN, "if num_chunks > limit else", "if num_chunks >= limit else"),
    Mutant(PLAN, "if H % 8]", "if H % 16]"),
    Mutant(PLAN, "elements_aligned and H % 16 == 0", "elements_aligned or H % 16 == 0"),
    Mutant(PLAN, "if len(problem.widths) > 1:", "if len(problem.widths) > 2:"),
    Mutant(PLAN, "num_warps=8", "num_warps=4"),
    Mutant(DISPATCH, "is_compiling() or ", ""),
    Mutant(DISPATCH, "or _dispatch_modes() ", ""),
    Mutant(DISPATCH, " or not _are_plain(*operands)", ""),
    Mutant(DISPATCH, "if _is_tracing():", "if False:"),
    Mutant(DISPATCH, "OPERANDS.issuperset(map(type, _each(operands)))", "True"),
    Mutant(DISPATCH, "if type(operand) is list:", "if False:"),
    Mutant(DISPATCH, "requires_grad(_each(operands))", "requires_grad(operands[-1:])"),
    Mutant(PYTHON_CALL, "type_of(argument) != objects.list", "false"),
    Mutant(PYTHON_CALL, "!is_operand(python.list_item(argument, i))", "false"),
    Mutant(PYTHON_CALL, "i < size", "i + 1 < size"),
    Mutant(PYTHON_CALL, "object == objects.none || is_plain_tensor(object)", "is_plain_tensor(object)"),
    Mutant(DISPATCH, "_functorch_level() is not None", "False"),
    Mutant(DISPATCH, "return not _is_grad_enabled() or", "return"),
    Mutant(SOURCES, "residuals or None, indices or None", "indices or None, residuals or None"),
    Mutant(SOURCES, "for entry in values:", "for entry in values[:1]:"),
    Mutant(SOURCES, "index.shape[0] != length:", "index.shape[0] < length:"),
    Mutant(SOURCES, "if len(gains) != num_chunks:", "if len(gains) < num_chunks:"),
    Mutant(SOURCES, "if gain.dtype != gains[0].dtype:", "if False:"),
    Mutant(SOURCES, "if not gathered and", "if gathered and"),
    Mutant(SOURCES, "not in (1, num_chunks)", "not in (1, 2, num_chunks)"),
    Mutant(TRITON("dialect"), "tl.where(mean_square == 0.0, 0.0, tl.rsqrt(mean_square))", "tl.rsqrt(mean_square)"),
    Mutant(TRITON("sources"), "(row < pick(row_counts, k))", "(row <= pick(row_counts, k))"),
    Mutant(TRITON("sources"), "tl.where(j < k, WIDTHS[j], 0)", "tl.where(j <= k, WIDTHS[j], 0)"),
    Mutant(TRITON("sources"), "tl.where(given, total, value)", "total"),
    Mutant(TRITON("vocab_parallel_embedding"), "(id < org_end)", "(id <= org_end)"),
    Mutant(TRITON("vocab_parallel_embedding"), "id - added_begin + added_row", "id - added_begin"),
    Mutant(TRITON("vocab_parallel_embedding"), "tl.where(in_shard, values, 0.0)", "values"),
    Mutant(TRITON("add_rms_norm"), "lanes += total * total", "lanes = total * total"),
    Mutant(TRITON("add_rms_norm"), "norm_offset + to_fp32(", "to_fp32("),
    Mutant(TRITON("capture_hidden"), "lanes += to_fp32(value)", "lanes = to_fp32(value)"),
    Mutant(TRITON("norm_concat_linear"), "tl.where(in_ranges[k], source_sum, 0.0)", "source_sum"),
    Mutant(TRITON("norm_concat_linear"), "WIDTHS[k] + eps[k]) * (1 / GAIN_SCALE)", "WIDTHS[k] + eps[k])"),
    Mutant(TRITON("norm_concat_linear"), "tl.where(d < D, projected * projected, 0.0)", "projected * projected"),
    Mutant("csrc/cpu/norm_concat_linear.cpp", "value(d, span) * rstd * gain", "value(d, span) * gain"),
    Mutant(
        "csrc/cpu/norm_concat_linear.cpp",
        "has_scales(op.weight_type) || op.kernel != ProductKernel::kFewRows",
        "true",
        isa="avx512_bf16",
    ),
    Mutant(
        "csrc/cpu/norm_concat_linear.cpp",
        "dot_workspace<T>(op) + totals_workspace(op)",
        "dot_workspace<T>(op)",
    ),
    Mutant(
        "csrc/cpu/norm_concat_linear.cpp",
        "strips_workspace<T>(op) + totals_workspace(op)",
        "strips_workspace<T>(op)",
    ),
    Mutant(SIMD, "bits + 0x7fff + ((bits >> 16) & 1)", "bits + 0x8000"),
    Mutant(SIMD, "value != value ? UInt{} + 0x7fc0 : rounded", "rounded"),
    Mutant(SIMD, "magnitude >= 0x7c00", "magnitude > 0x7c00"),
    Mutant(SIMD, "excess < 0.0f ? excess : Float{}", "Float{}"),
    Mutant(SIMD, "finite | special", "finite"),
    Mutant(SIMD, "(wide & 0x8000) << 16", "UInt{}"),
    Mutant(SIMD, "exponent > smallest ? exponent : smallest", "exponent"),
    Mutant(SIMD, "magnitude >= 0x477ff000 ? UInt{} + 0x7c00 : finite", "finite"),
    Mutant(
        SIMD,
        "magnitude >= 0x477ff000",
        "magnitude > 0x477ff000",
        "65520 is the tie between 65504 and 65536: rounding makes an infinity of it too",
    ),
    Mutant(SIMD, "magnitude > 0x7f800000", "magnitude >= 0x7f800000"),
    Mutant(SIMD, "result | ((bits >> 16) & 0x8000)", "result"),
    Mutant(
        SIMD,
        "__builtin_memcpy(&lanes, p, part.count * (sizeof lanes / kLanes))",
        "__builtin_memcpy(&lanes, p, sizeof lanes)",
    ),
    Mutant(
        SIMD,
        "__builtin_memcpy(p, &lanes, part.count * (sizeof lanes / kLanes))",
        "__builtin_memcpy(p, &lanes, sizeof lanes)",
    ),
    Mutant(
        SIMD, "bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(row) % kCacheLine == 0", "bytes >= kStreamBytes"
    ),
    Mutant(SIMD, "widen(narrow(value, T{}), T{})", "value"),
    Mutant(SIMD, "halves<kHalf, true>(even, odd, lanes)", "halves<kHalf, false>(even, odd, lanes)"),
    Mutant(SIMD, "_mm512_unpacklo_epi64(high01, high23)", "_mm512_unpackhi_epi64(high01, high23)"),
    Mutant(SIMD, "_mm512_shuffle_i32x4(odd01, odd23, kEven)", "_mm512_shuffle_i32x4(odd01, odd23, kOdd)"),
    Mutant(SIMD, "step < kSquaresSteps && i + kSums * kLanes <= width", "i + kSums * kLanes <= width"),
    Mutant(SIMD, "totals[j] += sums[j]", "totals[j] = sums[j]"),
    Mutant(SIMD, "totals[kSums - 1] += value * value", "totals[kSums - 1]"),
    Mutant(SIMD, "totals[j] += totals[j + half]", "totals[j]"),
    Mutant(SIMD, "vector.dtype == DType::kFloat32", "false"),
    Mutant(DOT_PRODUCT, "op.num_columns + kPanelColumns - 1", "op.num_columns"),
    Mutant(DOT_PRODUCT, "sum + weight * packed", "weight * packed"),
    Mutant(DOT_PRODUCT, "(1u << part.count) - 1", "~0u"),
    Mutant(DOT_PRODUCT, "k + Step::kStep <= width", "k + Step::kStep < width"),
    Mutant(DOT_PRODUCT, "k < width", "false"),
    Mutant(DOT_PRODUCT, "first ? sum : *place + sum", "sum"),
    Mutant(DOT_PRODUCT, "result + row * result_stride + column", "result + column"),
    Mutant(DOT_PRODUCT, "rows < kRows", "rows <= kRows"),
    Mutant(
        DOT_PRODUCT,
        "op.num_rows * packed_width<T>(op) * sizeof(typename DotStep<T>::Packed)",
        "op.num_rows * op.source.width * sizeof(typename DotStep<T>::Packed)",
    ),
    Mutant(DOT_PRODUCT, "concat_rstd<T>(op.source, i)", "0.0f"),
    Mutant(DOT_PRODUCT, "first + h", "h"),
    Mutant(DOT_PRODUCT, "round_to(value, T{})", "value"),
    Mutant(DOT_PRODUCT, "(width - op.source.width) * sizeof *packed", "0"),
    Mutant(DOT_PRODUCT, "op.bias.data != nullptr", "false"),
    Mutant(DOT_PRODUCT, "op.post_norm_gain.data == nullptr ? 0 : fp32_rows_bytes(op)", "0"),
    Mutant(DOT_PRODUCT, "op.post_norm_gain.data == nullptr ? 0 : workspace", "0"),
    Mutant(DOT_PRODUCT, "op.num_rows - i < tile_rows ? op.num_rows - i : tile_rows", "tile_rows"),
    Mutant(DOT_PRODUCT, "k + kBlockK < op.source.width ? kBlockK : op.source.width - k", "op.source.width - k"),
    Mutant(DOT_PRODUCT, "d + kColumns <= end", "d + kColumns <= end + 1"),
    Mutant(DOT_PRODUCT, "packed_rows<T>(op) + i * width + k", "packed_rows<T>(op) + i * width"),
    Mutant(FLOAT_PRODUCT, "i % kTogether", "(i + 1) % kTogether"),
    Mutant(FLOAT_PRODUCT, "any_is_nan(place(i, k), count)", "any_is_nan(place(i, 0), count)"),
    Mutant(
        FLOAT_PRODUCT,
        'is_nan ? __builtin_nanf("") : scales_numbers ? units[place] : kRunUnit<Number>',
        "scales_numbers ? units[place] : kRunUnit<Number>",
    ),
    Mutant(FLOAT_PRODUCT, "is_nan = false", "is_nan = is_nan"),
    Mutant(FLOAT_PRODUCT, "total * unit * scale", "total * scale"),
    Mutant(FLOAT_PRODUCT, "op.scales.global == nullptr ? 1.0f : *op.scales.global", "1.0f"),
    Mutant(FLOAT_PRODUCT, "op.scales.block_rows == 1 ? d : d / op.scales.block_rows", "d"),
    Mutant(FLOAT_PRODUCT, "row + (k >> scale_shift)", "row"),
    Mutant(FLOAT_PRODUCT, "(count + size - 1) >> scale_shift", "count >> scale_shift"),
    Mutant(FLOAT_PRODUCT, "size - k % size", "size"),
    Mutant(FLOAT_PRODUCT, "i * 128 < count", "(i + 1) * 128 < count"),
    Mutant(FLOAT_PRODUCT, "left == 0", "true"),
    Mutant(FLOAT_PRODUCT, "k + kRunNumbers <= count", "true"),
    Mutant(FLOAT_PRODUCT, "column >> this->scale_shift", "column >> 4"),
    Mutant(FLOAT_PRODUCT, "scales[column][k >> scale_shift]", "scales[0][k >> scale_shift]"),
    Mutant(FLOAT_PRODUCT, "codes + column * row_bytes", "codes"),
    Mutant(WIDEN_CODES, "numbers[i / 2] >> 4 * (i % 2) & 15", "numbers[i / 2] >> 4 * (1 - i % 2) & 15"),
    Mutant(WIDEN_CODES, "(codes[k] & 0x7f) == 0x7f", "codes[k] == 0x7f", isa="avx2"),
    Mutant(WIDEN_CODES, "_mm256_max_epu8(largest[0], largest[1])", "largest[0]", isa="avx2"),
    Mutant(WIDEN_CODES, "_mm256_max_epu8(largest[0], largest[1])", "largest[1]", isa="avx2"),
    Mutant(WIDEN_CODES, "_mm256_or_si256(_mm256_loadu_si256(bytes), sign)", "_mm256_loadu_si256(bytes)", isa="avx2"),
    Mutant(WIDEN_CODES, "_mm256_set1_epi16(~0x4000)", "_mm256_set1_epi16(~0)", isa="avx2"),
    Mutant(WIDEN_CODES, "codes + 4 * v", "codes", isa="avx2"),
    Mutant(WIDEN_CODES, "_mm256_slli_epi32(index, 28)", "_mm256_slli_epi32(index, 27)", isa="avx2"),
    Mutant(
        WIDEN_CODES,
        "load(kCodeTable<Float4E2M1>.values, Whole{}) * scale",
        "load(kCodeTable<Float4E2M1>.values, Whole{})",
        isa="avx2",
    ),
    Mutant(STRIPS, "part % 8 >= 4", "part % 8 >= 5"),
    Mutant(STRIPS, "rows >= 4 && bytes >= kCacheLine", "bytes >= kCacheLine"),
    Mutant(STRIPS, "rows >= 4 && bytes >= kCacheLine", "rows >= 4"),
    Mutant(STRIPS, "bytes >= kCacheLine ? ~0ull : (1ull << bytes) - 1", "~0ull"),
    Mutant(STRIPS, "row < rows && row < 4", "row < 4"),
    Mutant(WIDEN_CODES, "(code == 0) | (code == 255)", "code == 255"),
    Mutant(WIDEN_CODES, "(code == 0) | (code == 255)", "code == 0"),
    Mutant(WIDEN_CODES, "(magnitude << 20) + (120 << 23)", "(magnitude << 20) + (119 << 23)"),
    Mutant(WIDEN_CODES, "magnitude < 8 ? (UInt)subnormal : normal", "normal"),
    Mutant(WIDEN_CODES, "magnitude == 0x7f ? UInt{} + 0x7fc00000 : number", "number"),
    Mutant(WIDEN_CODES, "(code & 0x80) << 24", "UInt{}"),
    Mutant(SCALES, "type == ScaleType::kFloat32 ? sizeof(float) : 1", "sizeof(float)"),
    Mutant(SCALES, "begin + i < op.num_columns ? begin + i : op.num_columns - 1", "begin + i"),
    Mutant(SCALES, "column / op.scales.block_rows * op.scales.row_stride", "column * op.scales.row_stride"),
    Mutant(SCALES, "op.scales.global == nullptr ? 1.0f : *op.scales.global", "1.0f"),
    Mutant(SCALES, "(first + i) * sizeof(float)", "first * sizeof(float)"),
    Mutant(SCALES, "rows[0] == rows[kPanelColumns - 1]", "rows[0] == rows[1]"),
    Mutant(SCALES, "load(values + v * kLanes, Whole{}) * global", "load(values + v * kLanes, Whole{})"),
    Mutant(SCALES, "count == 4", "true"),
    Mutant(
        SCALES,
        "static_cast<uint32_t>(rows[column][first + i]) << 8 * i",
        "static_cast<uint32_t>(rows[column][first + i])",
    ),
    Mutant(SCALES, "of_numbers ? 1.0f : global", "1.0f"),
    Mutant(STRIP_PRODUCT, "(Float)(words & 0xffff0000) * x[1]", "(Float)words * x[1]"),
    Mutant(STRIP_PRODUCT, "k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width", "sums.width"),
    Mutant(
        STRIP_PRODUCT,
        "multiply_add(sum[i], (*scales)[i % kStripVectors], joined[i])",
        "multiply_add(sum[i], (*scales)[0], joined[i])",
    ),
    Mutant(STRIP_PRODUCT, "(k + 2 * pair) * kRows + 2 * row", "2 * pair * kRows + 2 * row"),
    Mutant(STRIP_PRODUCT, "(k + 2 * pair) * kRows + 2 * row", "(k + 2 * pair) * kRows"),
    Mutant(STRIP_PRODUCT, "column % 2 != 0", "false"),
    Mutant(STRIP_PRODUCT, "pair(column + i)[(column + i) % 2]", "pair(column + i)[0]"),
    Mutant(STRIP_PRODUCT, "(column / 2 * op.num_rows + row) * 2", "column / 2 * op.num_rows * 2"),
    Mutant(STRIP_PRODUCT, "packed_rows<T>(op) + k * op.num_rows", "packed_rows<T>(op) + k"),
    Mutant(STRIP_PRODUCT, "k + 1 < op.source.num_chunks", "true"),
    Mutant(STRIP_PRODUCT, "op.num_rows < kRows", "op.num_rows <= kRows"),
    Mutant(STRIP_PRODUCT, "op.num_rows * kStripVectors * sizeof(Float)", "0"),
    Mutant(STRIPS, "bytes > 0", "true"),
    Mutant(
        STRIPS,
        "op.num_columns - begin < kPanelColumns ? op.num_columns - begin : kPanelColumns",
        "kPanelColumns",
    ),
    Mutant(SCALES, "block_columns < kWidth ? block_columns : kWidth", "kWidth"),
    Mutant(SCALES, "sums.width = columns", "sums.width = round_up(columns, 4)"),
    Mutant(SCALES, "k % block_columns != 0", "k != 0"),
    Mutant(SCALES, "k / block_columns", "0"),
    Mutant(SCALES, "(columns - 1) / block_columns + 1", "columns / block_columns + 1"),
    Mutant(SCALES, "i * sums.sum_width / block_columns", "i"),
    Mutant(STRIP_PRODUCT, "codes.strip(k + kStripWidth)", "codes.strip(k)"),
    Mutant(PACK_GROUPS, "op.num_rows - first < kGroupRows ? op.num_rows - first : kGroupRows", "kGroupRows"),
    Mutant(PACK_GROUPS, "concat_rstd<T>(source, first + i)", "concat_rstd<T>(source, first)"),
    Mutant(
        PACK_GROUPS,
        "chunk_end <= begin || chunk.column >= end",
        "false",
        "an equal function: the statistics of a chunk without a column here are computed in vain",
    ),
    Mutant(PACK_GROUPS, "source_row(chunk, first + i)", "source_row(chunk, i)"),
    Mutant(PACK_GROUPS, "begin > chunk.column ? begin - chunk.column : 0", "0"),
    Mutant(PACK_GROUPS, "chunk_end < end ? chunk_end : end", "chunk_end"),
    Mutant(PACK_GROUPS, "last - from < room ? last : from + room", "from + room"),
    Mutant(PACK_GROUPS, "value = round_to(value, T{})", "value"),
    Mutant(PACK_GROUPS, "(group + 1) * parts < end ? (group + 1) * parts : end", "end"),
    Mutant(LANES, "k / kLineColumns * kLineColumns", "0 * kLineColumns"),
    Mutant(LANES, "lane * kCodesPerLane<Code> / block_columns", "0", isa="avx512_bf16"),
    Mutant(LANES, "bytes >= kLineBytes", "true"),
    Mutant(LANES, "(1ull << bytes) - 1", "~0ull"),
    Mutant(LANES, "place + i * 2 * kLanes", "place"),
    Mutant(LANES, "(columns - 1) / block_columns + 1", "columns / block_columns + 1", isa="avx512_bf16"),
    Mutant(LANES, "scales.rows[row] + k / block_columns", "scales.rows[row]", isa="avx512_bf16"),
    Mutant(LANES, "scales.rows[row] + k / block_columns", "scales.rows[0] + k / block_columns", isa="avx512_bf16"),
    Mutant(LANES, "(Float)(words & 0xffff0000)", "(Float)words"),
    Mutant(
        LANES,
        "width - k < kStripWidth ? width - k : kStripWidth",
        "kStripWidth",
        survives="an equal function: what is behind the width is zero in both operands",
        isa="avx512_bf16",
    ),
    Mutant(LANES, "exponents_of(op, begin + row)", "exponents_of(op, begin)", isa="avx512_bf16"),
    Mutant(LANES, "next[row]->column() < k + kStripWidth", "false", isa="avx512_bf16"),
    Mutant(
        LANES,
        "column >= 0",
        "true",
        survives="a damaged file's number is stored in front of the others, on the stack: a sanitizer sees it",
        isa="avx512_bf16",
    ),
    Mutant(
        LANES,
        "(kStripWidth - left) * sizeof *numbers",
        "0",
        survives="a row ends in zeros in every file but a damaged one, where they may be NaN",
        isa="avx512_bf16",
    ),
    Mutant(LANES, "k < rows.codes.width ? kSteps : 0", "kSteps"),
    Mutant(LANES, "row < rows->codes.rows", "true"),
    Mutant(
        LANES,
        "bytes_of<Code>(rows->codes.width - k) - part * kLineBytes",
        "bytes_of<Code>(rows->codes.width - k)",
    ),
    Mutant(LANES, "place += kStripWidth / kLines", "place"),
    Mutant(LANES, "rows->codes.row_stride - kLines * kLineBytes", "rows->codes.row_stride"),
    Mutant(LANES, "k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width", "sums.width"),
    Mutant(LANES, "g * kPackedGroup + (k + i * kBroadcast) * kLanes", "(k + i * kBroadcast) * kLanes"),
    Mutant(LANES, "g * kPackedGroup + (k + i * kBroadcast) * kLanes", "g * kPackedGroup + k * kLanes"),
    Mutant(LANES, "place + c * kStripWidth + i * kBroadcast * kLanes", "place + c * kStripWidth"),
    Mutant(LANES, "multiply_add(sum[i], Float{} + scales[i / kGroups], *joined)", "sum[i] * scales[i / kGroups]"),
    Mutant(LANES, "totals[i % kGroups * kPanelColumns + i / kGroups] += of_strip[i]", "of_strip[i]"),
    Mutant(LANES, "shared = next", "shared", "the lines are widened once more"),
    Mutant(LANES, "fit < kPassGroups ? fit : kPassGroups", "kPassGroups", "the same numbers from fewer passes"),
    Mutant(LANES, "round_up(columns.filled, kStripWidth)", "columns.filled"),
    Mutant(LANES, "left < kLanes ? left : kLanes", "kLanes"),
    Mutant(LANES, "count * kPanelColumns * sizeof(Float)", "0"),
    Mutant(LANES, "groups * (pass + 1) / passes - first", "groups * (pass + 1) / passes"),
    Mutant(LANES, "first + group", "group"),
    *(
        Mutant(file, original, fault, isa="avx512_bf16")
        for file, original, fault in (
            (
                STRIPS,
                "kIsCode<Code> ? op.weight_row_stride : bytes_of<Code>(op.weight_row_stride)",
                "op.weight_row_stride",
            ),
            (LANES, "kMayGoOn<Packed> && sums.go_on", "false"),
            (LANES, "go_on && k < sums.width", "go_on"),
            (LANES, "(Float)((UInt)sum[i] & stays_here)", "Float{}"),
            (LANES, "(Float)((UInt)sum[i] & ~stays_here)", "sum[i]"),
            (LANES, "scales.global", "1.0f"),
            (SCALES, "Float{} + 1.0f", "Float{}"),
            (SCALES, "scale < least ? scale : least", "least"),
            (SCALES, "scale > most ? scale : most", "most"),
            (SCALES, "most - least > 16 * kExponent", "most != most"),
            (SCALES, "least < kExponent", "least != least"),
            (SCALES, "most >= 255 * kExponent", "most != most"),
            (SCALES, "i + 1 < count", "i + 2 < count"),
            (
                SCALES,
                "scale - (UInt)sums.scales[i + 1][v] + 127 * kExponent",
                "(UInt)sums.scales[i + 1][v] - scale + 127 * kExponent",
            ),
            (SCALES, "(stays & scale) | (~stays & ratio)", "ratio"),
            (SCALES, "any[lane] != 0", "false"),
            (STRIP_PRODUCT, "kMayGoOn<Packed> && sums.go_on", "false"),
            (STRIP_PRODUCT, "go_on && k < sums.width", "go_on"),
            (STRIP_PRODUCT, "(Float)((UInt)sum[i] & stays)", "Float{}"),
            (STRIP_PRODUCT, "(Float)((UInt)sum[i] & ~stays)", "sum[i]"),
            (
                SCALES,
                "op.scales.type == ScaleType::kFloat8E8M0 && op.scales.global == nullptr",
                "op.scales.global == nullptr",
            ),
        )
    ),
    Mutant(
        SCALES,
        "op.scales.type == ScaleType::kFloat8E8M0 && op.scales.global == nullptr",
        "op.scales.type == ScaleType::kFloat8E8M0",
        survives="one global scale gives all of them one mantissa: their ratios stay powers of two",
        isa="avx512_bf16",
    ),
    Mutant(
        SCALES,
        "are_powers && block_columns < kStripWidth",
        "are_powers",
        survives="an equal function: a strip in one block is one sum, behind which none goes on",
        isa="avx512_bf16",
    ),
    Mutant(WIDEN_CODES, "_mm512_srli_epi32(codes, 8 * pair)", "codes"),
    Mutant(WIDEN_CODES, "_mm512_slli_epi32(low, 12)", "low"),
    Mutant(WIDEN_CODES, "kIsInteger ? _mm512_min_epu8(codes, _mm512_sub_epi8(__m512i{}, codes)) : codes", "codes"),
    Mutant(WIDEN_CODES, "_mm512_add_epi8(high, _mm512_shuffle_epi8(_mm512_set1_epi8(-0x43), magnitudes))", "high"),
    Mutant(WIDEN_CODES, "or_masked(high, codes, _mm512_set1_epi8(-128))", "high"),
    Mutant(WIDEN_CODES, "_mm512_unpacklo_epi8(low, high)", "_mm512_unpackhi_epi8(low, high)"),
    Mutant(WIDEN_CODES, "_mm512_test_epi16_mask(indices, _mm512_set1_epi16(0x40))", "static_cast<__mmask32>(0)"),
    Mutant(WIDEN_CODES, "_mm512_slli_epi16(indices, 8)", "indices"),
    Mutant(
        WIDEN_CODES,
        "_mm512_srai_epi32(_mm512_slli_epi32(codes, left), 24)",
        "_mm512_srli_epi32(_mm512_slli_epi32(codes, left), 24)",
    ),
    Mutant(WIDEN_CODES, "_mm512_srli_epi32(even, 16)", "even"),
    Mutant(PRIMITIVE, 'check_no_overlap(op, "out", out, *bias)', "void()"),
    Mutant(PRIMITIVE, 'check_no_overlap(op, "out", out, *post_norm_gain)', "void()"),
    Mutant(PRIMITIVE, 'check_eps(op, "post_norm_eps", post_norm_eps)', "void()"),
    Mutant(PRIMITIVE, 'check_no_overlap(kOp, "out", out, weight)', "void()"),
    Mutant(PRIMITIVE, 'check_rows(op, "codes", codes)', "void()"),
    Mutant(PRIMITIVE, 'check_rows(op, "scales", scales)', "void()"),
    Mutant(PRIMITIVE, 'check_no_overlap(op, "out", out, codes)', "void()"),
    Mutant(PRIMITIVE, 'check_no_overlap(op, "out", out, scales)', "void()"),
    Mutant(PRIMITIVE, 'check_no_overlap(op, "out", out, *global_scale)', "void()"),
    Mutant(PRIMITIVE, 'check_dtype(op, "global_scale", *global_scale, kTorchFloat)', "void()"),
    Mutant(PRIMITIVE, 'check_device(op, "codes", codes, sources.first)', "void()"),
    Mutant(PRIMITIVE, 'check_device(op, "scales", scales, sources.first)', "void()"),
    Mutant(PRIMITIVE, 'check_device(op, "global_scale", *global_scale, sources.first)', "void()"),
    Mutant(PRIMITIVE, 'check_shape(op, "codes", codes, out.size(1), row_bytes(type, width))', "void()"),
    Mutant(
        PRIMITIVE,
        'check_shape(op, "scales", scales, num_blocks(columns, block_rows), num_blocks(width, block_columns))',
        "void()",
    ),
    Mutant(
        PRIMITIVE, "codes.dtype == kTorchFloat8E4M3 || codes.dtype == kTorchInt8 || codes.dtype == kTorchByte", "true"
    ),
    Mutant(
        PRIMITIVE,
        "scales.dtype == kTorchFloat || scales.dtype == kTorchFloat8E8M0 || scales.dtype == kTorchFloat8E4M3",
        "true",
    ),
    Mutant(PRIMITIVE, "type != WeightType::kFloat4E2M1 || width % 2 == 0", "true"),
    Mutant(PRIMITIVE, "type != WeightType::kBFloat16In12 || record.source.dtype == DType::kBFloat16", "true"),
    Mutant(PRIMITIVE, "scales.size(1) >= 32 && scales.size(1) % 4 == 0", "true"),
    Mutant(PRIMITIVE, 'check_shape(op, "scales", scales, columns, scales.size(1))', "void()"),
    Mutant(PRIMITIVE, "size / block + (size % block != 0)", "size / block"),
    Mutant(
        PRIMITIVE, "block_rows >= 1 && is_block_width(block_columns, width)", "is_block_width(block_columns, width)"
    ),
    Mutant(
        PRIMITIVE,
        "columns >= width || columns == 16 || columns == 32 || columns == 64",
        "columns >= width || columns % 4 == 0",
    ),
    Mutant(PRIMITIVE, "columns > 0 && columns % 128 == 0", "columns % 128 == 0"),
    Mutant(PRIMITIVE, "global_scale->numel() == 1", "true"),
    Mutant(PLAN, "min(tiles.BK, problem.block_columns)", "tiles.BK"),
    Mutant(PLAN, "if problem.scales_sums else", "if not problem.scales_sums else"),
    Mutant(PLAN, "min(problem.rows, _MAX_TUNED_ROWS)", "problem.rows"),
    Mutant(PLAN, "if len(problem.widths) != 1:", "if len(problem.widths) > 2:"),
    Mutant(PLAN, "if H % 16 or not problem.elements_aligned:", "if not problem.elements_aligned:"),
    Mutant(PLAN, "if H % 16 or not problem.elements_aligned:", "if H % 16:"),
    Mutant(PLAN, "if shared < problem.num_chunks * H and H % shared:", "if H % shared:"),
    Mutant(PLAN, "if shared < problem.num_chunks * H and H % shared:", "if False:"),
    Mutant(PLAN, "split_only=True)", "split_only=False)"),
    Mutant(PLAN, "if rows <= 4 or block_columns > 128:", "if rows <= 5 or block_columns > 128:"),
    Mutant(PLAN, "if rows <= 4 or block_columns > 128:", "if rows <= 4:"),
    Mutant(PLAN, "if rows <= 4 or block_columns > 128:", "if rows <= 4 or block_columns > 16:"),
    Mutant(PLAN, "return rows <= 8", "return rows <= 9"),
    Mutant(PLAN, "return rows == 1", "return rows <= 2"),
    Mutant(PLAN, "return 7 <= rows <= 16 and code_bits == 4", "return 6 <= rows <= 16 and code_bits == 4"),
    Mutant(PLAN, "return 7 <= rows <= 16 and code_bits == 4", "return 7 <= rows <= 16"),
    Mutant(PLAN, "split_only=invariant or split_only", "split_only=invariant"),
    Mutant(PLAN, '(unsupported := unsupported_reason("triton", problem.device)) is None', "True"),
    Mutant(PLAN, "_CUDA_STEP_COLUMNS if problem.in_blocks", "_CUDA_STEP_COLUMNS if not problem.in_blocks"),
    Mutant(PLAN, "shared < _CUDA_STEP_COLUMNS or shared & (shared - 1)", "shared < _CUDA_STEP_COLUMNS"),
    Mutant(PLAN, "if problem.in_blocks and problem.has_int8:", "if False:"),
    Mutant(PLAN, "in_tiles = not problem.in_blocks or all(", "in_tiles = problem.in_blocks or all("),
    Mutant(PLAN, "in_tiles or _fused_scales_codes(problem)", "in_tiles"),
    Mutant(PLAN, "is_mxfp8 and not problem.has_residuals", "is_mxfp8"),
    Mutant(PLAN, "not problem.scales_aligned", "False"),
    Mutant(PLAN, "SETTINGS.batch_invariant or rows <= max_rows", "rows <= max_rows"),
    Mutant(PLAN, "SETTINGS.batch_invariant or rows <= max_rows", "SETTINGS.batch_invariant or rows < max_rows"),
    Mutant(QUANTIZED_WEIGHT, "if codes.dim() != 2:", "if codes.dim() > 2:"),
    Mutant(QUANTIZED_WEIGHT, 'checks.check_last_dim_contiguous(OP, "codes", codes)', "pass"),
    Mutant(QUANTIZED_WEIGHT, 'checks.check_last_dim_contiguous(OP, "scales", scales)', "pass"),
    Mutant(QUANTIZED_WEIGHT, "format.columns_per_code > 1 and W % block[1]", "False"),
    Mutant(QUANTIZED_WEIGHT, "scales.dtype == torch.uint8 and E8M0 in format.scales", "False"),
    Mutant(QUANTIZED_WEIGHT, "if sum(shards) != D:", "if sum(shards) > D:"),
    Mutant(
        QUANTIZED_WEIGHT,
        "scales.dim() < 2 and scales.numel() == shape[0] * shape[1]",
        "scales.numel() == shape[0] * shape[1]",
    ),
    Mutant(QUANTIZED_WEIGHT, "if tuple(scales.shape) != shape:", "if scales.shape[0] != shape[0]:"),
    Mutant(QUANTIZED_WEIGHT, "len(shards) == 1 or", ""),
    Mutant(QUANTIZED_WEIGHT, "rows % block[0] == 0 for rows in shards[:-1]", "rows % block[0] == 0 for rows in shards"),
    Mutant(QUANTIZED_WEIGHT, "rows % block[0] == 0 for rows in shards[:-1]", "True for rows in shards[:-1]"),
    Mutant(QUANTIZED_WEIGHT, "[0, *block_rows[:-1]]", "[0, *block_rows[1:]]"),
    Mutant(QUANTIZED_WEIGHT, "if self.block[1] >= self.shape[1]:", "if self.block[1] > self.shape[1]:"),
    Mutant(QUANTIZED_WEIGHT, "kind == E8M0 and dtype != torch.float16", "kind == E8M0"),
    Mutant(
        QUANTIZED_WEIGHT,
        "torch.float64 if dtype == torch.float64 else torch.float32",
        "torch.float32",
    ),
    Mutant(QUANTIZED_WEIGHT, "// rows : (end - 1) // rows + 1]", "// rows : end // rows]"),
    Mutant(QUANTIZED_WEIGHT, "row - begin // rows", "row"),
    Mutant(QUANTIZED_WEIGHT, "[:, : self.shape[1]]", ""),
    Mutant(QUANTIZED_WEIGHT, "blocks * self.global_scale.to(dtype)", "blocks"),
    Mutant(QUANTIZED_WEIGHT, "if value.numel() != 1:", "if value.numel() > 2:"),
    Mutant(QUANTIZED_WEIGHT, "torch.stack((codes & 15, codes >> 4), -1)", "torch.stack((codes >> 4, codes & 15), -1)"),
    Mutant(QUANTIZED_WEIGHT, "if not magnitudes.isfinite().all():", "if magnitudes.isnan().any():"),
    Mutant(QUANTIZED_WEIGHT, "kind.columns_of_a_row is not None and W % columns", "W % columns"),
    Mutant(QUANTIZED_WEIGHT, "weight.dim() != 2 or 0 in weight.shape", "weight.dim() != 2"),
    Mutant(QUANTIZED_WEIGHT, "(mantissa == 0.5).int()", "(mantissa > 0).int()"),
    Mutant(QUANTIZED_WEIGHT, "not abs(number) <= torch.finfo(torch.float32).max", "False"),
    Mutant(QUANTIZED_WEIGHT, "return _one_for_zero(largest / format.max), None", "return largest / format.max, None"),
    Mutant(QUANTIZED_WEIGHT, "largest.amax() / (format.max * 448.0)", "largest.amax() / format.max"),
    Mutant(
        QUANTIZED_WEIGHT,
        "scaled.clamp(-format.max, format.max)",
        "scaled",
        "what division rounds to beyond the largest code is rounded to that code in every format",
    ),
    Mutant(QUANTIZED_WEIGHT, "scaled.round().to(torch.int8)", "scaled.to(torch.int8)"),
    Mutant(QUANTIZED_WEIGHT, " + torch.isin(magnitude, bounds[1::2])", ""),
    Mutant(QUANTIZED_WEIGHT, "code + 8 * (scaled < 0)", "code"),
    Mutant(QUANTIZED_WEIGHT, "code[:, 0::2] | code[:, 1::2] << 4", "code[:, 1::2] | code[:, 0::2] << 4"),
    Mutant(QUANTIZED_WEIGHT, "(0, 0, 0, -D % rows)", "(0, 0, -D % rows, 0)"),
    Mutant(QUANTIZED_CHECKPOINT, "if parameter not in read and", "if False and"),
    Mutant(QUANTIZED_CHECKPOINT, "if not codes:", "if False:"),
    Mutant(QUANTIZED_CHECKPOINT, "if len(codes) > 1:", "if len(codes) > 2:"),
    Mutant(QUANTIZED_CHECKPOINT, "return parameter in _UNREAD or", "return"),
    Mutant(QUANTIZED_CHECKPOINT, "or _RANGE.fullmatch(parameter) is not None", ""),
    Mutant(QUANTIZED_CHECKPOINT, "scale = scale.reshape(1, 1).repeat(D, 1)", "pass"),
    Mutant(QUANTIZED_CHECKPOINT, 'given[0] == _DIVISOR and "weight" in names', "False"),
    Mutant(QUANTIZED_CHECKPOINT, "if len(scale_names) > 1:", "if len(scale_names) > 2:"),
    Mutant(QUANTIZED_CHECKPOINT, "        if scale_names:\n", "        if False:\n"),
    Mutant(QUANTIZED_CHECKPOINT, "if tuple(codes.shape) != shape:", "if codes.shape[0] != shape[0]:"),
    Mutant(QUANTIZED_CHECKPOINT, "if not scale_names:", "if False:"),
    Mutant(QUANTIZED_CHECKPOINT, "if (missing := scales.float().isnan()).any():", "if False and (missing := scales):"),
    Mutant(QUANTIZED_CHECKPOINT, "check_format(op, codes_name, fits, config)", "fits[0]"),
    Mutant(
        QUANTIZED_CHECKPOINT, "if scales.dtype in (torch.bfloat16, torch.float16):", "if scales.dtype == torch.float16:"
    ),
    Mutant(
        QUANTIZED_CHECKPOINT,
        "if scales.dtype in (torch.bfloat16, torch.float16):",
        "if scales.dtype == torch.bfloat16:",
    ),
    Mutant(QUANTIZED_CHECKPOINT, "scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1", "False"),
    Mutant(QUANTIZED_CHECKPOINT, "code.dtype == torch.int8 and tuple(code.shape) == (D, W // 2)", "False"),
    Mutant(QUANTIZED_CHECKPOINT, " and scale.dtype in (torch.uint8, E8M0):", ":"),
    Mutant(QUANTIZED_CHECKPOINT, "if not kinds:", "if False:"),
    Mutant(QUANTIZED_CHECKPOINT, "if tuple(code.shape) != (D, columns):", "if code.shape[0] != D:"),
    Mutant(
        QUANTIZED_CHECKPOINT,
        "(*format.scales, torch.uint8) if E8M0 in format.scales else format.scales",
        "format.scales",
    ),
    Mutant(QUANTIZED_CHECKPOINT, "if scale.dim() < 2:", "if False:"),
    Mutant(QUANTIZED_CHECKPOINT, "if scale.dim() < 2:", "if True:"),
    Mutant(
        QUANTIZED_CHECKPOINT, 'if format != "nvfp4":\n        if given:', 'if format != "nvfp4":\n        if False:'
    ),
    Mutant(QUANTIZED_CHECKPOINT, "if len(given) != 1:", "if len(given) > 1:"),
    Mutant(QUANTIZED_CHECKPOINT, "if len(given) != 1:", "if not given:"),
    Mutant(
        QUANTIZED_CHECKPOINT,
        "if scale.numel() != 1 or scale.dtype not in (*checks.DTYPES, torch.float64):",
        "if scale.dtype not in (*checks.DTYPES, torch.float64):",
    ),
    Mutant(
        QUANTIZED_CHECKPOINT,
        "if scale.numel() != 1 or scale.dtype not in (*checks.DTYPES, torch.float64):",
        "if scale.numel() != 1 or not scale.dtype.is_floating_point:",
    ),
    Mutant(QUANTIZED_CHECKPOINT, "multiplier == 0 or not multiplier.isfinite()", "multiplier == 0"),
    Mutant(QUANTIZED_CHECKPOINT, "multiplier == 0 or not multiplier.isfinite()", "not multiplier.isfinite()"),
    Mutant(QUANTIZED_CHECKPOINT, 'got = f"{scale_name} is {in_file.dtype}', 'got = f"{scale_name} is {scale.dtype}'),
    Mutant(QUANTIZED_WEIGHT, 'if format == "nvfp4":', "if False:"),
    Mutant(QUANTIZED_CHECKPOINT, "not value.isfinite() or value <= 0", "not value.isfinite()"),
    Mutant(QUANTIZED_CHECKPOINT, "not value.isfinite() or value <= 0", "value <= 0"),
    Mutant(QUANTIZED_CHECKPOINT, "value if given[0] == _MULTIPLIER else 1 / value", "value"),
    Mutant(QUANTIZATION_CONFIG, "        if not meant:\n", "        if False:\n"),
    Mutant(QUANTIZATION_CONFIG, "_ALGORITHMS.get(algorithm.upper(), ())", "_ALGORITHMS.get(algorithm, ())"),
    Mutant(QUANTIZATION_CONFIG, "if block is not None and not is_left_out:", "if isinstance(block, list):"),
    Mutant(QUANTIZATION_CONFIG, "if entries and not is_left_out:", "if False:"),
    Mutant(QUANTIZATION_CONFIG, "if entries and not is_left_out:", "if entries:"),
    Mutant(QUANTIZATION_CONFIG, "_matches(entry, path) or fnmatch.filter(names, entry)", "_matches(entry, path)"),
    Mutant(QUANTIZATION_CONFIG, "if len(entries) > 1:", "if False:"),
    Mutant(QUANTIZATION_CONFIG, 'return () if scheme == "per_group" else ("int8_row",)', 'return ("int8_row",)'),
    Mutant(QUANTIZATION_CONFIG, "if isinstance(scheme, str | None) else ()", ""),
    Mutant(QUANTIZATION_CONFIG, "if isinstance(structure, str):", "if False:"),
    Mutant(QUANTIZATION_CONFIG, "if method is not None and not is_left_out and not (", "if False and not ("),
    Mutant(QUANTIZATION_CONFIG, "is_left_out = leaves_out(config, path)", "is_left_out = False"),
    Mutant(QUANTIZATION_CONFIG, "of_all = {} if is_left_out else config", "of_all = config"),
    Mutant(QUANTIZATION_CONFIG, 'and method_of(config) in (None, "compressed-tensors")', ""),
    Mutant(QUANTIZATION_CONFIG, "isinstance(size, int) and any(", "False and any("),
    Mutant(QUANTIZATION_CONFIG, "    if meant is not None:\n", "    if False:\n"),
    Mutant(QUANTIZATION_CONFIG, "if of_compression and not is_left_out:", "if False:"),
    Mutant(QUANTIZATION_CONFIG, 'weights.get("type", "int") != "float"', "False"),
    Mutant(QUANTIZATION_CONFIG, "name == path or path.endswith(", "path.endswith("),
    Mutant(QUANTIZATION_CONFIG, 'or any(_matches(name, path) for name in _list(config.get("ignore")))', ""),
    Mutant(QUANTIZATION_CONFIG, "{**inline, HF_FILE: beside}", "inline"),
    Mutant(QUANTIZATION_CONFIG, "{**config, **own}", "config"),
    Mutant(QUANTIZATION_CONFIG, 'f"re:(?:{pattern}){_END_OF_A_PART}"', 'f"re:(?:{pattern})"'),
    Mutant(QUANTIZATION_CONFIG, "if not _OF_PATTERNS.isdisjoint(entry)]", "]"),
    Mutant(QUANTIZATION_CONFIG, "entry.strip('.')", "entry"),
    Mutant(QUANTIZATION_CONFIG, "in override.values.items() if value is not None}", "in override.values.items()}"),
    Mutant(QUANTIZATION_CONFIG, "self.entry if key in self.own else", "self.entry if True else"),
    Mutant(QUANTIZATION_CONFIG, "bits >= 16", "bits > 16"),
    Mutant(QUANTIZATION_CONFIG, "return not names or any(", "return True or any("),
    Mutant(QUANTIZATION_CONFIG, 'f"re:.*(?:{name})"', 'f"re:{name}"'),
    Mutant(QUANTIZATION_CONFIG, "if path in entries:", "if False:"),
    Mutant(QUANTIZATION_CONFIG, "and override.is_name", ""),
    Mutant(QUANTIZATION_CONFIG, "FORMATS[format].bits == bits", "True"),
    Mutant(QUANTIZATION_CONFIG, "if not file.exists():", "if False:"),
    Mutant(QUANTIZATION_CONFIG, "except (ValueError, RecursionError) as failure:", "except ValueError as failure:"),
    Mutant(QUANTIZATION_CONFIG, "section.get(key) if isinstance(section, dict) else None", "section.get(key)"),
    Mutant(QUANTIZATION_CONFIG, "if section is not None:", "if False:"),
    Mutant(QUANTIZED_LINEAR, "if isinstance(child, _LoadsWhole) and (wrong", "if False and (wrong"),
    Mutant(QUANTIZED_LINEAR, "if own.keys() != {*names}:", "if False:"),
    Mutant(QUANTIZED_LINEAR, "if given.dtype != buffer.dtype:", "if False:"),
    Mutant(QUANTIZED_LINEAR, "if given.shape != buffer.shape:", "if False:"),
    Mutant(
        QUANTIZED_LINEAR,
        "if wrong := checks.codes_error(LOAD, prefix + name,",
        "if wrong := (lambda *_: None)(LOAD, name,",
    ),
    Mutant(QUANTIZED_LINEAR, "and current.has_tensors_like(weight)", "and False"),
    Mutant(TRITON("dequantize"), "tl.where(first + row < end, row, 0)", "row * 0"),
    Mutant(TRITON("dequantize"), "first + tl.where(", "tl.where("),
    Mutant(TRITON("dequantize"), "(first + row < end)[:, None] & (c < W)[None, :]", "(c < W)[None, :]"),
    Mutant(TRITON("dequantize"), "(first + row < end)[:, None] & (c < W)[None, :]", "(first + row < end)[:, None]"),
    Mutant(TRITON("dequantize"), "(byte < code_columns)[None, :]", "(byte < code_columns - 1)[None, :]"),
    Mutant(TRITON("dequantize"), "value - rounded", "value * 0"),
    Mutant(TRITON("dequantize"), 'tl.abs(rounded) == float("inf")', "rounded != rounded"),
    Mutant(TRITON("dequantize"), "* num_matrices) // 16 * 16, 16)", ") // 16 * 16, 16)"),
    Mutant(TRITON("norm_concat_linear"), "scale = load_scales(scale_ptr", "scale = 1 + 0 * load_scales(scale_ptr"),
    Mutant(TRITON("norm_concat_linear"), "i * N * row_stride + begin", "i * N * row_stride"),
    Mutant(TRITON("norm_concat_linear"), "first_sum + i * N * row_stride", "first_sum"),
    Mutant(TRITON("codes"), 'tl.where(magnitude == 0x7F, float("nan"), value)', "value"),
    Mutant(TRITON("codes"), "tl.where(code >= 0x80, -value, value)", "value"),
    Mutant(TRITON("codes"), "tl.where(code == 0, 0x00400000, code.to(tl.uint32) << 23)", "code.to(tl.uint32) << 23"),
    Mutant(
        TRITON("codes"),
        'tl.where(code == 0xFF, float("nan"), bits.to(tl.uint32).to(tl.float32, bitcast=True))',
        "bits.to(tl.uint32).to(tl.float32, bitcast=True)",
    ),
    Mutant(TRITON("codes"), "tl.where((code & 8) != 0, -value, value)", "value"),
    Mutant(TRITON("codes"), "(block * BLOCK_COLUMNS < last)[None, :]", "(block * BLOCK_COLUMNS <= last)[None, :]"),
    Mutant(TRITON("codes"), "column // BLOCK_COLUMNS + tl.arange(0, COUNT)", "tl.arange(0, COUNT)"),
    Mutant(TRITON("norm_concat_linear"), "w_rows // BLOCK_ROWS if BLOCK_ROWS else w_rows * 0", "w_rows * 0"),
    Mutant(TRITON("norm_concat_linear"), "scaled *= scaled_gain[None, :]", "scaled *= 1.0"),
    Mutant(TRITON("norm_concat_linear"), "total *= global_scale", "total *= 1.0"),
    Mutant(TRITON("norm_concat_linear"), "row_scale *= global_scale", "row_scale *= 1.0"),
    Mutant(TRITON("norm_concat_linear"), "block_scale *= global_scale", "block_scale *= 1.0"),
    Mutant(
        TRITON("norm_concat_linear"),
        "0 if columns >= shape[1] else columns",
        "columns",
        survives="an equal function: the index of the only block is 0 after a division too",
    ),
    Mutant(
        TRITON("norm_concat_linear"),
        '"BLOCK_ROWS": 0 if rows >= shape[0] else rows',
        '"BLOCK_ROWS": rows',
        survives="an equal function: the index of the only block is 0 after a division too",
    ),
    Mutant(TRITON("norm_concat_linear"), '0.0625 if format == "nvfp4" else 0.25', "1.0"),
    Mutant(WORKSPACE, "memory_.bytes > kept_.bytes", "false"),
    *(
        Mutant(AMX, original, fault, isa="amx_bf16")
        for original, fault in (
            ("column / kTileK", "0"),
            ("op.num_rows > 4 ? 8 : 4", "4"),
            ("left < kWidth ? left : kWidth", "kWidth"),
            ("count < kTile || whole_end < block.step", "whole_end < block.step"),
        )
    ),
    Mutant(
        AMX_LINES,
        "any == 0",
        "false",
        survives="a panel with a block of zeros is then multiplied block by block, which is right and slower",
        isa="amx_bf16",
    ),
    *(
        Mutant(file, original, fault, isa="amx_bf16")
        for file, original, fault in (
            (AMX_LINES, "largest[i] - smallest <= kMaxSpread", "true"),
            (AMX_CODES, "groups > 0", "false"),
            (AMX_CODES, "kTwoGroups ? 2 : 1", "1"),
            (AMX_LINES, "any == 0", "true"),
            (AMX_LINES, "exponent < 127", "true"),
            (AMX_LINES, "shared == kTileK ? 0 : 1", "0"),
            (AMX_LINES, "left > block * kBlock ? scales[block] : 0", "scales[block]"),
            (AMX_LINES, "panel.part != block / Panel::kPart", "panel.part < 0"),
            (AMX_LINES, "left >= kPart ? 0xffff : (1 << left) - 1", "0xffff"),
            (AMX_LINES, "i * kTileK / op.scales.block_columns == block", "i == block"),
            (AMX_LINES, "_mm512_subs_epu16(numbers, less_of_lane)", "_mm512_sub_epi16(numbers, less_of_lane)"),
            (AMX_LINES, "std::is_same_v<Code, Float8E4M3> && !kRare", "std::is_same_v<Code, Float8E4M3>"),
            (AMX_CODES, "static_cast<uint32_t>(is_rare) << row", "static_cast<uint32_t>(is_rare)"),
            (AMX_LINES, "static_cast<char>(0xfe - 16)", "static_cast<char>(0xff - 16)"),
            (AMX_CODES, "place.step == 0 && is_inside(block, place)", "place.step == 0"),
            (AMX_CODES, "(panel - panel_begin) % block_panels(op)", "(panel - panel_begin) % 8"),
            (AMX_CODES, "first || scales != nullptr", "first"),
            (AMX_CODES, "i + 1 < pairs || ends", "ends"),
            (AMX_CODES, "i > 0 || begins", "begins"),
            (AMX_CODES, "turn_ == 0 ? i : pairs - 1 - i", "i"),
            (AMX_LINES, "of_row.begin->column() < begin_ + kStretch", "of_row.begin->column() <= begin_ + kStretch"),
        )
    ),
    *(
        Mutant(DOT_CODES, original, fault, isa="avx512_bf16")
        for original, fault in (
            ("scale_rows[0] == scale_rows[kBlockColumns - 1]", "true"),
            ("_mm512_set1_epi16(254)", "_mm512_set1_epi16(255)"),
            ("_mm512_maskz_set1_epi16(odd, 0x40)", "_mm512_setzero_si512()"),
            ("_mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8))", "__mmask32{0}"),
            ("_mm512_cmpeq_epu16_mask(magnitudes, _mm512_set1_epi16(0x7f))", "__mmask32{0}"),
            ("_mm512_slli_epi16(codes, 8)", "codes"),
            ("left >= 2 * kLanes ? ~0u : (1u << left) - 1", "~0u"),
            ("find_blocks(k % block_columns)", "find_blocks(0)"),
            ("source_of<kGroup>(lane)", "lane"),
            ("*op.scales.global", "1.0f"),
            ("k + kUnitColumns > width", "false"),
        )
    ),
    Mutant(WIDEN_12_BITS, "exception.column() < column", "exception.column() <= column"),
    Mutant(WIDEN_12_BITS, "bytes[0] | bytes[1] << 8", "bytes[0]"),
    Mutant(WIDEN_12_BITS, "bytes[2] | bytes[3] << 8", "bytes[2]"),
    Mutant(
        WIDEN_12_BITS,
        "exception->column() >= begin",
        "true",
        "the columns are in order, as `quantize` writes them; it keeps writes inside where they are not",
    ),
    Mutant(BF16_12BIT, "(most & 1) << 7", "(most & 1) << 6"),
    Mutant(BF16_12BIT, "_in_lines(index & 15)", "_in_lines(index)"),
    Mutant(BF16_12BIT, "row + begin, column", "row, column"),
    Mutant(BF16_12BIT, "listed[:, :, 0] = _NO_COLUMN", "pass"),
    *(
        Mutant(CUDA(file), original, fault)
        for file, original, fault in (
            ("mma_ring.cuh", "inside && row < outputs_ - weight_row_", "inside"),
            ("mma_ring.cuh", "inside && source != nullptr", "inside"),
            ("mma_ring.cuh", "copy_row_ >= work_.rows", "copy_row_ >= work_.rows - 1"),
            ("norm_concat_linear.cu", "kBytesOfPair <= device.shared_memory", "true"),
            ("fused_sums.cuh", "rank % 2 - static_cast<int>(threadIdx.y)", "0"),
            ("fused_sums.cuh", "moved(&received)->all", "received.all"),
            ("cut.cuh", "ranges % 2 != 0 || ranges < 4", "ranges % 2 != 0"),
            ("cut.cuh", "ranges % 2 != 0 || ranges < 4", "ranges < 4"),
            ("fused_sums.cuh", "share += kWarps", "share += 2 * kWarps"),
            ("fused_sums.cuh", "pack >= packs", "pack > packs"),
            ("mma_ring.cuh", "row + below >= K::kColumns", "row >= K::kColumns"),
            ("cut.cuh", "!has_room(*cut, blocks.columns)", "false"),
            ("cut.cuh", "us == least && &blocks < kind_of_best", "false"),
            (
                "cut.cuh",
                "us_of_fused(device, is_codes, work) * doubt_of(device, blocks)",
                "us_of_fused(device, is_codes, work)",
            ),
            ("h200.h", "device.multiprocessors == 132 ? 1.05f : std::numeric_limits<float>::infinity()", "1.05f"),
            ("h200.h", "in_pairs ? work.ranges / 2 : work.ranges", "work.ranges"),
            ("h200.h", "in_pairs ? 1 : work.blocks.on_an_sm", "work.blocks.on_an_sm"),
            ("h200.h", "static_cast<float>(work.blocks.columns) / 64", "1"),
            ("mma_ring.cuh", "gain != nullptr && first < width", "gain != nullptr"),
            ("mma_ring.cuh", "column + copy_part_ * kPack < width", "true"),
            ("fused_sums.cuh", "lane % 16 < blocks", "lane % 16 < blocks - 1"),
            ("fused_sums.cuh", "packs - share * 32 < 32 ? packs - share * 32 : 32", "32"),
            (
                "fused_sums.cuh",
                "part * shares_of_block(blocks, K::kColumns) + share / blocks",
                "part * shares_of_block(blocks, K::kColumns)",
            ),
            (
                "fused_sums.cuh",
                "received.squares[part] + 2 * warp + lane / 16",
                "received.squares[part] + 2 * warp",
            ),
            ("mma_ring.cuh", "has_next() && k_tile >= next", "false"),
            (
                "mma_ring.cuh",
                "column + static_cast<int>(arguments.chunks[chunk].width)",
                "column",
            ),
            ("mma_product.cuh", "(k_tile - of.origin)", "(k_tile - 0 * of.origin)"),
            ("mma_product.cuh", "i % 2 * 2 + m % 2", "m % 2 * 2 + i % 2"),
            ("mma_product.cuh", "weight_place_ ^ at_step * kStepBytes", "weight_place_"),
            ("mma_product.cuh", "x_place_ ^ at_step * kStepColumns * 2", "x_place_"),
            ("mma_product.cuh", "gains_place_ + at_step * kStepColumns * 2", "gains_place_"),
            ("mma_ring.cuh", "units() * (range + 1) / ranges", "units() * (range + 1) / ranges - 1"),
            (
                "scales.cuh",
                "of / op.scales.block_rows * op.scales.row_stride",
                "of * op.scales.row_stride",
            ),
            (
                "scales.cuh",
                "output < outputs ? first_output + output : op.num_columns - 1",
                "first_output + output",
            ),
            ("mma_product.cuh", "(column >> arguments_.scale_shift) << arguments_.scale_shift == column", "false"),
            ("mma_product.cuh", "work.first_output / op_.scales.block_rows * op_.scales.row_stride", "0"),
            (
                "mma_product.cuh",
                "column < static_cast<int>(of.chunk.column) + static_cast<int>(of.chunk.width)",
                "true",
            ),
            ("mma_product.cuh", "global_scale_ * scale", "scale"),
            (
                "mma_product.cuh",
                "work_.first_row + 2 * warp_ < op_.num_rows",
                "work_.first_row + 2 * warp_ + 1 < op_.num_rows",
            ),
            ("codes.cuh", "lanes > 0", "false"),
            ("mma_product.cuh", "row_has_nan(kNansInOne ? nan_[0] << m : nan_[m])", "false"),
            ("mma_product.cuh", "nan_[0] << m", "nan_[0]"),
            ("cut.cuh", "cut->parts.count > ranges", "false"),
            ("h200.h", "work.clusters * work.ranges <= device.multiprocessors", "false"),
            ("h200.h", "std::max(waves * busiest, to_read)", "std::min(waves * busiest, to_read)"),
            ("h200.h", "waves * (second_part + kUsOfCall)", "second_part + kUsOfCall"),
            (
                "h200.h",
                "std::max(waves * busiest, us_to_read(work.num_columns, work.width))",
                "std::max(busiest, us_to_read(work.num_columns, work.width))",
            ),
            ("h200.h", "us_to_read(num_columns, width) + 10", "us_to_read(num_columns, width) + 55"),
            ("fused_sums.cuh", "1 / K::kGainFactor", "1.0f"),
            (
                "norm_concat_linear_finalize.cu",
                "op.weight_type == WeightType::kChunks ? 1 / kGainScale<T> : 1 / kCodeGainScale<T>",
                "1.0f",
            ),
            ("norm_concat_linear_finalize.cu", "has_norm && source_row(own, row) < 0", "false"),
            ("norm_concat_linear_finalize.cu", "chunk_norm && chunk != k", "false"),
            ("ranges.cuh", "output >= op.num_columns", "false"),
            ("ranges.cuh", "of < 0", "false"),
            ("cluster_sums.cuh", "(warp * blocks + static_cast<int>(blockIdx.y)) * 32", "warp * 32"),
            ("ranges.cuh", "__shfl_sync(~0u, scale, first_lane + k)", "__shfl_sync(~0u, scale, k)"),
            ("ranges.cuh", "leaves_out ? 0.0f : of_chunk[i] * by", "of_chunk[i] * by"),
            ("ranges.cuh", "column + i < columns", "true"),
            ("cluster_sums.cuh", "op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows", "kRows"),
            ("ranges.cuh", "chunk.gain.data != nullptr", "false"),
            (
                "norm_concat_linear_wgmma.cu",
                "units * (range + 1) / arguments.ranges.of_chunk[k]",
                "units * (range + 1) / arguments.ranges.of_chunk[k] - 1",
            ),
            ("norm_concat_linear_wgmma.cu", "inside && i * K::kCopyRows < outputs_", "inside"),
            ("norm_concat_linear_wgmma.cu", "copy_part ^ copy_row % 8", "copy_part"),
            ("norm_concat_linear_wgmma.cu", "matrix_ / 2 ^ matrix_row_", "matrix_ / 2"),
            ("norm_concat_linear_wgmma.cu", "first ^ swap", "first"),
            ("norm_concat_linear_wgmma.cu", "row_has_nan(nan_[i]) ? bits_to_float(0x7fffffff) : 0.0f", "0.0f"),
            ("norm_concat_linear_wgmma.cu", "K::kBlockScales && step == 0", "false"),
            ("norm_concat_linear_wgmma.cu", "1 / Product<K>::kGainFactor", "1.0f"),
            ("vocab_parallel_embedding.cu", "id >= op.org_begin && id < op.org_end", "id < op.org_end"),
            (
                "vocab_parallel_embedding.cu",
                "id >= op.org_begin && id < op.org_end",
                "id >= op.org_begin && id <= op.org_end",
            ),
            ("vocab_parallel_embedding.cu", "id - op.added_begin + op.added_row", "id - op.added_begin"),
            ("vocab_parallel_embedding.cu", "i * op.ids_stride", "i"),
            ("source_row.cuh", "row >= 0 && row < chunk.rows", "row >= 0 && row <= chunk.rows"),
            ("scales.cuh", "code == 0 || code == 255 ? 0x00400000u : 0u", "0u"),
            ("codes.cuh", "(codes + 0x01010101u) ^ codes", "0u"),
            ("codes.cuh", "(bits & 0x80808080u) >> row", "(bits & 0x80808080u) >> 0 * row"),
            ("codes.cuh", "codes << 8 & sign", "codes << 12 & sign"),
            ("codes.cuh", "codes >> 2 & magnitude", "codes << 2 & magnitude"),
            ("codes.cuh", "((codes + 0x00010001u) & 0x00fe00feu) == 0", "false"),
            ("mma_ring.cuh", "first < width && row + below < outputs_", "first < width"),
            ("mma_ring.cuh", "first < width && row + below < outputs_", "row + below < outputs_"),
            ("mma_product.cuh", "part * 8 / K::kScaledColumns % 4", "0"),
            ("mma_product.cuh", "by * kNvfp4Unscale", "by"),
            ("scales.cuh", "bytes % 4 == 0", "true"),
            ("scales.cuh", "chunk.width % (4 * scales.block_columns) == 0", "true"),
            ("weight_gain.cuh", "i < 2 ? low : high", "low"),
            ("capture_hidden.cu", "hidden + s * op.hidden_stream_stride", "hidden"),
            ("add_rms_norm.cu", "op.width > step", "false"),
            ("norm_concat.cu", "source.norm != Norm::kNone && row >= 0", "source.norm != Norm::kNone"),
            ("norm_concat.cu", "of_share[j % kShare]", "of_share[0]"),
            ("norm_concat.cu", "shape.threads % 64 == 0", "true"),
            ("device.cuh", "i * warps + threadIdx.x / 32", "threadIdx.x / 32"),
            ("launch.cuh", "shape.x > std::numeric_limits<int32_t>::max()", "false"),
            ("norm_concat_linear.cu", "last_row + op.source.width > std::numeric_limits<uint32_t>::max()", "false"),
        )
    ),
    Mutant(
        CUDA("norm_concat_linear_wgmma.cu"),
        "own_squares_ && ring_.x[i] != nullptr",
        "own_squares_",
        survives="an equal function: a row out of range is zeros in every stage, and has no residual",
    ),
)

# Calls that order the threads of csrc/cuda or wait for copies, products and kernels. They are searched for, so that a
# new call becomes a mutant by itself.
_SYNCHRONIZATION = re.compile(
    r"(?:__syncthreads|sync_row<[^>]*>|K::sync|sync_warp|sync_cluster|end_cluster|arrive_at_cluster|wait_for_cluster"
    r"|received\.all\.wait"
    r"|wait_for_copies<[^>]*>|commit_copies|fence_async_proxy|fence_wgmma|commit_wgmma|wait_for_wgmma"
    r"|wait_for_previous_kernel)\([^()]*\)(?=;)"
)
# Replacements that wait for less, or order less.
_WEAKER = {"sync_cluster()": "end_cluster()", "wait_for_copies<K::kStages - 2>()": "wait_for_copies<K::kStages - 1>()"}


def synchronization() -> list[Mutant]:
    """For every such call a mutant without it, and for those of _WEAKER one with the weaker call."""
    found = []
    for path in sorted((ROOT / "csrc/cuda").glob("*.cu*")):
        places: dict[str, int] = {}
        text = path.read_text(encoding="utf-8")
        emulated_from = text.find('#include "device_host.h"')  # in device.cuh: it replaces what is above it
        for match in _SYNCHRONIZATION.finditer(text):
            places[match[0]] = places.get(match[0], 0) + 1
            if match.start() < emulated_from:
                continue
            lost = Mutant(CUDA(path.name), match[0], "void()", place=places[match[0]])
            found += [lost, *(replace(lost, fault=weaker) for call, weaker in _WEAKER.items() if call == match[0])]
    return found


MUTANTS += tuple(synchronization())


def main(files: list[str]) -> int:
    """Runs the mutants of these files, or all. Saved records of other files stay."""
    here = {"", *usable_isas()}
    chosen = [n for n, mutant in enumerate(MUTANTS) if (not files or mutant.file in files) and mutant.isa in here]
    variant, known = build(), {identity(record): record for record in load("mutants")["records"]}
    if any(MUTANTS[number].file.startswith("csrc/cuda/") for number in chosen):
        build_emulation(variant)
    for variables in ({}, INTERPRETED, EMULATED):
        mutated = {MUTANTS[number].file for number in chosen if variables_of(MUTANTS[number].file) == variables}
        tests = sorted({test for file in mutated for test in TESTS[file]})
        if not tests:
            continue
        outcome, output = run_tests(sys.executable, [*EVERY_CORE, *tests], variant.environment() | variables)
        if not outcome.failed and variables == EMULATED:
            outcome, output = run_tests(sys.executable, [_SCHEDULES], variant.environment() | EMULATED | _racecheck())
        if outcome.failed:
            print(output[-8000:])
            raise SystemExit("mutants: the tests fail without a mutant, so that a failure says nothing of one")
    records: list[dict] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file in dict.fromkeys(MUTANTS[number].file for number in chosen):  # a run that ends early saves these
            numbers = [number for number in chosen if MUTANTS[number].file == file]
            killers = [known.get(identity(vars(MUTANTS[number])), {}).get("killed_by", "") for number in numbers]
            known |= {identity(record): record for record in pool.map(run, numbers, repeat(variant), killers)}
            records = [known[identity(vars(mutant))] for mutant in MUTANTS if identity(vars(mutant)) in known]
            path = save("mutants", records, seconds=round(sum(record["seconds"] for record in records)))
    print(f"{sum(record['killed'] for record in records)} of {len(records)} killed; saved {path}")
    return 1 if any(not record["killed"] and not record["survives"] for record in records) else 0


def build() -> Variant:
    """The library with every C++ mutant in it, none of them active."""
    header = FOLDER / "mutant.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists():
        header.write_text(HEADER)
    return install("mutants", f"-include {header}", edit=lambda source: (insert(source), unoptimized(source)))


def build_emulation(variant: Variant) -> None:
    """The same for csrc/cuda, emulated, plain and under ThreadSanitizer, in whose processes no compiler may start."""
    code = "from cuda_host.build import build; build(''); build('thread')"
    subprocess.run([sys.executable, "-c", code], env=variant.environment() | EMULATED, check=True)


def insert(source: Path) -> None:
    """Every C++ mutant in the copy of the checkout; of two in one place the first is in the second one's else."""
    for file in {mutant.file for mutant in MUTANTS if mutant.file.startswith("csrc/")}:
        text = (ROOT / file).read_text()
        numbered = [(number, mutant) for number, mutant in enumerate(MUTANTS) if mutant.file == file]
        # Found before any is replaced, as a fault may contain another original; replaced from the end, so that
        # earlier positions stay valid.
        starts = {(mutant.original, mutant.place): _start(text, mutant) for _, mutant in numbered if mutant.place}
        of_one = dict.fromkeys((mutant.original, 0) for _, mutant in numbered if not mutant.place)
        for original, place in [*sorted(starts, key=starts.get, reverse=True), *of_one]:
            expression = f"({original})"
            for number, mutant in numbered:
                if (mutant.original, mutant.place) == (original, place):
                    expression = f"(::eagle_kernels::mutant == {number} ? ({mutant.fault}) : {expression})"
            start = starts[original, place] if place else text.index(original)
            text = text[:start] + expression + text[start + len(original) :]
        (source / file).write_text(text)


def _start(text: str, mutant: Mutant) -> int:
    start = -1
    for _ in range(mutant.place):
        start = text.index(mutant.original, start + 1)
    return start


def run(number: int, variant: Variant, killed_by: str) -> dict:
    """Runs the tests on one mutant up to the first failure: first the test that failed the last time, then all."""
    mutant = MUTANTS[number]
    # With one thread rows would not be split over threads.
    environment = variant.environment() | variables_of(mutant.file) | {"OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        if mutant.file.startswith("csrc/"):
            environment[VARIABLE] = str(number)
        else:
            changed = Variant(variant.source, Path(folder) / "site")
            shutil.copytree(variant.site, changed.site)
            installed = changed.site / "eagle_kernels" / mutant.file.removeprefix("python/eagle_kernels/")
            installed.write_text(installed.read_text().replace(mutant.original, mutant.fault))
            environment |= changed.environment()
        seconds, found = 0.0, ""
        for tests, more in trials(mutant, killed_by):
            outcome, output = run_tests(sys.executable, ["-x", *tests], environment | more, LONGEST)
            seconds += outcome.seconds
            failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
            if failed is not None or (outcome.failed and tests != [killed_by]):
                found = failed[1] if failed else "its time limit" if outcome.seconds >= LONGEST else of_process(output)
                break
    place = f" number {mutant.place}" if mutant.place else ""
    said = f"killed by {found}" if found else f"SURVIVED {mutant.survives or 'for no reason that is known'}"
    print(f"{number:3} {mutant.file}: {mutant.original}{place} -> {mutant.fault}: {said}, {seconds:.0f} s", flush=True)
    return {**vars(mutant), "killed": bool(found), "killed_by": found, "seconds": round(seconds, 1)}


def trials(mutant: Mutant, killed_by: str) -> list[tuple[list[str], dict[str, str]]]:
    """Tests and environment variables, in the order in which they are tried on the mutant."""
    known = [([killed_by], {})] if "::" in killed_by else []
    if mutant.place == 0:
        return [*known, (TESTS[mutant.file], {})]
    kernels = _KERNELS_OF.get(Path(mutant.file).name, "others")
    # A race shows in any order of the threads: one is enough. The report goes to the process's own stderr, which
    # pytest's default capture would swallow.
    racecheck = ["--capture=sys", _SCHEDULES, "-k", f"ascending and ({kernels})"]
    return [*known, ([_SCHEDULES, "-k", kernels], {}), (racecheck, _racecheck())]


def _racecheck() -> dict[str, str]:
    under = environment_under("thread")
    if under is None:
        raise SystemExit("mutants: g++ has no thread sanitizer, expected libtsan")
    return under | {"EAGLE_KERNELS_TEST_SANITIZED": "thread"}


def of_process(output: str) -> str:
    return "a data race" if "ThreadSanitizer: data race" in output else "a process that died"


def identity(record: dict) -> tuple:
    return record["file"], record["original"], record["fault"], record.get("place", 0)


def variables_of(file: str) -> dict[str, str]:
    return INTERPRETED if file.startswith("triton_kernels/") else EMULATED if file.startswith("csrc/cuda/") else {}


def occurrences(mutant: Mutant) -> int:
    return (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.original)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
