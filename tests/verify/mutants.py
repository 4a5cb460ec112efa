"""`make mutants`: one small fault at a time in the kernels, checks and planners; the tests of that file must find it.

All C++ mutants are compiled once, each as `mutant == n ? fault : original`, and an environment variable picks one
(mutant schemata; a build per mutant would take an hour). A Python mutant is a change in a copy of the package. Mutants
run one per core, each up to the first test that fails: the one that found it the last time, if that finds it again.
Arguments are files whose mutants run; without any all do.
"""

import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from verify.results import EVERY_CORE, load, run_tests, save
from verify.variant import ROOT, Variant, install, unoptimized

VARIABLE = "EAGLE_KERNELS_MUTANT"
INTERPRETED = {"TRITON_INTERPRET": "1"}
LONGEST = 300  # seconds; a mutant that hangs is killed by that
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
    """`original` occurs once in the file; in C++ both are expressions of one type."""

    file: str
    original: str
    fault: str
    survives: str = ""  # why no test can or need find it


SOURCES = "python/eagle_kernels/ops/sources.py"
PLAN = "python/eagle_kernels/plan.py"
DISPATCH = "python/eagle_kernels/dispatch.py"
TRITON = "triton_kernels/{}.py".format

_CHUNKS = ["tests/test_norm_concat.py", "tests/test_norm_concat_linear.py"]
_CHECKS = ["tests/test_primitives.py", "tests/test_worded_errors.py"]
TESTS = {
    "csrc/checks.h": _CHECKS,
    "csrc/checks.cpp": [*_CHECKS, "tests/test_errors.py", "tests/test_buffers.py"],
    "csrc/sources.cpp": [*_CHECKS, *_CHUNKS],
    "csrc/vocab_parallel_embedding.cpp": [*_CHECKS, "tests/test_vocab_parallel_embedding.py"],
    "csrc/cpu/vocab_parallel_embedding.cpp": ["tests/test_vocab_parallel_embedding.py"],
    "csrc/cpu/norm_row.h": [*_CHUNKS, "tests/test_add_rms_norm.py"],
    "csrc/cpu/add_rms_norm.cpp": ["tests/test_add_rms_norm.py"],
    "csrc/cpu/capture_hidden.cpp": ["tests/test_capture_hidden.py"],
    "csrc/cpu/norm_concat_linear.cpp": ["tests/test_norm_concat_linear.py"],
    PLAN: ["tests/test_triton_backend.py", "tests/test_cuda_backend.py", "tests/test_norm_concat_linear.py"],
    DISPATCH: ["tests/test_dispatch.py", "tests/test_registration.py"],
    SOURCES: ["tests/test_errors.py", "tests/test_norm_concat.py", "tests/test_worded_errors.py"],
    TRITON("dialect"): ["tests/interpreter/test_add_rms_norm.py"],
    TRITON("sources"): ["tests/interpreter/test_norm_concat.py"],
    TRITON("vocab_parallel_embedding"): ["tests/interpreter/test_vocab_parallel_embedding.py"],
    TRITON("add_rms_norm"): ["tests/interpreter/test_add_rms_norm.py"],
    TRITON("capture_hidden"): ["tests/interpreter/test_capture_hidden.py"],
    TRITON("norm_concat_linear"): ["tests/interpreter/test_norm_concat_linear.py"],
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
    Mutant("csrc/checks.cpp", "distance < a.row_bytes", "distance <= a.row_bytes"),
    Mutant("csrc/checks.cpp", "distance + b.row_bytes > pitch", "distance + b.row_bytes >= pitch"),
    Mutant("csrc/checks.cpp", "begin + (rows - 1) * pitch + row_bytes", "begin + rows * pitch"),
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
    Mutant("csrc/cpu/add_rms_norm.cpp", "sum_of_squares(op.width, add)", "sum_of_squares(op.width - 1, add)"),
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
    Mutant(PLAN, "limit < T and not", "limit <= T and not"),
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
    Mutant(DISPATCH, " or not _OPERANDS.issuperset(map(type, operands))", ""),
    Mutant(DISPATCH, "_functorch_level() is not None", "False"),
    Mutant(DISPATCH, "return not _is_grad_enabled() or", "return"),
    Mutant(SOURCES, "residuals or None, indices or None", "indices or None, residuals or None"),
    Mutant(SOURCES, "all(entry is None", "any(entry is None"),
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
    Mutant(PLAN, "min(tiles.BK, problem.block_columns)", "tiles.BK"),
    Mutant(PLAN, "if problem.scales_sums else", "if not problem.scales_sums else"),
    Mutant(PLAN, "min(problem.rows, _MOST_TUNED_ROWS)", "problem.rows"),
    Mutant(PLAN, "if len(problem.widths) != 1:", "if len(problem.widths) > 2:"),
    Mutant(PLAN, "if H % 16 or not problem.elements_aligned:", "if not problem.elements_aligned:"),
    Mutant(PLAN, "if H % 16 or not problem.elements_aligned:", "if H % 16:"),
    Mutant(PLAN, "if shared < problem.num_chunks * H and H % shared:", "if H % shared:"),
    Mutant(PLAN, "if shared < problem.num_chunks * H and H % shared:", "if False:"),
    Mutant(PLAN, "split_only=True)", "split_only=False)"),
    Mutant(PLAN, "split_only=invariant or split_only", "split_only=invariant"),
    Mutant(
        PLAN,
        'if triton_reason is None else "reference"\n        reason = f"no cuda kernel reads',
        '\n        reason = f"no cuda kernel reads',
    ),
)


