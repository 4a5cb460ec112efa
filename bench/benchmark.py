"""`bench` and `roofline`: rows measured one after the other, each checked first, with the ceilings of the same run."""

import argparse
import gc
import importlib.util
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import environment as settings
from eagle_kernels import plan
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.quantized_weight import WEIGHT_FORMATS

from . import cli_types, info
from .baselines import BASELINES
from .cli_types import Command
from .measure import (
    DEFAULT_TIMERS,
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
from .ops import WORKLOADS, workload_of
from .output import Progress, check_writable, say, wrap, write_text
from .runs import curves, report, saved_run
from .workloads import DENSE, Row, Verdict, Workload, judge

_NORMS = ("chunk", "concat", "none")
_OUTPUTS = ("json", "csv", "markdown", "plot")

# Seconds per row, timer and column. A CPU is noisier, and its calls are longer.
_MIN_TIME = {"cpu": 1.0, "cuda": 0.2}


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    op_list = cli_types.list_of("op", [*WORKLOADS, "all"])
    add("--device", type=cli_types.one_of("device", info.DEVICES), default="cuda", help="cuda (default), cpu")
    help_text = "ops with commas between, or all (default norm_concat_linear)"
    add("--op", type=op_list, default=["norm_concat_linear"], help=help_text)
    cli_types.add_stage_arguments(parser)
    add("--norm", choices=_NORMS, help="instead of the checkpoint's; eagle3 stages without one get chunk (fc_norm)")
    rows = "values of T: 1,8,64 or 1:8192:x2 (default 1,8,64,512)"
    add("--tokens", type=cli_types.row_counts, default=[1, 8, 64, 512], metavar="T", help=rows)
    add("--dtype", type=cli_types.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    weights = cli_types.list_of("weight", [DENSE, *WEIGHT_FORMATS])
    help_text = f"of norm_concat_linear: {','.join([DENSE, *WEIGHT_FORMATS])} (default {DENSE})"
    add("--weights", type=weights, default=[DENSE], help=help_text)
    baselines = cli_types.list_of("baseline", [*BASELINES, "none"])
    help_text = f"{','.join(BASELINES)} or none (default eager); eager of the memory ops brings eager-out"
    add("--baselines", type=baselines, default=["eager"], help=help_text)
    forms = cli_types.list_of("form", [*FORMS, "none"])
    help_text = f"how ours is called: {','.join(FORMS)} or none (default op,layer)"
    add("--forms", type=forms, default=["op", "layer"], help=help_text)
    backends = cli_types.list_of("backend", ["auto", *settings.BACKENDS])
    help_text = "a column of ours for each: auto,cuda,triton,cpu,reference (default auto)"
    add("--backends", type=backends, default=["auto"], help=help_text)
    timers = cli_types.list_of("timer", sorted({name for names in TIMERS.values() for name in names}))
    add("--timer", type=timers, help="graph,eager,spaced on cuda (default graph,eager), clock on cpu")
    add("--threads", type=cli_types.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add(
        "--min-time", type=cli_types.number(0, float), help="seconds per row, timer and column (default 1; 0.2 on cuda)"
    )
    for name, what in zip(_OUTPUTS, ("the run", "its records", "its tables", "its curves, PNG"), strict=True):
        add(f"--{name}", type=cli_types.png if name == "plot" else Path, metavar="FILE", help=f"save {what}")
    add("--resume", action="store_true", help="keep what the --json file has, and measure what it lacks")


def _run_bench(arguments: argparse.Namespace) -> int:
    """Print the table row by row; 1 where a result was wrong, a column of ours failed, or a ceiling was exceeded."""
    _check(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    environment = info.read_environment(arguments.device)
    records = _kept_records(arguments, environment)
    info.say_header(environment)
    for sentence in _left_out(arguments):
        say(wrap(sentence))
    blocks = list(_blocks(arguments, environment["cache_bytes"], records))
    count = sum(len(block.rows) for block in blocks)
    if records:
        kept = {saved_run.row_key(record) for record in records}
        again = {key for block in blocks for key in block.keys(arguments.timer)}
        say(wrap(f"{len(kept - again)} rows kept from {arguments.json}, {count} to measure"))
    session = _Session(arguments, environment, records, Progress(count, "rows"))
    interrupted = False
    try:
        if count:
            runner = Runner(arguments.device, environment["cache_bytes"], arguments.min_time, arguments.timer)
            runner.note = session.progress.note
            for block in blocks:
                session.measure_block(block, runner)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: what is above is complete")
    finally:
        session.progress.close()
    session.finish()
    if interrupted:
        return 130
    failed = any(record["status"] == "failed" and record["is_ours"] for record in records)
    wrong = any(record["status"] == "wrong" for record in records)
    return 1 if failed or wrong or any(map(saved_run.is_above_ceiling, records)) else 0


def _check_device(arguments: argparse.Namespace) -> None:
    if (reason := info.unsupported_reason(arguments.device)) is not None:
        arguments.parser.error(f"no CUDA device: {reason}; --device cpu measures this machine's processor")


def _check(arguments: argparse.Namespace) -> None:
    """Fail now on whatever would otherwise fail after an hour of measuring."""
    fail, device = arguments.parser.error, arguments.device
    _check_device(arguments)
    arguments.timer = arguments.timer or list(DEFAULT_TIMERS[device])
    if foreign := [name for name in arguments.timer if name not in TIMERS[device]]:
        fail(f"argument --timer: {', '.join(foreign)} is not for {device}, which has: {', '.join(TIMERS[device])}")
    for backend in arguments.backends:
        if backend != "auto" and (reason := plan.unsupported_reason(backend, torch.device(device))) is not None:
            usable = [name for name in settings.BACKENDS if plan.unsupported_reason(name, torch.device(device)) is None]
            fail(f"argument --backends: {backend} cannot run here: {reason}; usable are: auto, {', '.join(usable)}")
    arguments.min_time = _MIN_TIME[device] if arguments.min_time is None else arguments.min_time
    arguments.stages = cli_types.stages(arguments)
    if next(_rows(arguments), None) is None:
        fail("argument --op: " + "; ".join(_left_out(arguments)))
    if arguments.resume and arguments.json is None:
        fail("argument --resume: there is nothing to go on with, --json names no file")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        fail("argument --plot: matplotlib is not installed: pip install 'eagle-kernels[plot]'")
    paths: dict[Path, str] = {}
    for name in _OUTPUTS:
        if (path := getattr(arguments, name)) is not None:
            check_writable(arguments.parser, f"--{name}", path)
            if (other := paths.setdefault(path.resolve(), name)) != name:
                fail(f"argument --{name}: {path} is the file of --{other} too")


# Fields of the environment that may differ from run to run on one machine.
_READINGS = ("date", "clocks", "clocks_after", "load_average")
_NOT_COMPARED = (*_READINGS, "available_bytes", "resumed")


def _kept_records(arguments: argparse.Namespace, environment: dict) -> list[dict]:
    """With --resume, the records of the --json file, which must be of the same environment; its clocks, load and date
    go into `environment["resumed"]`."""
    if not arguments.resume or not arguments.json.exists():
        return []
    try:
        earlier = saved_run.load(arguments.json)
    except saved_run.UnreadableResult as failure:
        arguments.parser.error(f"argument --resume: {failure}")
    before = earlier["environment"]
    differences = [
        f"{name} {before.get(name)} and not {environment.get(name)}"
        for name in dict.fromkeys((*before, *environment))
        if name not in _NOT_COMPARED and before.get(name) != environment.get(name)
    ]
    if differences:  # else one header would stand over rows of two environments
        arguments.parser.error(f"argument --resume: {arguments.json} was measured with {'; '.join(differences)}")
    readings = {name: before[name] for name in _READINGS if name in before}
    environment["resumed"] = [*before.get("resumed", []), {"argv": earlier.get("argv"), **readings}]
    return earlier["records"]


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    op_names = list(WORKLOADS) if "all" in arguments.op else arguments.op
    for op, (preset, stage, V), dtype, weight, T in itertools.product(
        op_names, arguments.stages, arguments.dtype, arguments.weights, arguments.tokens
    ):
        norm = arguments.norm or cli_types.norm_of(stage)
        if _no_row_reason(op, stage, weight, arguments.norm) is None:
            yield Row(op, preset, stage, norm, V, T, cli_types.DTYPES[dtype], arguments.device, weight)


def _no_row_reason(op: str, stage: InputStage, weight: str, norm: str | None) -> str | None:
    if weight != DENSE and op != "norm_concat_linear":
        return "it has no weight"
    if op == "norm_concat_linear" and stage.projects_streams and norm not in (None, stage.norm):
        return f"each of its sources has a norm, and --norm is {norm}"
    return WORKLOADS[op].no_stage_reason(stage)


def _left_out(arguments: argparse.Namespace) -> Iterator[str]:
    """A sentence for each row that was asked for by name and that the op does not have."""
    ops = () if "all" in arguments.op else arguments.op
    for op, (preset, stage, _), weight in itertools.product(ops, arguments.stages, arguments.weights):
        if (reason := _no_row_reason(op, stage, weight, arguments.norm)) is not None:
            of_codes = "" if weight == DENSE else f" x {weight}"
            other = _stage_with_row(op, preset, weight, arguments.norm)
            elsewhere = "" if other is None else f"; {other} has one"
            yield f"no row of {op} for {preset}:{stage.kind}{of_codes}: {reason}{elsewhere}"


def _stage_with_row(op: str, preset: str, weight: str, norm: str | None) -> str | None:
    """A stage, of the same preset if it can be, that has such a row."""
    every = sorted(cli_types.presets("all"), key=lambda each: each[0] != preset)
    found = (f"{name}:{stage.kind}" for name, stage, _ in every if _no_row_reason(op, stage, weight, norm) is None)
    return next(found, None)


@dataclass(frozen=True)
class _Block:
    """The rows to measure of one op, shape and dtype: one table."""

    rows: list[Row]
    names: list[list[str]]  # the columns of each row
    reasons: dict[str, str]  # why a column that was asked for is not there

    def keys(self, timers: Sequence[str]) -> Iterator[tuple]:
        return (key for row in self.rows for key in _keys(row, timers))


def _keys(row: Row, timers: Sequence[str]) -> list[tuple]:
    return [saved_run.row_key(row_record(row) | {"timer": timer}) for timer in timers]


def _blocks(arguments: argparse.Namespace, cache_bytes: int, records: Sequence[dict]) -> Iterator[_Block]:
    """The tables to measure. A row with a column that is missing or was not timed is measured again with all of its
    columns, since ratios compare columns that were measured side by side."""
    earlier: dict[tuple, dict[str, str]] = {}
    for record in records:
        earlier.setdefault(saved_run.row_key(record), {})[record["variant"]] = record["status"]
    for _, group in itertools.groupby(_rows(arguments), key=lambda row: replace(row, T=0)):
        rows = list(group)
        probe = workload_of(rows[0], cache_bytes)
        answers = {name: probe.unsupported_reason(name) for name in _columns(arguments)}
        names = [name for name, reason in answers.items() if reason is None]
        block = _Block([], [], {name: reason for name, reason in answers.items() if reason is not None})
        for row in rows:
            keys = _keys(row, arguments.timer)
            had = dict.fromkeys(name for key in keys for name in earlier.get(key, {}))
            done = all(earlier.get(key, {}).get(name) == "ok" for key in keys for name in {*names, *had})
            if not (done and had):
                block.rows.append(row)
                others = (name for name in had if name not in names and probe.unsupported_reason(name) is None)
                block.names.append([*names, *others])
        if block.rows:
            yield block


def row_record(row: Row) -> dict:
    """The fields that all records of a row share, the timer aside."""
    stage, context = row.stage, row.stage.context
    cache = {} if context is None else {"n": context.num_kv_heads, "d": context.head_dim}
    reads_streams = row.op == "capture_hidden" or (row.op == "norm_concat_linear" and stage.projects_streams)
    return {
        "op": row.op,
        "preset": row.preset,
        "stage": stage.kind,
        "norm": row.norm,
        "S": stage.streams if reads_streams else 1,
        "K": stage.K,
        "H": stage.H,
        "D": stage.D,
        "V": row.V,
        "T": row.T,
        "dtype": cli_types.DTYPE_NAMES[row.dtype],
        "weight": row.weight,
        **cache,
    }


class Runner:
    """Measures rows on one device, and the ceilings in the same run."""

    def __init__(self, device: str, cache_bytes: int, min_time: float, timers: Sequence[str]) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.min_time = min_time
        self.timers = timers
        self.note: Callable[[str], None] = lambda text: None  # takes progress messages
        factor = info.CACHE_FACTORS[device]
        self.ceilings = Ceilings(device, cache_bytes, factor, info.available_bytes(device))

    def variant(self, workload: Workload, name: str) -> Variant:
        """The column of this name."""
        return workload.variant(name)

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
        return [_unmeasured(base, timer, name, "skipped", reason) for timer in self.timers for name in names]

    def _failed(self, base: dict, failures: dict[str, str]) -> list[dict]:
        return [
            _unmeasured(base, timer, name, "failed", reason)
            for timer in self.timers
            for name, reason in failures.items()
        ]

    def _measure(self, workload: Workload, names: Sequence[str], rotation: Rotation, base: dict) -> list[dict]:
        self.note(f"{workload.row}: {rotation.copies} copies")
        workload.allocate(rotation.copies)
        variants, failures = self._build(workload, names)
        if not variants:
            return self._failed(base, failures)
        fewest = min(variants, key=lambda variant: variant.copies)
        copies = fewest.copies
        if copies < rotation.copies:
            rotation = rotation.reduced(copies, f"the time to make more modules of {fewest.name}")
        self.note(f"{workload.row}: checking")
        verdicts = judge(workload, variants)
        wrong = [name for name, verdict in verdicts.items() if not verdict.is_right]
        if any(map(is_ours, wrong)):
            return [
                _unmeasured(base, timer, name, "wrong", "") | _accuracy(verdict)
                for timer in self.timers
                for name, verdict in verdicts.items()
            ] + self._failed(base, failures)
        # torch.compile or another package may be wrong on this machine, which is no fault of the row's other columns.
        failures |= {name: f"wrong result: {report.error_text(_accuracy(verdicts[name]))}" for name in wrong}
        variants = [variant for variant in variants if variant.name not in wrong]
        records = self._failed(base, failures)
        if not variants:
            return records
        self.ceilings.matmul(workload.row.dtype)  # before anything of the row is timed
        timed = []
        for timer in self.timers:
            arguments = (timer, variants, copies, workload, base | _rotation(rotation), verdicts)
            records_of_timer = self._time(*arguments)
            if any(map(saved_run.is_above_ceiling, records_of_timer)):
                # Once more: another process may have slowed the streams down; a wrong ceiling shows a second time.
                records_of_timer = self._time(*arguments)
            timed += records_of_timer
            timed += [record for record in records if record["timer"] == timer]
        return timed

    def _build(self, workload: Workload, names: Sequence[str]) -> tuple[list[Variant], dict[str, str]]:
        """The columns that can be built and called, and why the others cannot."""
        variants, failures = [], {}
        for name in names:
            self.note(f"{workload.row}: preparing {name}")
            try:
                variant = self.variant(workload, name)
                with variant.active():
                    variant.call(0)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # another package may raise anything
                failures[name] = _one_line(failure)
            else:
                variants.append(variant)
        return variants, failures

    def _time(
        self,
        timer: str,
        variants: Sequence[Variant],
        copies: int,
        workload: Workload,
        base: dict,
        verdicts: dict[str, Verdict],
    ) -> list[dict]:
        self.note(f"{workload.row}: timing by {timer}")
        prepared, failures = {}, []
        for variant in variants:
            try:
                prepared[variant.name] = prepare(timer, variant, copies)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # for example, a call that cannot be captured
                failures.append(_unmeasured(base, timer, variant.name, "failed", _one_line(failure)))
        beside = self.ceilings.beside()
        rates = None if beside else self.ceilings.measure(workload.row.dtype)
        taken = time_prepared(timer, list(prepared.values()), copies, self.min_time, beside)
        rates = rates or self.ceilings.rates(workload.row.dtype, taken[len(prepared) :])
        samples_of = dict(zip(prepared, taken, strict=False))
        first = next((samples for name, samples in samples_of.items() if is_ours(name)), None)
        timed = []
        for variant in (variant for variant in variants if variant.name in samples_of):
            samples = samples_of[variant.name]
            record = base | {"timer": timer, "variant": variant.name, "is_ours": is_ours(variant.name), "status": "ok"}
            record |= _figures(samples, workload, rates) | _accuracy(verdicts[variant.name])
            record["ceiling"] = "streams" if beside else "torch" if rates.fastest is None else "fastest stream"
            if rates.fastest_stream is not None:
                record["fastest_stream"] = rates.fastest_stream
            record["array_exceeds_cache"] = self.ceilings.exceeds_cache
            if record["is_ours"]:
                with variant.active():
                    record["plan"] = str(workload.plan())
            elif first is not None:
                record |= _speedup(samples, first)
            timed.append(record)
        return timed + failures


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
    memory_seconds = rates.memory_seconds(traffic)
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
        # None where the rates of a busy machine, extrapolated to many writes, give no time at all.
        "memory_gbps": traffic.total / memory_seconds * 1e-9 if memory_seconds else None,
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


class _Session:
    """What was measured so far: printed row by row, and saved after each."""

    def __init__(
        self, arguments: argparse.Namespace, environment: dict[str, Any], records: list[dict], progress: Progress
    ) -> None:
        self.arguments, self.environment, self.records = arguments, environment, records
        self.progress = progress
        self.saved: dict[Path, None] = {}

    def measure_block(self, block: _Block, runner: "Runner") -> None:
        rows, arguments = block.rows, self.arguments
        say("\n" + wrap(saved_run.title(row_record(rows[0]))))
        for name, reason in block.reasons.items():
            if not _is_expected(name):
                say(wrap(f"no column {name}: {reason}"))
        columns = list(dict.fromkeys(name for names in block.names for name in names))
        if not columns:
            say("nothing to measure")
            for _ in rows:
                self.progress.step()
            return
        layout = report.Layout(columns, rows[0].op, arguments.timer)
        say(layout.header())
        measured: list[dict] = []
        for row, names in zip(rows, block.names, strict=True):
            records = runner.measure(workload_of(row, runner.cache_bytes), names)
            measured += records
            self._keep(records)
            for per_timer in saved_run.rows(records):
                for line in layout.lines(per_timer):
                    say(line)
            self.save()
            self.progress.step()
        for line in layout.footer(measured):
            say(wrap(line))

    def _keep(self, measured: list[dict]) -> None:
        """Replace the earlier records of the same rows, else insert after the last row of their table."""
        keys = {saved_run.row_key(record) for record in measured}
        others = [record for record in self.records if saved_run.row_key(record) not in keys]
        tables = [saved_run.block_key(record) for record in others]
        block = saved_run.block_key(measured[0])
        at = len(tables) - tables[::-1].index(block) if block in tables else len(tables)
        replaced = [number for number, record in enumerate(self.records) if saved_run.row_key(record) in keys]
        at = replaced[0] if replaced else at
        self.records[:] = [*others[:at], *measured, *others[at:]]

    def save(self) -> None:
        """After every row: whatever ends the run, what was measured is kept."""
        if self.arguments.json is not None:
            saved_run.save(self.arguments.json, self.environment, self.arguments.argv, self.records)
            self.saved[self.arguments.json] = None
        if self.arguments.csv is not None:
            saved_run.save_csv(self.arguments.csv, self.environment, self.records)
            self.saved[self.arguments.csv] = None

    def finish(self) -> None:
        arguments, environment, records = self.arguments, self.environment, self.records
        environment["clocks_after"] = info.clocks(arguments.device)
        self.save()
        if len(list(saved_run.blocks(records))) > 1:
            say("\nall of the above")
            for line in report.footer(records):
                say(wrap(line))
        load_now = os.getloadavg()[0]
        # The run itself loads as many cores as it has threads; any load above that is of other processes.
        busy = ", so other processes had the cores too" if load_now > environment["threads"] + 0.5 else ""
        clocks = info.format_clocks(environment["clocks_after"])
        say("\n" + wrap(f"clocks at the end: {clocks}; load average {load_now:.2f}{busy}"))
        say(wrap("times are medians; speedup: of the first column over this one, ~ where its 95 % interval holds 1"))
        for line in saved_run.ceiling_lines(records):
            say(wrap(line))
        for record in filter(saved_run.is_above_ceiling, records):
            say(wrap(f"ABOVE THE CEILING: {saved_run.ceiling_sentence(record)}"))
        say(f"repro: eagle-kernels {shlex.join(arguments.argv)}")  # in one line, to be copied
        run = {"environment": environment, "records": records}
        if arguments.markdown is not None:
            write_text(arguments.markdown, report.render(arguments.json, run))
            self.saved[arguments.markdown] = None
        if arguments.plot is not None and any(record["status"] == "ok" for record in records):
            curves.draw([run], arguments.plot)
            self.saved[arguments.plot] = None
        elif arguments.plot is not None:
            say(f"no plot: no row was timed, {arguments.plot} was not written")
        if self.saved:
            say(wrap(f"saved: {', '.join(map(str, self.saved))}"))


def _columns(arguments: argparse.Namespace) -> list[str]:
    """The names asked for: forms on each backend, then baselines."""
    forms = [name for name in arguments.forms if is_ours(name)]
    ours = [
        form if backend == "auto" else f"{form}:{backend}"
        for form, backend in itertools.product(forms, arguments.backends)
    ]
    baselines = [name for name in arguments.baselines if name != "none"]
    if "eager" in baselines:  # always with eager-out, the fair one: half of eager's time at large T is fresh pages
        baselines.insert(baselines.index("eager") + 1, "eager-out")
    return [*ours, *dict.fromkeys(baselines)]


def _is_expected(name: str) -> bool:
    """Whether it is a column by default, left out silently where the op or device does not have it."""
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
    _check_device(arguments)
    torch.set_num_threads(arguments.threads)
    stages = cli_types.stages(arguments)
    if arguments.json is not None:
        check_writable(arguments.parser, "--json", arguments.json)
    environment = info.read_environment(device)
    info.say_header(environment)
    available = info.available_bytes(device)
    ceilings = Ceilings(device, environment["cache_bytes"], info.CACHE_FACTORS[device], available)
    measured: dict[str, Rates] = {}
    for dtype in arguments.dtype:
        rates = measured[dtype] = ceilings.measure(cli_types.DTYPES[dtype], arguments.min_time)
        copy, read = rates.copy * 1e-9, rates.read * 1e-9
        say(f"\n{dtype}: copy {copy:.1f} GB/s, read {read:.1f} GB/s, matmul {rates.matmul * 1e-12:.2f} TFLOP/s")
        if rates.fastest is not None:
            say(wrap(f"memory: the fastest stream, {rates.fastest_stream}: {rates.fastest * 1e-9:.1f} GB/s"))
        _print_floors(arguments, stages, dtype, rates)
    if arguments.json is not None:
        ceilings_by_dtype = {dtype: asdict(rates) for dtype, rates in measured.items()}
        run = {
            "schema_version": saved_run.SCHEMA_VERSION,
            "argv": arguments.argv,
            "environment": environment,
            "records": [],
        }
        write_text(arguments.json, json.dumps(run | {"rates": ceilings_by_dtype}, indent=1) + "\n")
        say(f"saved: {arguments.json}")
    return 0


def _print_floors(arguments: argparse.Namespace, stages: list[cli_types.Stage], dtype: str, rates: Rates) -> None:
    say(f"{'T':>8}{'MB':>10}{'GFLOP':>10}{'floor us':>11}  bound")
    for preset, stage, V in stages:
        streams = f" S={stage.streams}" if stage.projects_streams else ""
        say(f"norm_concat_linear, {preset}:{stage.kind}{streams} K={stage.K} H={stage.H} D={stage.D}")
        for T in arguments.tokens:
            row = Row("norm_concat_linear", preset, stage, cli_types.norm_of(stage), V, T, cli_types.DTYPES[dtype])
            workload = workload_of(row)
            traffic, flops = workload.traffic(), workload.flops()
            floor = rates.floor_seconds(traffic, flops)
            bound = "matmul" if floor > rates.floor_seconds(traffic, 0) else "memory"
            megabytes = traffic.total * 1e-6
            say(f"{T:>8}{megabytes:>10.1f}{flops * 1e-9:>10.2f}{floor * 1e6:>11.1f}  {bound}")


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
