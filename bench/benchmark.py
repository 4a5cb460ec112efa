"""`bench` and `roofline`: rows measured one after the other, each checked first, with the ceilings of the same run."""

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from eagle_kernels import environment as settings
from eagle_kernels import ops, plan

from . import cli_types, info, report
from .baselines import BASELINES, COMPILE_BUDGET
from .cli_types import Command
from .measure import (
    FORMS,
    TIMERS,
    Ceilings,
    Rates,
    Rotation,
    Samples,
    TooLarge,
    Variant,
    format_bytes,
    is_ours,
    plan_rotation,
    prepare,
    ratio,
    time_prepared,
)
from .ops import WORKLOADS
from .ops.norm_concat_linear import NormConcatLinear
from .workloads import Row, Verdict, Workload, judge

_NORMS = ("chunk", "concat", "none")
_OUTPUTS = ("json", "csv", "markdown", "plot")

# Seconds per row, timer and column. A CPU is noisier, and its calls are longer.
_MIN_TIME = {"cpu": 1.0, "cuda": 0.2}


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    op_list = cli_types.list_of("op", [*ops.__all__, "all"])
    add("--device", type=cli_types.one_of("device", info.DEVICES), default="cuda", help="cuda (default), cpu")
    add("--op", type=op_list, default=["norm_concat_linear"], help="ops with commas between, or all")
    cli_types.add_stage_arguments(parser)
    add("--norm", choices=_NORMS, help="instead of the checkpoint's; eagle3 stages without one get chunk (fc_norm)")
    rows = "values of T: 1,8,64 or 1:8192:x2 (default 1,8,64,512)"
    add("--tokens", type=cli_types.row_counts, default=[1, 8, 64, 512], metavar="T", help=rows)
    add("--dtype", type=cli_types.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    baselines = cli_types.list_of("baseline", [*BASELINES, "none"])
    help_text = f"{','.join(BASELINES)} or none (default eager); eager of the memory ops brings eager-out"
    add("--baselines", type=baselines, default=["eager"], help=help_text)
    forms = cli_types.list_of("form", [*FORMS, "none"])
    add("--forms", type=forms, default=["op", "layer"], help="how ours is called: op,layer,prepacked or none")
    backends = cli_types.list_of("backend", ["auto", *settings.BACKENDS])
    help_text = "a column of ours for each: auto,cuda,triton,cpu,reference (default auto)"
    add("--backends", type=backends, default=["auto"], help=help_text)
    timers = cli_types.list_of("timer", sorted({name for names in TIMERS.values() for name in names}))
    add("--timer", type=timers, help="graph,eager on cuda (default both), clock on cpu")
    add("--threads", type=cli_types.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add(
        "--min-time", type=cli_types.number(0, float), help="seconds per row, timer and column (default 1; 0.2 on cuda)"
    )
    for name, what in zip(_OUTPUTS, ("the run", "its records", "its tables", "its curves, PNG"), strict=True):
        add(f"--{name}", type=cli_types.png if name == "plot" else Path, metavar="FILE", help=f"save {what}")
    add("--resume", action="store_true", help="keep the rows that the --json file has, and measure the others")


def _run_bench(arguments: argparse.Namespace) -> int:
    """Print the table row by row; 1 where a result was wrong, a column of ours failed, or a ceiling was passed."""
    _check(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    environment = info.read_environment(arguments.device)
    print(info.format_header(environment), flush=True)
    records = _kept_records(arguments, environment)
    kept = {report.row_key(record) for record in records}
    rows = [row for row in _rows(arguments) if not _is_kept(row, arguments.timer, kept)]
    if len(kept) > 0:
        print(f"{len(kept)} rows kept from {arguments.json}, {len(rows)} to measure", flush=True)
    session = _Session(arguments, environment, records, len(rows))
    interrupted = False
    try:
        if rows:
            runner = Runner(arguments.device, environment["cache_bytes"], arguments.min_time, arguments.timer)
            for _, block in itertools.groupby(rows, key=lambda row: (row.op, row.preset, row.stage, row.dtype)):
                session.measure_block(list(block), runner)
    except KeyboardInterrupt:
        interrupted = True
        progress("")
        print("interrupted: what is above is complete", flush=True)
    session.finish()
    if interrupted:
        return 130
    failed = any(record["status"] == "failed" and record["is_ours"] for record in records)
    wrong = any(record["status"] == "wrong" for record in records)
    return 1 if failed or wrong or any(map(report.is_above_ceiling, records)) else 0


def _check(arguments: argparse.Namespace) -> None:
    """Whatever would end the run after an hour of measuring ends it here."""
    fail, device = arguments.parser.error, arguments.device
    if (reason := info.unsupported_reason(device)) is not None:
        fail(f"no CUDA device: {reason}; --device cpu measures this machine's processor")
    arguments.timer = arguments.timer or list(TIMERS[device])
    if foreign := [name for name in arguments.timer if name not in TIMERS[device]]:
        fail(f"argument --timer: {', '.join(foreign)} is not for {device}, which has: {', '.join(TIMERS[device])}")
    for backend in arguments.backends:
        if backend != "auto" and (reason := plan.unsupported_reason(backend, torch.device(device))) is not None:
            usable = [name for name in settings.BACKENDS if plan.unsupported_reason(name, torch.device(device)) is None]
            fail(f"argument --backends: {backend} cannot run here: {reason}; usable are: auto, {', '.join(usable)}")
    arguments.min_time = _MIN_TIME[device] if arguments.min_time is None else arguments.min_time
    arguments.stages = cli_types.stages(arguments)
    if arguments.resume and arguments.json is None:
        fail("argument --resume: there is nothing to go on with, --json names no file")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        fail("argument --plot: matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    for name in _OUTPUTS:
        if (path := getattr(arguments, name)) is not None:
            _check_writable(arguments, f"--{name}", path)


def _check_writable(arguments: argparse.Namespace, option: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        arguments.parser.error(f"argument {option}: {path}: {failure.strerror}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        arguments.parser.error(f"argument {option}: {path} cannot be written")


def _kept_records(arguments: argparse.Namespace, environment: dict) -> list[dict]:
    """With --resume, what the file has of this run; how that was measured goes into the environment."""
    if not arguments.resume or not arguments.json.exists():
        return []
    try:
        earlier = report.load(arguments.json)
    except report.UnreadableResult as failure:
        arguments.parser.error(f"argument --resume: {failure}")
    here, there = environment["device_slug"], earlier["environment"]["device_slug"]
    if here != there:
        arguments.parser.error(f"argument --resume: {arguments.json} was measured on {there}, and this is {here}")
    before = {"argv": earlier["argv"], "date": earlier["environment"]["date"]}
    environment["resumed"] = [*earlier["environment"].get("resumed", []), before]
    return earlier["records"]


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    op_names = list(WORKLOADS) if "all" in arguments.op else arguments.op
    for op, (preset, stage, V), dtype, T in itertools.product(
        op_names, arguments.stages, arguments.dtype, arguments.tokens
    ):
        norm = arguments.norm or cli_types.norm_of(stage)
        yield Row(op, preset, stage, norm, V, T, cli_types.DTYPES[dtype], arguments.device)


def _is_kept(row: Row, timers: Sequence[str], kept: set[tuple]) -> bool:
    return all(report.row_key(row_record(row) | {"timer": timer}) in kept for timer in timers)


def row_record(row: Row) -> dict:
    """The fields that all records of a row share, the timer aside."""
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
        "dtype": cli_types.DTYPE_NAMES[row.dtype],
    }


class Runner:
    """Measures rows on one device, with the ceilings of the same run beside them."""

    def __init__(self, device: str, cache_bytes: int, min_time: float, timers: Sequence[str]) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.min_time = min_time
        self.timers = timers
        factor = info.CACHE_FACTORS[device]
        self.ceilings = Ceilings(device, cache_bytes, factor, info.available_bytes(device))

    @torch.no_grad()
    def measure(self, workload: Workload, names: Sequence[str]) -> list[dict]:
        """One record per timer and column."""
        base = row_record(workload.row)
        try:
            rotation = plan_rotation(
                workload.footprint(names),
                self.cache_bytes,
                info.available_bytes(self.device),
                cache_factor=info.CACHE_FACTORS[self.device],
                max_copies=info.MAX_COPIES[self.device],
            )
            return self._measure(workload, names, rotation, base)
        except TooLarge as reason:
            return self._skipped(base, names, str(reason))
        except torch.OutOfMemoryError:
            needed = workload.footprint(names)
            size = format_bytes(needed.fixed + 2 * needed.resident)
            return self._skipped(base, names, f"needs {size} and more, and the GPU ran out of memory")
        finally:
            _release_compiled()

    def _skipped(self, base: dict, names: Sequence[str], reason: str) -> list[dict]:
        progress("")
        return [_unmeasured(base, timer, name, "skipped", reason) for timer in self.timers for name in names]

    def _measure(self, workload: Workload, names: Sequence[str], rotation: Rotation, base: dict) -> list[dict]:
        progress(f"{workload.row}: {rotation.copies} copies")
        workload.allocate(rotation.copies)
        variants, failures = _build(workload, names)
        records = [
            _unmeasured(base, timer, name, "failed", reason)
            for timer in self.timers
            for name, reason in failures.items()
        ]
        if not variants:
            return records
        copies = min(variant.copies for variant in variants)
        if copies < rotation.copies:
            rotation = rotation.reduced(copies, f"{COMPILE_BUDGET:.0f} s of compilation")
        progress(f"{workload.row}: checking")
        verdicts = judge(workload, variants)
        if not all(verdict.is_right for verdict in verdicts.values()):
            return [
                _unmeasured(base, timer, name, "wrong", "") | _accuracy(verdict)
                for timer in self.timers
                for name, verdict in verdicts.items()
            ] + records
        self.ceilings.matmul(workload.row.dtype)  # before anything of the row is timed
        timed = []
        for timer in self.timers:
            arguments = (timer, variants, copies, workload, base | _rotation(rotation), verdicts)
            records_of_timer = self._time(*arguments)
            if any(map(report.is_above_ceiling, records_of_timer)):
                # Once more: a neighbour may have kept the streams from the memory, and a wrong ceiling will show again.
                records_of_timer = self._time(*arguments)
            timed += records_of_timer
            timed += [record for record in records if record["timer"] == timer]
        progress("")
        return timed

    def _time(
        self,
        timer: str,
        variants: Sequence[Variant],
        copies: int,
        workload: Workload,
        base: dict,
        verdicts: dict[str, Verdict],
    ) -> list[dict]:
        progress(f"{workload.row}: timing {', '.join(variant.name for variant in variants)} by {timer}")
        prepared, failures = {}, []
        for variant in variants:
            try:
                prepared[variant.name] = prepare(timer, variant, copies)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # what cannot be captured, for one
                failures.append(_unmeasured(base, timer, variant.name, "failed", _one_line(failure)))
        beside = self.ceilings.beside()
        rates = None if beside else self.ceilings.measure(workload.row.dtype)
        taken = time_prepared(timer, list(prepared.values()), copies, self.min_time, beside)
        rates = rates or self.ceilings.rates(workload.row.dtype, taken[len(prepared) :])
        samples = dict(zip(prepared, taken, strict=False))
        first = next((taken for name, taken in samples.items() if is_ours(name)), None)
        timed = []
        for variant in (variant for variant in variants if variant.name in samples):
            taken = samples[variant.name]
            record = base | {"timer": timer, "variant": variant.name, "is_ours": is_ours(variant.name), "status": "ok"}
            record |= _figures(taken, workload, rates) | _accuracy(verdicts[variant.name])
            record["ceiling"] = "streams" if beside else "torch"
            record["array_exceeds_cache"] = self.ceilings.exceeds_cache
            if record["is_ours"]:
                with variant.active():
                    record["plan"] = str(workload.plan())
            elif first is not None:
                record |= _speedup(taken, first)
            timed.append(record)
        return timed + failures


def _build(workload: Workload, names: Sequence[str]) -> tuple[list[Variant], dict[str, str]]:
    """The columns that can be built and called, and why the others cannot."""
    variants, failures = [], {}
    for name in names:
        progress(f"{workload.row}: preparing {name}")
        try:
            variant = workload.variant(name)
            with variant.active():
                variant.call(0)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            failures[name] = _one_line(failure)
        else:
            variants.append(variant)
    return variants, failures


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"


def _unmeasured(base: dict, timer: str, name: str, status: str, reason: str) -> dict:
    return base | {"timer": timer, "variant": name, "is_ours": is_ours(name), "status": status, "reason": reason}


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
        "bytes": traffic.total,
        "gbps": traffic.total / samples.median * 1e-9,
        "tflops": flops / samples.median * 1e-12,
        "floor_ms": rates.floor_seconds(traffic, flops) * 1e3,
        "copy_gbps": rates.copy * 1e-9,
        "read_gbps": rates.read * 1e-9,
        "add_gbps": None if rates.add is None else rates.add * 1e-9,
        "memory_gbps": traffic.total / rates.memory_seconds(traffic) * 1e-9,
        "matmul_tflops": rates.matmul * 1e-12,
    }


def _speedup(baseline: Samples, ours: Samples) -> dict:
    speedup = ratio(baseline, ours)
    return {"speedup": speedup.value, "speedup_low": speedup.low, "speedup_high": speedup.high}


def _release_compiled() -> None:
    """Drop what torch.compile keeps alive: the frozen copies of a row are as large as its weights."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()


def progress(text: str) -> None:
    """One line on a terminal, overwritten by the next; nothing in a log."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print("\r" + text[: width - 1].ljust(width - 1), end="\r", file=sys.stderr, flush=True)


class _Session:
    """What was measured so far: printed row by row, and saved after each."""

    def __init__(self, arguments: argparse.Namespace, environment: dict, records: list[dict], rows: int) -> None:
        self.arguments, self.environment, self.records = arguments, environment, records
        self.rows, self.done, self.started = rows, 0, time.monotonic()

    def measure_block(self, rows: list[Row], runner: Runner) -> None:
        """The rows of one op, shape and dtype: one table with its header."""
        arguments = self.arguments
        probe = WORKLOADS[rows[0].op](rows[0], runner.cache_bytes)
        reasons = {name: probe.unsupported_reason(name) for name in _columns(arguments)}
        names = [name for name, reason in reasons.items() if reason is None]
        print("\n" + report.title(row_record(rows[0])))
        for name, reason in reasons.items():
            if reason is not None and not _is_expected(name):
                print(f"no column {name}: {reason}")
        if not names:
            self.done += len(rows)
            print("nothing to measure", flush=True)
            return
        layout = report.Layout(names, rows[0].op, arguments.timer)
        print(layout.header(), flush=True)
        block: list[dict] = []
        for row in rows:
            progress(f"row {self.done + 1} of {self.rows}, {self._remaining()}: {row}")
            measured = runner.measure(WORKLOADS[row.op](row, runner.cache_bytes), names)
            self.done += 1
            block += measured
            self.records += measured
            for per_timer in report.rows(measured):
                for line in layout.lines(per_timer):
                    print(line, flush=True)
            self.save()
        for line in layout.footer(block):
            print(line, flush=True)

    def _remaining(self) -> str:
        if not self.done:
            return "time left unknown"
        left = (time.monotonic() - self.started) / self.done * (self.rows - self.done)
        return f"about {left:.0f} s left"

    def save(self) -> None:
        """After every row: whatever ends the run, what was measured is kept."""
        if self.arguments.json is not None:
            report.save(self.arguments.json, self.environment, self.arguments.argv, self.records)
        if self.arguments.csv is not None:
            report.save_csv(self.arguments.csv, self.environment, self.records)

    def finish(self) -> None:
        arguments, environment, records = self.arguments, self.environment, self.records
        environment["clocks_after"] = info.clocks(arguments.device)
        self.save()
        if len(list(report.blocks(records))) > 1:
            print("\nall of the above")
            for line in report.footer(records):
                print(line)
        load_now = os.getloadavg()[0]
        # The run itself is a load of its threads; what exceeds them took the cores from it.
        busy = ", so other processes had the cores too" if load_now > environment["threads"] + 0.5 else ""
        print(
            f"\nclocks at the end: {info.format_clocks(environment['clocks_after'])}; load average {load_now:.2f}{busy}"
        )
        print("times are median (p20 - p80); ~: the 95 % interval of the ratio holds 1")
        for record in filter(report.is_above_ceiling, records):
            print(f"ABOVE THE CEILING: {report.ceiling_sentence(record)}")
        print(f"repro: eagle-kernels {shlex.join(arguments.argv)}")
        run = {"environment": environment, "records": records}
        if arguments.markdown is not None:
            report.write_text(arguments.markdown, report.render(arguments.json, run))
        if arguments.plot is not None and any(record["status"] == "ok" for record in records):
            report.draw([run], arguments.plot)
        saved = [str(path) for path in (getattr(arguments, name) for name in _OUTPUTS) if path is not None]
        if saved:
            print(f"saved: {', '.join(saved)}")


def _columns(arguments: argparse.Namespace) -> list[str]:
    """The names asked for: forms on each backend, then baselines."""
    forms = [name for name in arguments.forms if is_ours(name)]
    ours = [
        form if backend == "auto" else f"{form}:{backend}"
        for form, backend in itertools.product(forms, arguments.backends)
    ]
    baselines = [name for name in arguments.baselines if name != "none"]
    if "eager" in baselines:  # never without the fair one: half of what eager takes at large T is fresh pages
        baselines.insert(baselines.index("eager") + 1, "eager-out")
    return [*ours, *dict.fromkeys(baselines)]


def _is_expected(name: str) -> bool:
    """Columns that are there by default, and are silently left out where the op or device has none."""
    return name.partition(":")[0] in ("layer", "eager-out")


def _add_roofline_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", type=cli_types.one_of("device", info.DEVICES), default="cuda", help="cuda (default), cpu")
    cli_types.add_stage_arguments(parser)
    add(
        "--tokens",
        type=cli_types.row_counts,
        default=cli_types.row_counts("1:4096:x4"),
        metavar="T",
        help="values of T",
    )
    add("--dtype", type=cli_types.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    add("--threads", type=cli_types.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add("--min-time", type=cli_types.number(0, float), default=1.0, help="seconds per ceiling (default 1)")
    add("--json", type=Path, metavar="FILE", help="save the ceilings")


def _run_roofline(arguments: argparse.Namespace) -> int:
    device = arguments.device
    if (reason := info.unsupported_reason(device)) is not None:
        arguments.parser.error(f"no CUDA device: {reason}; --device cpu measures this machine's processor")
    torch.set_num_threads(arguments.threads)
    environment = info.read_environment(device)
    print(info.format_header(environment), flush=True)
    stages = cli_types.stages(arguments)
    available = info.available_bytes(device)
    ceilings = Ceilings(device, environment["cache_bytes"], info.CACHE_FACTORS[device], available)
    measured: dict[str, Rates] = {}
    for dtype in arguments.dtype:
        rates = measured[dtype] = ceilings.measure(cli_types.DTYPES[dtype], arguments.min_time)
        copy, read = rates.copy * 1e-9, rates.read * 1e-9
        print(f"\n{dtype}: copy {copy:.1f} GB/s, read {read:.1f} GB/s, matmul {rates.matmul * 1e-12:.2f} TFLOP/s")
        _print_floors(arguments, stages, dtype, rates)
    if arguments.json is not None:
        ceilings_by_dtype = {dtype: asdict(rates) for dtype, rates in measured.items()}
        run = {
            "schema_version": report.SCHEMA_VERSION,
            "argv": arguments.argv,
            "environment": environment,
            "records": [],
        }
        report.write_text(arguments.json, json.dumps(run | {"rates": ceilings_by_dtype}, indent=1) + "\n")
        print(f"saved: {arguments.json}")
    return 0


def _print_floors(arguments: argparse.Namespace, stages: list[cli_types.Stage], dtype: str, rates: Rates) -> None:
    print(f"{'norm_concat_linear':<40}{'T':>7}{'MB':>10}{'GFLOP':>10}{'floor us':>11}  bound")
    for preset, stage, V in stages:
        name = f"{preset}:{stage.kind} K={stage.K} H={stage.H} D={stage.D}"
        for T in arguments.tokens:
            row = Row("norm_concat_linear", preset, stage, cli_types.norm_of(stage), V, T, cli_types.DTYPES[dtype])
            workload = NormConcatLinear(row)
            traffic, flops = workload.traffic(), workload.flops()
            floor = rates.floor_seconds(traffic, flops)
            bound = "matmul" if floor > rates.floor_seconds(traffic, 0) else "memory"
            megabytes = traffic.total * 1e-6
            print(f"{name:<40}{T:>7}{megabytes:>10.1f}{flops * 1e-9:>10.2f}{floor * 1e6:>11.1f}  {bound}")
            name = ""


BENCH = Command(
    "Time the ops against eager torch, torch.compile and other packages on the shapes of real models, each checked.",
    _add_bench_arguments,
    _run_bench,
)
ROOFLINE = Command(
    "Measure this machine's copy and read bandwidth and matmul rate, and the floor they set for each shape and T.",
    _add_roofline_arguments,
    _run_roofline,
)