def main(files: list[str]) -> int:
    """Those of these files, or all; the records of the others stay as they were saved."""
    chosen = [number for number, mutant in enumerate(MUTANTS) if not files or mutant.file in files]
    variant, known = build(), {identity(record): record for record in load("mutants")["records"]}
    for variables in ({}, INTERPRETED):
        mutated = {MUTANTS[number].file for number in chosen if variables_of(MUTANTS[number].file) == variables}
        tests = sorted({test for file in mutated for test in TESTS[file]})
        if not tests:
            continue
        outcome, output = run_tests(sys.executable, [*EVERY_CORE, *tests], variant.environment() | variables)
        if outcome.failed:
            print(output[-8000:])
            raise SystemExit("mutants: the tests fail without a mutant, so that a failure says nothing of one")
    records: list[dict] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file in dict.fromkeys(MUTANTS[number].file for number in chosen):  # a run that ends early keeps its files
            numbers = [number for number in chosen if MUTANTS[number].file == file]
            killers = [known.get(identity(vars(MUTANTS[number])), {}).get("killed_by", "") for number in numbers]
            known |= {identity(record): record for record in pool.map(run, numbers, repeat(variant), killers)}
            records = [known[identity(vars(mutant))] for mutant in MUTANTS if identity(vars(mutant)) in known]
            path = save("mutants", records, seconds=round(sum(record["seconds"] for record in records)))
    print(f"{sum(record['killed'] for record in records)} of {len(records)} killed; saved {path}")
    return 1 if any(not record["killed"] and not record["survives"] for record in records) else 0


def build() -> Variant:
    """The library with every C++ mutant in it, none of them active."""
    header = ROOT / "build/mutants/mutant.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists():
        header.write_text(HEADER)
    return install("mutants", f"-include {header}", edit=lambda source: (insert(source), unoptimized(source)))


def insert(source: Path) -> None:
    """Every C++ mutant in the copy of the checkout; of two in one place the second is the first one's else."""
    for file in {mutant.file for mutant in MUTANTS if mutant.file.startswith("csrc/")}:
        text = (ROOT / file).read_text()
        for place in dict.fromkeys(mutant.original for mutant in MUTANTS if mutant.file == file):
            expression = f"({place})"
            for number, mutant in enumerate(MUTANTS):
                if (mutant.file, mutant.original) == (file, place):
                    expression = f"(::eagle_kernels::mutant == {number} ? ({mutant.fault}) : {expression})"
            text = text.replace(place, expression)
        (source / file).write_text(text)


def run(number: int, variant: Variant, killed_by: str) -> dict:
    """What the tests say of one mutant, up to the first that fails: the one that did the last time, then all."""
    mutant = MUTANTS[number]
    # Rows are split over threads where there are two.
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
        for tests in ([killed_by], TESTS[mutant.file]) if "::" in killed_by else (TESTS[mutant.file],):
            outcome, output = run_tests(sys.executable, ["-x", *tests], environment, LONGEST)
            seconds += outcome.seconds
            failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
            if failed is not None or (outcome.failed and tests != [killed_by]):
                found = failed[1] if failed else "a process that died"
                break
    said = f"killed by {found}" if found else f"SURVIVED {mutant.survives or 'for no reason that is known'}"
    print(f"{number:3} {mutant.file}: {mutant.original} -> {mutant.fault}: {said}, {seconds:.0f} s", flush=True)
    return {**vars(mutant), "killed": bool(found), "killed_by": found, "seconds": round(seconds, 1)}


def identity(record: dict) -> tuple:
    return record["file"], record["original"], record["fault"]


def variables_of(file: str) -> dict[str, str]:
    return INTERPRETED if file.startswith("triton_kernels/") else {}


def occurrences(mutant: Mutant) -> int:
    return (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.original)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
