"""Run the stages of gpu_session.sh: each bounded in time, saved while it runs, and skipped where it is done already.

It imports the standard library only, and nothing of the package: on a bare machine it first makes that importable.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .package import pack, prepare_package
from .stages import ROOT, STAGES, WORK, Command, Stage, read_json, write_json

SCHEMA_VERSION = 2
_TAIL = 6000  # characters of a stage's output that its JSON keeps
_SAVE_EVERY = 10.0
_LEAST = 20.0  # seconds under which no stage is worth starting


def main(argv: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="gpu_session.sh", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build" / "gpu_results", help="a JSON per stage (default %(default)s)")
    add("--done", type=Path, metavar="FOLDER", help="the --out of an earlier call, when it is not this one's")
    add("--seconds", type=float, default=275, help="for the whole call (default 275)")
    add("--stages", default=",".join(names), help="which, in this order (default all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the stages out on tiny sizes")
    add(
        "--library", type=Path, metavar="FOLDER", help="the compiled library to take before the carried one, or to pack"
    )
    add("--dry-run", action="store_true", help="print the commands and their limits, run nothing")
    add("--pack", action="store_true", help="put the library built in this tree, and its commit, where it can be taken")
    add("--collect", type=Path, metavar="FOLDER", help="copy what came back into bench/results and the tuned tables")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.stages.split(",") if name not in names]:
        parser.error(f"stage {', '.join(unknown)} is unknown, known are: {', '.join(names)}")
    if arguments.pack:
        return pack(arguments.library)
    if arguments.collect is not None:
        return collect(arguments.collect)
    chosen = [stage for stage in STAGES if stage.name in arguments.stages.split(",")]
    if arguments.dry_run:
        for stage in chosen:
            print(f"{stage.name}: at most {stage.limit:.0f} s")
            for command in stage.commands(arguments.device):
                print(f"  {_command_text(command)}")
        return 0
    options = (arguments.device, arguments.seconds, arguments.library)
    return run_stages(chosen, arguments.out, arguments.done, *options)


def run_stages(
    stages: Sequence[Stage], out: Path, done: Path | None, device: str, seconds: float, library: Path | None = None
) -> int:
    """Run what is not done yet, while there is time; 1 where a stage failed."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    environment = prepare_package(device, library)
    records = []
    for stage in stages:
        earlier = _earlier(stage, [out, *([done] if done else [])])
        if earlier is not None and earlier["status"] in ("done", "failed"):
            record = earlier
        else:
            if earlier is not None and earlier.get("result"):
                stage.restore(earlier["result"])
            record = _run_stage(stage, out, device, environment, deadline, earlier or {})
        _save(out, record)
        records.append(record)
        print(f"{stage.name}: {record['status']}, {record['seconds']:.0f} s{_result_text(record)}", flush=True)
    left = [record["stage"] for record in records if record["status"] in ("cut", "not started")]
    if left:
        print(f"the same call again goes on with: {', '.join(left)}")
    return 1 if any(record["status"] == "failed" for record in records) else 0


def _run_stage(stage: Stage, out: Path, device: str, environment: dict, deadline: float, earlier: dict) -> dict:
    """Run the commands that an earlier call has not finished; the record lists the finished ones of both calls."""
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "stage": stage.name, "device": device}
    record |= {"status": "not started", "seconds": 0.0, "output_tail": "", "result": _read_or_none(stage.result)}
    record["finished"] = dict(earlier.get("finished", {}))  # the exit status of each command
    if stage.needs is not None and shutil.which(stage.needs) is None:
        return record | {"status": "skipped", "output_tail": f"{stage.needs} is not on PATH"}
    started = time.monotonic()
    limit = min(stage.limit, deadline - started)
    if limit < _LEAST:
        return record | ({"status": "cut"} if earlier else {})
    log, finished = WORK / f"{stage.name}.log", record["finished"]
    left_over = {_command_text(command): command for command in stage.commands(device)}
    left_over = {text: command for text, command in left_over.items() if text not in finished}
    for number, (text, command) in enumerate(left_over.items(), 1):
        left = limit - (time.monotonic() - started)
        if left <= 1:
            return record | {"status": "cut"}

        def save(status: str) -> None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if log.exists() else ""
            record.update(status=status, output_tail=tail, result=_read_or_none(stage.result))
            record["seconds"] = round(earlier.get("seconds", 0.0) + time.monotonic() - started, 1)
            _save(out, record)

        code = _run(command, log, environment, left, save)
        if code is None:
            save("cut")
            return record
        finished[text] = code  # a wrong row of one table says nothing about the next
        save("cut" if number < len(left_over) else "failed" if any(finished.values()) else "done")
    return record


def _command_text(command: Command) -> str:
    return shlex.join(["python" if word == sys.executable else word for word in command])


