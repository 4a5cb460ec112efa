"""Time the ops against eager torch, torch.compile and other packages on the shapes of real models, each checked."""

import argparse
import importlib.util
import itertools
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle_kernels import environment as settings
from eagle_kernels import ops, plan

from . import choices, devices, memory_workloads, readme_table, selection, table
from .baselines import BASELINES
from .environment_header import format_clocks, format_header, read_environment
from .projection_workload import NormConcatLinear
from .results import UnreadableResult, load, row_key, save, save_csv, write_text
from .runner import Runner, progress, row_record
from .timers import TIMERS
from .workloads import FORMS, Row, Workload, is_ours

WORKLOADS: dict[str, type[Workload]] = {
    "norm_concat_linear": NormConcatLinear,
    "norm_concat": memory_workloads.NormConcat,
    "capture_hidden": memory_workloads.CaptureHidden,
    "add_rms_norm": memory_workloads.AddRmsNorm,
    "vocab_parallel_embedding": memory_workloads.VocabParallelEmbedding,
}
_NORMS = ("chunk", "concat", "none")
_OUTPUTS = ("json", "csv", "markdown", "plot")

# Seconds per row, timer and column. A CPU is noisier, and its calls are longer.
_MIN_TIME = {"cpu": 1.0, "cuda": 0.2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    op_list = choices.list_of("op", [*ops.__all__, "all"])
    add("--device", type=choices.one_of("device", devices.DEVICES), default="cuda", help="cuda (default), cpu")
    add("--op", type=op_list, default=["norm_concat_linear"], help="ops with commas between, or all")
    selection.add_arguments(parser)
    add("--norm", choices=_NORMS, help="instead of the checkpoint's; eagle3 stages without one get chunk (fc_norm)")
    rows = "values of T: 1,8,64 or 1:8192:x2 (default 1,8,64,512)"
    add("--tokens", type=choices.row_counts, default=[1, 8, 64, 512], metavar="T", help=rows)
    add("--dtype", type=choices.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    baselines = choices.list_of("baseline", [*BASELINES, "none"])
    add("--baselines", type=baselines, default=["eager"], help=f"{','.join(BASELINES)} or none (default eager)")
    forms = choices.list_of("form", [*FORMS, "none"])
    add("--forms", type=forms, default=["op", "layer"], help="how ours is called: op,layer,prepacked or none")
    backends = choices.list_of("backend", ["auto", *settings.BACKENDS])
    help_text = "a column of ours for each: auto,cuda,triton,cpu,reference (default auto)"
    add("--backends", type=backends, default=["auto"], help=help_text)
    timers = choices.list_of("timer", sorted({name for names in TIMERS.values() for name in names}))
    add("--timer", type=timers, help="graph,eager on cuda (default both), clock on cpu")
    add("--threads", type=choices.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add("--min-time", type=choices.number(0, float), help="seconds per row, timer and column (default 1; 0.2 on cuda)")
    for name, what in zip(_OUTPUTS, ("the run", "its records", "its tables", "its curves, PNG"), strict=True):
        add(f"--{name}", type=choices.png if name == "plot" else Path, metavar="FILE", help=f"save {what}")
    add("--resume", action="store_true", help="keep the rows that the --json file has, and measure the others")


def run(arguments: argparse.Namespace) -> int:
    """Print the table row by row; 1 where a result was wrong or a column of ours failed."""
    _check(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    environment = read_environment(arguments.device)
    print(format_header(environment), flush=True)
    records = _kept_records(arguments, environment)
    kept = {row_key(record) for record in records}
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
    return 1 if failed or any(record["status"] == "wrong" for record in records) else 0


def _check(arguments: argparse.Namespace) -> None:
    """Whatever would end the run after an hour of measuring ends it here."""
    fail, device = arguments.parser.error, arguments.device
    if (reason := devices.unusable_reason(device)) is not None:
        fail(f"no CUDA device: {reason}; --device cpu measures this machine's processor")
    arguments.timer = arguments.timer or list(TIMERS[device])
    if foreign := [name for name in arguments.timer if name not in TIMERS[device]]:
        fail(f"argument --timer: {', '.join(foreign)} is not for {device}, which has: {', '.join(TIMERS[device])}")
    for backend in arguments.backends:
        if backend != "auto" and (reason := plan.unusable_reason(backend, device)) is not None:
            usable = [name for name in settings.BACKENDS if plan.unusable_reason(name, device) is None]
            fail(f"argument --backends: {backend} cannot run here: {reason}; usable are: auto, {', '.join(usable)}")
    arguments.min_time = _MIN_TIME[device] if arguments.min_time is None else arguments.min_time
    arguments.stages = selection.stages(arguments)
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
        earlier = load(arguments.json)
    except UnreadableResult as failure:
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
        norm = arguments.norm or selection.norm_of(stage)
        yield Row(op, preset, stage, norm, V, T, choices.DTYPES[dtype], arguments.device)


def _is_kept(row: Row, timers: Sequence[str], kept: set[tuple]) -> bool:
    return all(row_key(row_record(row) | {"timer": timer}) in kept for timer in timers)


class _Session:
    """What was measured so far: printed row by row, and saved after each."""

    def __init__(self, arguments: argparse.Namespace, environment: dict, records: list[dict], rows: int) -> None:
        self.arguments, self.environment, self.records = arguments, environment, records
        self.rows, self.done, self.started = rows, 0, time.monotonic()

    def measure_block(self, rows: list[Row], runner: Runner) -> None:
        """The rows of one op, shape and dtype: one table with its header."""
        arguments = self.arguments
        probe = WORKLOADS[rows[0].op](rows[0], runner.cache_bytes)
        refusals = {name: probe.refusal(name) for name in _columns(arguments)}
        names = [name for name, refusal in refusals.items() if refusal is None]
        print("\n" + table.title(row_record(rows[0])))
        for name, refusal in refusals.items():
            # The layer is a column by default, and has its own op only.
            if refusal is not None and name.partition(":")[0] != "layer":
                print(f"no column {name}: {refusal}")
        if not names:
            self.done += len(rows)
            print("nothing to measure", flush=True)
            return
        layout = table.Layout(names, rows[0].op, arguments.timer)
        print(layout.header(), flush=True)
        block: list[dict] = []
        for row in rows:
            progress(f"row {self.done + 1} of {self.rows}, {self._remaining()}: {row}")
            measured = runner.measure(WORKLOADS[row.op](row, runner.cache_bytes), names)
            self.done += 1
            block += measured
            self.records += measured
            for per_timer in table.rows(measured):
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
            save(self.arguments.json, self.environment, self.arguments.argv, self.records)
        if self.arguments.csv is not None:
            save_csv(self.arguments.csv, self.environment, self.records)

    def finish(self) -> None:
        arguments, environment, records = self.arguments, self.environment, self.records
        environment["clocks_after"] = devices.clocks(arguments.device)
        self.save()
        if len(list(table.blocks(records))) > 1:
            print("\nall of the above")
            for line in table.footer(records):
                print(line)
        load_now = os.getloadavg()[0]
        # The run itself is a load of its threads; what exceeds them took the cores from it.
        busy = ", so other processes had the cores too" if load_now > environment["threads"] + 0.5 else ""
        print(f"\nclocks at the end: {format_clocks(environment['clocks_after'])}; load average {load_now:.2f}{busy}")
        print("times are median (p20 - p80); ~: the 95 % interval of the ratio holds 1")
        print(f"repro: eagle-kernels {shlex.join(arguments.argv)}")
        run = {"environment": environment, "records": records}
        if arguments.markdown is not None:
            write_text(arguments.markdown, readme_table.render(arguments.json, run))
        if arguments.plot is not None and any(record["status"] == "ok" for record in records):
            from . import plots  # matplotlib takes 0.3 s to import

            plots.draw([run], arguments.plot)
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
    return [*ours, *(name for name in arguments.baselines if name != "none")]
