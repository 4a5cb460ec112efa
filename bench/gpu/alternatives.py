"""What plans and models of the GPU choose, timed beside what they could have chosen: columns of one row in one process.

`python build/gpu_alternatives JSON`, the package with the library of alternatives (package.py), goes on with the rows
that the file lacks. A column `op:blocks-3+ranges-4` is the op with these settings, `op` alone what the package runs. In
place of blocks that the kernel cannot have it has others, and where it cannot have the ranges its own choice.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from eagle_kernels.bench import cli_types, info
from eagle_kernels.bench.benchmark import Runner, row_record
from eagle_kernels.bench.measure import Variant
from eagle_kernels.bench.ops import workload_of
from eagle_kernels.bench.runs import saved_run
from eagle_kernels.bench.workloads import DENSE, Row, Workload

from eagle_kernels import library, plan

_IN_BLOCKS = tuple(f"op:blocks-{blocks}+ranges-{n}" for blocks in (2, 3) for n in range(2, 9))
_IN_NARROW_PAIRS, _IN_WIDE_PAIRS = (
    tuple(f"op:blocks-1+width-{width}+ranges-{n}" for n in (4, 6, 8)) for width in (64, 96)
)
_IN_PAIRS = (*_IN_NARROW_PAIRS, *_IN_WIDE_PAIRS)  # of codes
_COLUMNS = tuple(f"op:columns-{n}" for n in (64, 128, 192, 256))
_CODES = ("fp8_row", "fp8_block128", "nvfp4", "mxfp8")
_SCALED_BLOCKS = _CODES[1:2]  # which have no wide pairs
_FEW_SHAPES = ("llama3.1-8b", "gpt-oss-120b", "qwen2.5-0.5b", "gemma3-27b")
_SHAPES = (
    *_FEW_SHAPES,
    *("deepseek-v3", "deepseek-v3:mtp", "llama4-scout", "qwen3-next-80b:mtp", "step3.5-flash:mtp"),
    *("qwen3-30b-a3b", "gemma3-1b", "gemma3-4b", "gemma3-12b", "llama3.3-70b:eagle3_narrow", "minimax-m3"),
)


@dataclass(frozen=True)
class _Question:
    presets: Sequence[str]
    weights: Sequence[str]
    tokens: Sequence[int]
    columns: Sequence[str]

    def rows(self) -> Iterator[Row]:
        for name in self.presets:
            ((preset, stage, V),) = cli_types.presets(name)
            for weight in self.weights:
                for T in self.tokens:
                    norm = cli_types.norm_of(stage)
                    yield Row("norm_concat_linear", preset, stage, norm, V, T, torch.bfloat16, "cuda", weight)


# In order of value.
_QUESTIONS = (
    _Question(_SHAPES, _CODES[:1], (1,), ("op", *_IN_PAIRS, *_IN_BLOCKS)),
    _Question(_FEW_SHAPES, _SCALED_BLOCKS, (1,), ("op", *_IN_NARROW_PAIRS, *_IN_BLOCKS)),
    _Question(_FEW_SHAPES, _CODES[2:3], (1,), ("op", *_IN_PAIRS, *_IN_BLOCKS)),
    _Question(_SHAPES, (DENSE,), (1,), ("op", *_IN_BLOCKS, "linear")),
    _Question(_FEW_SHAPES, _CODES[:2], (17, 24, 32, 64), ("op", "op:split", *_COLUMNS[1:])),
    _Question(_FEW_SHAPES, (DENSE,), (17, 32, 48), ("op", "two-step", "op:split", *_COLUMNS)),
    _Question(_FEW_SHAPES[:2], _CODES, (160, 256, 320), ("op", "op:split", "op:dequantized")),
    _Question(_FEW_SHAPES, (DENSE,), (16,), ("op", *_IN_BLOCKS)),
    _Question(_FEW_SHAPES, (_CODES[0], *_CODES[2:]), (16,), ("op", *_IN_PAIRS, *_IN_BLOCKS)),
    _Question(_FEW_SHAPES, _SCALED_BLOCKS, (16,), ("op", *_IN_NARROW_PAIRS, *_IN_BLOCKS)),
)


def main() -> None:
    print(f"alternatives of {library.COMPILED_LIBRARY}", flush=True)
    if (reason := info.unsupported_reason("cuda")) is not None:
        raise SystemExit(f"no CUDA device: {reason}")
    path = Path(sys.argv[1])
    torch.manual_seed(0)
    environment = info.read_environment("cuda")
    records = saved_run.load(path)["records"] if path.exists() else []
    done = {_key(record) for record in records}
    runner = _Runner("cuda", environment["cache_bytes"], min_time=0.01, timers=("graph", "spaced"))
    for question in _QUESTIONS:
        for row in question.rows():
            if _key(row_record(row)) not in done:
                measured = runner.measure(workload_of(row, runner.cache_bytes), question.columns)
                records += measured
                saved_run.save(path, environment, sys.argv[1:], records)
                print(f"{row}: {', '.join(map(_text, measured))}", flush=True)


def _text(record: dict) -> str:
    time = f"{record['median_ms'] * 1e3:.2f}" if record["status"] == "ok" else record["status"]
    return f"{record['variant']} {record['timer']} {time}"


def _key(record: dict) -> tuple:
    return tuple(record[name] for name in saved_run.ROW_FIELDS if name != "timer")


class _Runner(Runner):
    def variant(self, workload: Workload, name: str) -> Variant:
        form, _, setting = name.partition(":")
        variant = workload.variant(form)
        return replace(variant, name=name, active=lambda: _set(setting, workload)) if setting else variant


# What the library of alternatives and plans read from the environment.
_VARIABLES = {
    "ranges": "FUSED_RANGES",
    "blocks": "FUSED_BLOCKS",
    "width": "FUSED_COLUMNS",
    "columns": "WGMMA_COLUMNS",
    "split": "BATCH_INVARIANT",
}


@contextlib.contextmanager
def _set(settings: str, workload: Workload) -> Iterator[None]:
    """The variables of the settings, which the library reads in each call; then a plan of its own, made before a call
    is timed."""
    parts = [part.partition("-") for part in settings.split("+") if part != "dequantized"]
    variables = {f"EAGLE_KERNELS_{_VARIABLES[kind]}": number or "1" for kind, _, number in parts}
    most = plan.MAX_ROWS_OF_SCALED_SUMS
    try:
        os.environ.update(variables)
        if settings == "dequantized":
            plan.MAX_ROWS_OF_SCALED_SUMS = 0
        plan.clear()
        workload.plan()
        yield
    finally:
        plan.MAX_ROWS_OF_SCALED_SUMS = most
        for name in variables:
            os.environ.pop(name)
        plan.clear()
