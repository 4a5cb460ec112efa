"""What a public call costs on the host, beside the chain of torch calls that it replaces: `make bench-host`.

The sizes leave the kernels next to nothing to do: fp32, one row, K = 3 chunks of H = D = 128, one thread. Calls run in
turn, a burst of each per round, so that a drift of the machine's speed hits all of them alike; the smallest burst is a
call's cost, the median is printed beside it.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle_kernels import ops

from .cli_types import Command, number
from .info import read_environment, say_header
from .ops import entry_of
from .ops.host_call import HostCall
from .output import check_writable, say, write_text


def calls() -> dict[str, HostCall]:
    return {name: call for op in ops.__all__ for name, call in entry_of(op).host_calls().items()}


def measure(rounds: int, burst: int) -> list[dict[str, object]]:
    """A record per call: microseconds of ours and of the chain, smallest and median, and the share ours / chain."""
    pairs = calls()
    times: dict[tuple[str, int], list[float]] = {(name, side): [] for name in pairs for side in (0, 1)}
    for turn in range(rounds + 2):
        for name, pair in pairs.items():
            for side, call in enumerate((pair.ours, pair.chain)):
                started = time.perf_counter_ns()
                for _ in range(burst):
                    call()
                if turn >= 2:  # the first ones choose plans and warm caches
                    times[name, side].append((time.perf_counter_ns() - started) / burst / 1000)
    records = []
    for name in pairs:
        ours, chain = times[name, 0], times[name, 1]
        records.append(
            {
                "call": name,
                "ours_us": round(min(ours), 2),
                "ours_median_us": round(statistics.median(ours), 2),
                "chain_us": round(min(chain), 2),
                "chain_median_us": round(statistics.median(chain), 2),
                "share": round(min(ours) / min(chain), 3),
                "goal": pairs[name].goal,
            }
        )
    return records


def import_milliseconds(runs: int = 5) -> float:
    """What `import eagle_kernels` costs beyond torch, the minimum over fresh processes."""
    code = "import time, torch; t = time.perf_counter(); import eagle_kernels; print(time.perf_counter() - t)"
    times = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(runs)
    ]
    return round(min(float(run.stdout) for run in times) * 1e3, 1)


def format_records(records: Sequence[dict[str, object]]) -> str:
    lines = [f"{'call':<26}{'ours us':>9}{'(median)':>10}{'chain us':>10}{'(median)':>10}{'share':>8}{'goal':>7}"]
    for record in records:
        lines.append(
            f"{record['call']:<26}{record['ours_us']:>9.2f}{record['ours_median_us']:>10.2f}"
            f"{record['chain_us']:>10.2f}{record['chain_median_us']:>10.2f}{record['share']:>8.2f}{record['goal']:>7}"
        )
    return "\n".join(lines)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=number(1), default=200, help="bursts of each call (default 200)")
    parser.add_argument("--burst", type=number(1), default=200, help="calls in a burst (default 200)")
    parser.add_argument("--json", type=Path, help="save the records and the environment here")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_writable(arguments.parser, "--json", arguments.json)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # handing a row to a second thread would be most of what is measured
    torch.manual_seed(0)
    environment = read_environment("cpu")
    gc.disable()
    try:
        with torch.no_grad():
            records = measure(arguments.rounds, arguments.burst)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    say_header(environment)
    say(format_records(records))
    imported = import_milliseconds()
    say(f"import eagle_kernels beyond torch: {imported} ms (goal: 50)")
    if arguments.json is not None:
        saved = {"environment": environment, "records": records, "import_ms": imported}
        write_text(arguments.json, json.dumps(saved, indent=1) + "\n")
        say(f"saved: {arguments.json}")
    return 0


HOST = Command("What a call costs on the host, beside the torch calls that it replaces.", _add_arguments, _run)
