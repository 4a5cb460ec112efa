"""`tune`: the Triton tiles of norm_concat_linear for a shape on this GPU, searched and written into the tuned table."""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import plan, tuned_configs
from eagle_kernels.ops.norm_concat_linear import OP, Projection
from eagle_kernels.ops.sources import Sources
from eagle_kernels.plan import Kernel, Plan
from eagle_kernels.tuned_configs import CONFIGS, Gpu, Tiles

from . import cli_types, info
from .cli_types import Command
from .measure import TIMERS, Ratio, TooLarge, Variant, plan_rotation, ratio, time_variants
from .ops.norm_concat_linear import NormConcatLinear
from .output import Progress, check_writable, say, wrap, write_text
from .workloads import Row, judge

Choice = Tiles | None  # None: norm_concat and a library product
Compare = Callable[[Choice, Choice], Ratio | None]  # incumbent over candidate; None where the candidate cannot run

# The fields of Tiles in the order in which they are varied, those that matter most first.
_OPTIONS = {
    "BD": (16, 32, 64, 128, 256),
    "splits": (1, 2, 3, 4, 6, 8),
    "BK": (32, 64, 128, 256),
    "num_stages": (2, 3, 4, 5, 6, 8),
    "num_warps": (4, 8),
    "swap": (False, True),
    "finalize_columns": (256, 512, 1024, 2048),
}
_PASSES = 2

