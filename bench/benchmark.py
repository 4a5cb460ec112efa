"""Time the ops against eager torch and torch.compile on the shapes of real models, each result checked first."""

import argparse
import contextlib
import gc
import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle_kernels import ops
from eagle_kernels.model_shapes import InputStage, model_shapes

from . import choices, memory_workloads, table
from .bandwidth import MemoryBandwidth, Rates
from .baselines import BASELINES, COMPILE_BUDGET
from .environment_header import format_header, read_environment
from .gate import Verdict, judge
from .measure import Samples, interleave, ratio
from .projection_workload import NormConcatLinear
from .results import save
from .rotation import Rotation, TooLarge, available_memory_bytes, plan_rotation
from .workloads import FORMS, Row, Variant, Workload

_WORKLOADS: dict[str, type[Workload]] = {
    "norm_concat_linear": NormConcatLinear,
    "norm_concat": memory_workloads.NormConcat,
    "capture_hidden": memory_workloads.CaptureHidden,
    "add_rms_norm": memory_workloads.AddRmsNorm,
    "vocab_parallel_embedding": memory_workloads.VocabParallelEmbedding,
}
_DEVICES = ("cpu",)
_NORMS = ("chunk", "concat", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    op_list = choices.list_of("op", [*ops.__all__, "all"])
    add("--op", type=op_list, default=["norm_concat_linear"], help="ops with commas between, or all")
    add("--preset", type=_preset, nargs="+", default=[_preset("llama3.1-8b")], help="NAME, or NAME:STAGE such as mtp")
    add("--norm", choices=_NORMS, help="instead of the checkpoint's; eagle3 stages without one get chunk (fc_norm)")
    add("--tokens", type=choices.row_counts, default=[1, 8, 64, 512], help="values of T (default 1,8,64,512)")
    add("--dtype", type=choices.list_of("dtype", list(choices.DTYPES)), default=["bf16"], help="bf16,fp16,fp32")
    baselines = choices.list_of("baseline", BASELINES)
    add("--baselines", type=baselines, default=["eager"], help="eager,compile,inductor-max (default eager)")
    forms = choices.list_of("form", FORMS)
    add("--forms", type=forms, default=["op", "layer"], help="how ours is called: op,layer,prepacked")
    add("--threads", type=choices.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add("--min-time", type=choices.number(0, float), default=1.0, help="seconds per row and column (default 1)")
    add("--json", type=Path, metavar="FILE", help="save the run")
    add("--device", type=choices.one_of("device", _DEVICES), default="cpu", help="cpu")


def run(arguments: argparse.Namespace) -> int:
    """Print the table row by row; 1 where a result was wrong."""
    if arguments.json is not None:
        _check_writable(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    environment = read_environment(arguments.device)
    print(format_header(environment), flush=True)
    runner = _Runner(environment["cache_bytes"], arguments.min_time)
    records: list[dict] = []
    interrupted = False
    try:
        for _, rows in itertools.groupby(_rows(arguments), key=lambda row: (row.op, row.preset, row.stage, row.dtype)):
            _run_block(list(rows), runner, arguments, environment, records)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what is above is complete", flush=True)
    _print_end(arguments, environment, records)
    if interrupted:
        return 130
    return 1 if any(record["status"] == "wrong" for record in records) else 0


def _print_end(arguments: argparse.Namespace, environment: dict, records: list[dict]) -> None:
    if len(list(table.blocks(records))) > 1:
        print("\nall of the above")
        for line in table.footer(records):
            print(line)
    load = os.getloadavg()[0]
    # The run itself is a load of its threads; what exceeds them took the cores from it.
    busy = ", so other processes had the cores too" if load > environment["threads"] + 0.5 else ""
    print(f"\nload average {load:.2f} at the end{busy}; ~: the 95 % interval of the ratio holds 1")
    print(f"repro: eagle-kernels {shlex.join(arguments.argv)}")
    if arguments.json is not None:
        print(f"saved: {arguments.json}")


def _preset(text: str) -> tuple[str, InputStage]:
    """An argparse type: a model and one of its input stages, EAGLE-3 where it has several and none is named."""
    name, _, kind = text.partition(":")
    if name not in model_shapes():
        raise argparse.ArgumentTypeError(f"preset {name!r} is unknown, known are: {', '.join(model_shapes())}")
    stages = {stage.kind: stage for stage in model_shapes()[name].stages}
    if kind and kind not in stages:
        raise argparse.ArgumentTypeError(f"{name} has no stage {kind!r}, it has: {', '.join(stages)}")
    return name, stages[kind] if kind else stages.get("eagle3") or next(iter(stages.values()))


def _check_writable(arguments: argparse.Namespace) -> None:
    """An hour of measuring must not end in a path that cannot be written."""
    try:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        arguments.parser.error(f"argument --json: {arguments.json}: {failure.strerror}")
    if arguments.json.is_dir() or not os.access(arguments.json.parent, os.W_OK):
        arguments.parser.error(f"argument --json: {arguments.json} cannot be written")


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    op_names = list(_WORKLOADS) if "all" in arguments.op else arguments.op
    for op, (preset, stage), dtype, T in itertools.product(
        op_names, arguments.preset, arguments.dtype, arguments.tokens
    ):
        norm = arguments.norm or ("chunk" if (stage.kind, stage.norm) == ("eagle3", "none") else stage.norm)
        yield Row(op, preset, stage, norm, model_shapes()[preset].vocab_size, T, choices.DTYPES[dtype])


def _run_block(
    rows: list[Row], runner: "_Runner", arguments: argparse.Namespace, environment: dict, records: list[dict]
) -> None:
    """The rows of one op, shape and dtype: one table with its header."""
    workload_type = _WORKLOADS[rows[0].op]
    probe = workload_type(rows[0], runner.cache_bytes)
    names = [name for name in (*arguments.forms, *arguments.baselines) if probe.offers(name)]
    if not any(name in FORMS for name in names):
        names.insert(0, "op")
    layout = table.Layout(names)
    print("\n" + table.title(_row_record(rows[0])))
    for name in arguments.baselines:
        if name not in names:
            print(f"no column {name}: {rows[0].op} has no weight that a compiler could fold")
    print(layout.header(), flush=True)
    block: list[dict] = []
    for row in rows:
        block += (measured := runner.measure(workload_type(row, runner.cache_bytes), names))
        records += measured
        for line in layout.lines(measured):
            print(line, flush=True)
        if arguments.json is not None:  # after every row: whatever ends the run, what was measured is kept
            save(arguments.json, environment, arguments.argv, records)
    for line in layout.footer(block):
        print(line, flush=True)


def _row_record(row: Row) -> dict:
    stage = row.stage
    return {
        "op": row.op,
        "preset": row.preset,
        "stage": stage.kind,
        "norm": row.norm,
        "K": stage.K,
        "H": stage.H,
        "D": stage.D,
        "V": row.V,
        "T": row.T,
        "dtype": choices.DTYPE_NAMES[row.dtype],
    }


class _Runner:
    """Measures rows one after the other on this machine."""

    def __init__(self, cache_bytes: int, min_time: float) -> None:
        self.cache_bytes = cache_bytes
        self.min_time = min_time
        self.bandwidth = MemoryBandwidth(cache_bytes, available_memory_bytes())

    @torch.no_grad()
    def measure(self, workload: Workload, names: Sequence[str]) -> list[dict]:
        """One record per column."""
        base = _row_record(workload.row)
        try:
            rotation = plan_rotation(workload.footprint(names), self.cache_bytes, available_memory_bytes())
        except TooLarge as reason:
            return [_unmeasured(base, name, "skipped", str(reason)) for name in names]
        try:
            return self._measure(workload, names, rotation, base)
        finally:
            _release_compiled()

    def _measure(self, workload: Workload, names: Sequence[str], rotation: Rotation, base: dict) -> list[dict]:
        _progress(f"{workload.row}: {rotation.copies} copies")
        workload.allocate(rotation.copies)
        variants, records = _build(workload, names, base)
        copies = min(variant.copies for variant in variants)
        if copies < rotation.copies:
            rotation = rotation.reduced(copies, f"{COMPILE_BUDGET:.0f} s of compilation")
        _progress(f"{workload.row}: checking")
        verdicts = judge(workload, variants)
        if not all(verdict.is_right for verdict in verdicts.values()):
            wrong = [_unmeasured(base, name, "wrong", "") | _accuracy(verdict) for name, verdict in verdicts.items()]
            return wrong + records
        _progress(f"{workload.row}: timing {', '.join(variant.name for variant in variants)}")
        rates = self.bandwidth.measure()
        samples = interleave([variant.call for variant in variants], copies, self.min_time)
        _progress("")
        timed = []
        for variant, taken in zip(variants, samples, strict=True):
            record = base | {"variant": variant.name, "is_ours": variant.name in FORMS, "status": "ok"}
            record |= _figures(taken, workload, rates) | _rotation(rotation) | _accuracy(verdicts[variant.name])
            record["array_exceeds_cache"] = self.bandwidth.exceeds_cache
            record |= {"plan": str(workload.plan())} if record["is_ours"] else _speedup(taken, samples[0])
            timed.append(record)
        return timed + records


def _build(workload: Workload, names: Sequence[str], base: dict) -> tuple[list[Variant], list[dict]]:
    """The columns that can be built, and records of the baselines that cannot."""
    variants, failures = [], []
    for name in names:
        _progress(f"{workload.row}: preparing {name}")
        try:
            variants.append(workload.variant(name))
        except Exception as failure:
            if name in FORMS:
                raise
            reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
            failures.append(_unmeasured(base, name, "failed", reason))
    return variants, failures


def _unmeasured(base: dict, name: str, status: str, reason: str) -> dict:
    return base | {"variant": name, "is_ours": name in FORMS, "status": status, "reason": reason}


def _accuracy(verdict: Verdict) -> dict:
    # JSON knows no inf and no nan.
    error = verdict.error if verdict.error < float("inf") else None
    return {"error": error, "error_bound": verdict.bound}


def _rotation(rotation: Rotation) -> dict:
    return {
        "copies": rotation.copies,
        "rotated_bytes": rotation.total_bytes,
        "cold": rotation.is_cold,
        "copies_limited_by": rotation.limit,
    }


def _figures(samples: Samples, workload: Workload, rates: Rates) -> dict:
    traffic, flops = workload.traffic(), workload.flops()
    return {
        "median_ms": samples.median * 1e3,
        "min_ms": samples.minimum * 1e3,
        "p20_ms": samples.quantile(0.2) * 1e3,
        "p80_ms": samples.quantile(0.8) * 1e3,
        "rounds": len(samples.seconds),
        "bytes": traffic,
        "gbps": traffic / samples.median * 1e-9,
        "copy_gbps": rates.copy * 1e-9,
        "read_gbps": rates.read * 1e-9,
        "tflops": flops / samples.median * 1e-12,
    }


def _speedup(baseline: Samples, ours: Samples) -> dict:
    speedup = ratio(baseline, ours)
    return {"speedup": speedup.value, "speedup_low": speedup.low, "speedup_high": speedup.high}


def _release_compiled() -> None:
    """Drop what torch.compile keeps alive: the frozen copies of a row are as large as its weights."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()


def _progress(text: str) -> None:
    """One line on a terminal, overwritten by the next; nothing in a log."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print("\r" + text[: width - 1].ljust(width - 1), end="\r", file=sys.stderr, flush=True)