def _run(command: Command, log: Path, environment: dict, limit: float, save: Callable[[str], None]) -> int | None:
    """The exit status, None where time ran out: then SIGINT comes first, on which bench keeps its rows and ends."""
    deadline, next_save = time.monotonic() + limit, time.monotonic() + _SAVE_EVERY
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                if time.monotonic() > next_save:
                    save("cut")  # the record that is left if this call is killed
                    next_save = time.monotonic() + _SAVE_EVERY
            if process.poll() is not None:
                return process.returncode
            for number, patience in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
                os.killpg(process.pid, number)
                try:
                    process.wait(patience)
                    return None
                except subprocess.TimeoutExpired:
                    continue
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def collect(folder: Path) -> int:
    """What stages saved into bench/results/<device>/, tuned tables into the package; `make report` then shows them."""
    library = (read_json(folder / "library.json") or {}).get("result") or {}
    environment = (library.get("run") or {}).get("environment")
    for stage in STAGES:
        record = read_json(folder / f"{stage.name}.json")
        if record is None:
            print(f"{stage.name}: not in {folder}")
            continue
        result = record["result"] or {}
        runs = _runs(stage.name, result)
        if environment is not None:
            facts = _facts(stage.name, record).items()
            runs |= {name: {"environment": environment, **found} for name, found in facts}
            if result.get("ncu"):
                target = ROOT / "bench" / "results" / environment["device_slug"] / f"{stage.name}-ncu.csv"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(result["ncu"], encoding="utf-8")
                print(f"{stage.name}: {target.relative_to(ROOT)}")
        for name, run in runs.items():
            target = ROOT / "bench" / "results" / run["environment"]["device_slug"] / f"{name}.json"
            write_json(target, run)
            print(f"{stage.name}: {target.relative_to(ROOT)}")
        for name, tuned in result.items() if stage.name == "tune" else ():
            write_json(ROOT / "python" / "eagle_kernels" / "configs" / name, tuned)
            print(f"{stage.name}: configs/{name}")
        if record["status"] != "done":
            print(f"{stage.name}: {record['status']}{_result_text(record)}")
        for failure in _failures(record):
            print(f"  {failure['test']}: {failure['message'].partition(chr(10))[0]}")
    return 0


def _runs(stage: str, result: dict) -> dict[str, dict]:
    """{file name: content} of the benchmark's runs and of the device in a stage's result."""
    runs: dict[str, dict | None] = {stage: result} if stage == "sweeps" else {}
    if stage in ("decode-curve", "op-table"):
        variants = {f"{stage}-{variant}": run for variant, run in result.get("variants", {}).items()}
        runs = {stage: result.get("run"), **variants}
    if stage == "library" and result.get("run") and result.get("device"):
        runs = {"device": {"environment": result["run"]["environment"], **result["device"]}}
    return {name: run for name, run in runs.items() if run}


def _facts(stage: str, record: dict) -> dict[str, dict]:
    """{file name: content} of what is no run of the benchmark and has no environment of its own."""
    result = record["result"] or {}
    if stage == "gpu-tests":
        return {"gpu_tests": {"records": _counts(result)}}
    if stage == "sanitizer" and record["status"] in ("done", "failed"):
        return {"sanitizer": {"status": record["status"], "output_tail": record["output_tail"]}}
    return {"host_calls": result} if stage == "host-cost" and result else {}


def _counts(result: dict) -> list[dict]:
    """A record of each command of gpu-tests, without its failures."""
    return [{"command": name} | {k: v for k, v in of.items() if k != "failed"} for name, of in result.items()]


def _failures(record: dict) -> list[dict]:
    """The failures of gpu-tests, of all commands."""
    if record["stage"] != "gpu-tests":
        return []
    return [failure for file in (record["result"] or {}).values() for failure in file["failed"]]


def _earlier(stage: Stage, folders: Sequence[Path]) -> dict | None:
    """The record of the stage that an earlier call left, a finished one if there is one."""
    read = [read_json(folder / f"{stage.name}.json") for folder in folders]
    found = [record for record in read if record and record.get("schema_version") == SCHEMA_VERSION]
    found = [record for record in found if record["status"] not in ("not started", "skipped")]
    return next((record for record in found if record["status"] == "done"), found[0] if found else None)


def _read_or_none(read: Callable[[], object]) -> object:
    """A result that is being written can be unreadable for a moment; it is not worth a stage."""
    try:
        return read()
    except (OSError, SyntaxError, ValueError, KeyError):  # an XML ParseError is a SyntaxError
        return None


def _result_text(record: dict) -> str:
    if record["stage"] == "gpu-tests" and record["result"]:
        counts = {name: sum(file[name] for file in record["result"].values()) for name in ("tests", "skipped")}
        return f": {counts['tests']} tests, {counts['skipped']} skipped, {len(_failures(record))} failed"
    if record["status"] in ("failed", "skipped"):
        lines = record["output_tail"].strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""


def _save(out: Path, record: dict) -> None:
    write_json(out / f"{record['stage']}.json", record)


if __name__ == "__main__":
    sys.exit(main())