# A choice must be faster by this factor to replace another one: each is one more binary to compile at warm-up.
_WORTH = 1.01


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", type=cli_types.one_of("device", info.DEVICES), default="cuda", help="cuda (default)")
    add("--op", type=cli_types.one_of("op", [OP]), default=OP, help=f"{OP}, the one op with tuned tables")
    cli_types.add_stage_arguments(parser)
    rows = "values of T to measure (default 1,8,16,32,64,128,256)"
    add("--tokens", type=cli_types.row_counts, default=[1, 8, 16, 32, 64, 128, 256], metavar="T", help=rows)
    add("--dtype", type=cli_types.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    add("--min-time", type=cli_types.number(0, float), default=0.05, help="seconds per candidate (default 0.05)")
    limit = "seconds for all of it: a T that is not done by then keeps the best so far (default 3600)"
    add("--jobs", type=cli_types.number(1), default=1, help="processes that compile candidates beforehand (default 1)")
    add("--limit", type=cli_types.number(1), default=3600, help=limit)
    where = "write the table, by default into the installed package"
    add("--write", type=Path, nargs="?", const=CONFIGS, metavar="FOLDER", help=where)
    missing = "only those T that the table in --write's FOLDER, or the installed one, lacks"
    add("--missing", action="store_true", help=missing)
    add("--dry-run", action="store_true", help="print the candidates, run nothing, need no GPU")


def _run(arguments: argparse.Namespace) -> int:
    stages = cli_types.stages(arguments)
    if arguments.dry_run:
        return _print_candidates(arguments, stages)
    _check(arguments)
    environment = info.read_environment(arguments.device)
    info.say_header(environment)
    gpu = tuned_configs.gpu_of(_device(arguments))
    deadline = time.monotonic() + arguments.limit
    torch.manual_seed(0)
    progress = Progress(len(stages) * len(arguments.dtype) * len(arguments.tokens), "row counts")
    try:
        for (preset, stage, V), dtype in itertools.product(stages, arguments.dtype):
            row = Row(OP, preset, stage, cli_types.norm_of(stage), V, 1, cli_types.DTYPES[dtype], arguments.device)
            _tune_shape(row, gpu, arguments, environment, deadline, progress)
    except KeyboardInterrupt:
        say("interrupted: what is above is complete")
        return 130
    finally:
        progress.close()
    if arguments.write is None:
        say("nothing was written: --write puts the table into the package")
    return 0


def _tune_shape(
    row: Row, gpu: Gpu, arguments: argparse.Namespace, environment: dict, deadline: float, progress: Progress
) -> None:
    """Tune every T of one shape and dtype; what is finished is written even when the rest is interrupted."""
    tuned: dict[int, Choice] = {}
    shape = tuned_configs.Shape(row.stage.K, row.stage.H, row.stage.D, str(row.dtype).removeprefix("torch."))
    known = tuned_configs.read_rows(gpu.name, shape, arguments.write) or {} if arguments.missing else {}
    try:
        for T in arguments.tokens:
            if T not in known:
                at_T = replace(row, T=T)
                _compile_neighbors(at_T, gpu, arguments.jobs)
                tuned |= _tune_row(at_T, gpu, environment["cache_bytes"], arguments.min_time, deadline, progress)
            progress.step()
    finally:
        if tuned and arguments.write is not None:
            facts = {name: environment[name] for name in ("torch", "triton", "date", "commit")}
            say(wrap(f"written: {write_rows(gpu.name, shape, tuned, facts, arguments.write)}"))


def write_rows(
    device_name: str, shape: tuned_configs.Shape, rows: dict[int, Choice], measured_with: dict[str, str], folder: Path
) -> Path:
    """Put measured rows into the GPU's table in `folder`. Running processes see it after a restart."""
    path = tuned_configs.table_path(device_name, folder)
    write_text(path, tuned_configs.table_with_rows(device_name, shape, rows, measured_with, folder))
    return path


def _check(arguments: argparse.Namespace) -> None:
    fail = arguments.parser.error
    if arguments.missing and arguments.write is None:
        fail("argument --missing: it goes by the table that --write names")
    if (reason := info.unsupported_reason(arguments.device)) is not None:
        fail(f"no CUDA device: {reason}; --dry-run prints the candidates without one")
    if (reason := plan.unsupported_reason("triton", torch.device(arguments.device))) is not None:
        fail(f"the Triton kernels cannot run on {arguments.device}: {reason}; the CPU kernels have no table to tune")
    if arguments.write is not None:
        gpu = tuned_configs.gpu_of(_device(arguments))
        check_writable(arguments.parser, "--write", tuned_configs.table_path(gpu.name, arguments.write))
        try:
            tuned_configs.read_entries(gpu.name, arguments.write)
        except ValueError as damaged:  # what was measured could not be put beside its rows
            fail(f"argument --write: {damaged}")
        except OSError as failure:
            fail(f"argument --write: {failure.filename} was not read: {failure.strerror}")


def _device(arguments: argparse.Namespace) -> torch.device:
    return torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")


def _print_candidates(arguments: argparse.Namespace, stages: list[cli_types.Stage]) -> int:
    usable = arguments.device == "cuda" and info.unsupported_reason("cuda") is None
    gpu = tuned_configs.gpu_of(_device(arguments) if usable else torch.device("cpu"))
    for preset, stage, _ in stages:
        for dtype in arguments.dtype:
            for T in arguments.tokens:
                start = start_tiles(gpu, T, stage.K, stage.H, stage.D, cli_types.DTYPES[dtype])
                shape = f"{preset}:{stage.kind} K={stage.K} H={stage.H} D={stage.D} {dtype} T={T}"
                say(wrap(f"{shape}, as on {gpu.name}"))
                say(wrap(f"starts from {_text(start)}; against norm_concat + linear", indent="    ", first="  "))
                near = functools.partial(neighbors, start, gpu=gpu, H=stage.H, dtype=cli_types.DTYPES[dtype])
                for tiles in itertools.chain.from_iterable(map(near, _OPTIONS)):
                    say(wrap(_text(tiles), indent="    ", first="  "))
    return 0


def start_tiles(gpu: Gpu, T: int, K: int, H: int, D: int, dtype: torch.dtype) -> Tiles:
    """The heuristic's tiles; beyond its largest T, the tiles of that T."""
    tiles = tuned_configs.heuristic(gpu, min(T, tuned_configs.SPLIT_ROWS[dtype]), K, H, D, dtype)
    assert tiles is not None  # it has tiles for every T up to SPLIT_ROWS
    return tiles


def neighbors(tiles: Tiles, field: str, gpu: Gpu, H: int, dtype: torch.dtype) -> Iterator[Tiles]:
    """The possible tiles that differ in this field alone."""
    for option in _OPTIONS[field]:
        changes: dict[str, Any] = {field: option}
        candidate = tiles._replace(**changes)
        if candidate != tiles and _is_possible(candidate, gpu, H, dtype):
            yield candidate


def _is_possible(tiles: Tiles, gpu: Gpu, H: int, dtype: torch.dtype) -> bool:
    # The left operand of wgmma and tcgen05 has 64 or 128 rows; in the swapped product these are rows of the weight.
    shape_fits = not tiles.swap or (tiles.BD >= 64 and tiles.BT >= 64 and gpu.arch in (90, 100, 103))
    blocks = -(-H // tiles.BK)
    fits = tiles.num_stages * tuned_configs.stage_bytes(tiles, dtype, False) <= gpu.shared_memory
    return shape_fits and fits and tiles.splits <= blocks


def search(start: Tiles, compare: Compare, near: Callable[[Tiles, str], Iterator[Tiles]], deadline: float) -> Choice:
    """The best choice found by varying one field at a time, in two passes, or the library's product if it is faster.

    `compare` times incumbent and candidate side by side; a candidate that is faster beyond the noise takes over.
    """
    best, seen = start, {start}
    for _ in range(_PASSES):
        before = best
        for field in _OPTIONS:
            for candidate in near(best, field):
                if candidate in seen or time.monotonic() > deadline:
                    continue
                seen.add(candidate)
                if _is_better(compare(best, candidate)):
                    best = candidate
        if best == before:
            break
    return None if _is_better(compare(best, None)) else best


def _compile_neighbors(row: Row, gpu: Gpu, jobs: int) -> None:
    """Compile the search's first candidates into Triton's cache with several processes: 0.8 s of a core each."""
    if jobs == 1:
        return
    stage = row.stage
    start = start_tiles(gpu, row.T, stage.K, stage.H, stage.D, row.dtype)
    near = functools.partial(neighbors, start, gpu=gpu, H=stage.H, dtype=row.dtype)
    compiled = [start, *itertools.chain.from_iterable(map(near, _OPTIONS))]
    list(_compilers(jobs).map(functools.partial(_compile, row), compiled))


@functools.cache
def _compilers(jobs: int) -> ProcessPoolExecutor:
    """Spawned: a fork would share this process's CUDA context. Cached for all rows: each process imports torch, 3 s.
    Ctrl-C, which a terminal sends to all of them, is this process's: each would print a traceback."""
    spawn = multiprocessing.get_context("spawn")
    initializer = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=initializer)


def _compile(row: Row, tiles: Tiles) -> None:
    with contextlib.suppress(Exception):  # what cannot be compiled is counted where it is measured
        _candidates_of(row)._call(tiles)(0)


@functools.lru_cache(maxsize=1)
def _candidates_of(row: Row) -> "_Candidates":
    return _Candidates(row, cache_bytes=0, min_time=0.0)


def _is_better(incumbent_over_candidate: Ratio | None) -> bool:
    return incumbent_over_candidate is not None and incumbent_over_candidate.is_more_than(_WORTH)


def _tune_row(
    row: Row, gpu: Gpu, cache_bytes: int, min_time: float, deadline: float, progress: Progress
) -> dict[int, Choice]:
    """{T: choice} for one T, printed with its gain over the start; empty where nothing can be measured."""
    stage = row.stage
    progress.note(str(row))
    try:
        bench = _Candidates(row, cache_bytes, min_time)
    except (TooLarge, torch.OutOfMemoryError) as reason:
        say(wrap(f"{row}: skipped: {reason}"))
        return {}
    start = start_tiles(gpu, row.T, stage.K, stage.H, stage.D, row.dtype)
    best = search(start, bench.compare, lambda tiles, field: neighbors(tiles, field, gpu, stage.H, row.dtype), deadline)
    gained = None if best == start else bench.compare(start, best)
    gain = "" if gained is None else f", {gained.value:.3f}x over {_text(start)}"
    tried = f"{bench.tried} candidates, {bench.refused} could not run or were wrong"
    say(wrap(f"{row}: {_text(best)}{gain} ({tried})"))
    return {row.T: best}


@dataclass
class _Candidates:
    """Times choices on one row: each checked first, in rotated copies, in a CUDA graph."""

    row: Row
    cache_bytes: int
    min_time: float

    def __post_init__(self) -> None:
        device = self.row.device
        self.workload = NormConcatLinear(self.row, self.cache_bytes)
        rotation = plan_rotation(
            self.workload.footprint(()),
            self.cache_bytes,
            info.available_bytes(device),
            cache_factor=info.CACHE_FACTORS[device],
            max_copies=info.MAX_COPIES[device],
        )
        self.workload.allocate(rotation.copies)
        self.copies = rotation.copies
        self.tried = self.refused = 0
        self._variants: dict[Choice, Variant | None] = {}

    @torch.no_grad()
    def compare(self, incumbent: Choice, candidate: Choice) -> Ratio | None:
        now, other = self._variant(incumbent), self._variant(candidate)
        if now is None or other is None:
            return None
        timer = TIMERS[self.row.device][0]
        before, after = time_variants(timer, [now, other], self.copies, self.min_time)
        return ratio(before, after)

    def _variant(self, choice: Choice) -> Variant | None:
        """A choice's calls; None, counted in `refused`, where it does not compile, run, or give the right result."""
        if choice not in self._variants:
            self.tried += 1
            variant = Variant("op", self._call(choice), self.copies)
            try:
                is_right = judge(self.workload, [variant])["op"].is_right
            except torch.OutOfMemoryError:
                raise
            except Exception:  # out of registers or shared memory, which only the compiler knows
                is_right = False
            self.refused += not is_right
            self._variants[choice] = variant if is_right else None
        return self._variants[choice]

    def _call(self, choice: Choice) -> Callable[[int], object]:
        from eagle_kernels.triton_kernels import norm_concat_linear as kernels

        workload, is_aligned = self.workload, self.row.stage.H % 16 == 0
        kernel = Kernel.TWO_STEP if choice is None else Kernel.SPLIT
        planned = Plan(OP, "triton", kernel, "it is being tuned", choice, is_aligned)
        options = {name: value for name, value in workload.options.items() if name != "post_norm_weight"}
        sources = [Sources.of_call(OP, list(chunks), options) for chunks in workload.chunks]
        post = (None, workload.options["post_norm_weight"], float(options["eps"]))
        projections = [Projection(weight, *post) for weight in workload.weights]

        def call(copy: int) -> object:
            out = workload.outs[copy]
            kernels.run(sources[copy], projections[copy], out, planned)
            return out

        return call


def _text(choice: Choice) -> str:
    if choice is None:
        return "norm_concat + linear"
    return " ".join(f"{name}={value}" for name, value in choice._asdict().items())


TUNE = Command(
    "Search the Triton tiles of norm_concat_linear for a shape on this GPU, and write them into the tuned table.",
    _add_arguments,
    _run,
)
