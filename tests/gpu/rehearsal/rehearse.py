"""`make rehearsal`: bench/gpu_session.sh end to end without a GPU, over the stub of CUDA (runtime.c, driver.c).

Every path, import and argument is that of the real session. Kernels do nothing, so every test of a value fails; any
failure that is not a wrong value is listed, and makes the exit status 1. On the way Triton compiles what the session
will ask for, into the cache that `gpu_session.sh --pack` takes along.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from stub import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOLDER = ROOT / "build" / "gpu_rehearsal"

# What a wrong value looks like: an assertion, an expected error that did not come, or an index from torch's own mask or
# argmax, which no kernel has computed.
_WRONG_VALUE = re.compile(
    r"^(AssertionError|assert |Failed: DID NOT|Tensor-likes|Scalars|numpy|RuntimeError: numel: integer multiplication"
    r"|IndexError: index -?\d+ is out of bounds)"
)

_UNFINISHED = ("cut", "not started")
# Calls in a row that may finish no command: one can be cut while Triton compiles, and the next finds that compiled.
# With nothing compiled yet gpu-tests took 910 s on two idle cores and 2800 on two busy ones; a call gives it 180.
_MAX_IDLE_CALLS = 8


def main(arguments: list[str]) -> int:
    """Takes the session's options and calls it until nothing is left; what its folder has is not done again."""
    stub = build(FOLDER)
    environment = os.environ | {
        "LD_PRELOAD": str(stub),
        "TRITON_LIBCUDA_PATH": str(FOLDER),
        "PYTHONPATH": str(HERE / "site"),
        "PATH": os.pathsep.join([str(HERE / "bin"), os.environ["PATH"]]),
        "PYTHON": sys.executable,
        # A failed assertion would print its tensors: of what no kernel has written, torch's printing took minutes and
        # all memory, and the session was cut before its last test.
        "PYTEST_ADDOPTS": "--assert=plain",
    }
    out = FOLDER / "out"
    command = ["bash", "bench/gpu_session.sh", "--out", str(out), "--library", str(_relink()), *arguments]
    finished, idle = 0, 0
    while idle < _MAX_IDLE_CALLS:
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        records = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
        if not any(record["status"] in _UNFINISHED for record in records.values()):
            break
        before, finished = finished, sum(len(record.get("finished", {})) for record in records.values())
        idle = idle + 1 if finished == before else 0
    _save_host_costs(records)
    unexpected = [line for record in records.values() for line in _unexpected(record)]
    unexpected += [f"{name}: {record['status']}" for name, record in records.items() if record["status"] in _UNFINISHED]
    print("\n".join(unexpected))
    print(
        f"{len(records)} stages, {len(unexpected)} failures that are not of values; gpu_session.sh ended with {status}"
    )
    return 1 if unexpected else 0


def _save_host_costs(records: dict[str, dict]) -> None:
    """What calls cost the host where launches are stubbed, into a file that can be saved under bench/results."""
    if all(records.get(stage, {}).get("status") == "done" for stage in ("library", "host-cost")):
        environment = records["library"]["result"]["run"]["environment"]
        saved = {"environment": environment, **records["host-cost"]["result"]}
        (FOLDER / "host_launches.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def _relink() -> Path:
    """The folder of this tree's library with CUDA kernels, linked without the CUDA runtime: it uses the stub's."""
    builds = sorted(ROOT.glob("build/cmake-*/build.ninja"), key=lambda path: path.stat().st_mtime, reverse=True)
    trees = [path.parent for path in builds if "cudart_static" in path.read_text()]
    if not trees:
        raise SystemExit(f"no library with CUDA kernels is built in {ROOT / 'build'}: make gpu-ready builds one")
    ninja = [sys.executable, "-m", "ninja", "-C", str(trees[0])]
    subprocess.run(ninja, check=True, stdout=subprocess.DEVNULL)
    commands = subprocess.run([*ninja, "-t", "commands"], check=True, capture_output=True, text=True).stdout
    link = next(line for line in reversed(commands.splitlines()) if "libeagle_kernels.so" in line and "-shared" in line)
    folder = FOLDER / "library"
    folder.mkdir(exist_ok=True)
    link = re.sub(r"\S*libcudart_static\.a|-lcudart_static", "", link)
    link = re.sub(r"-o \S*libeagle_kernels\.so", f"-o {folder / 'libeagle_kernels.so'}", link)
    subprocess.run(link, shell=True, check=True, cwd=trees[0])
    # Also in place of the library of alternatives, which differs in what it launches.
    (folder / "alternatives").mkdir(exist_ok=True)
    shutil.copy2(folder / "libeagle_kernels.so", folder / "alternatives")
    return folder


def _unexpected(record: dict) -> list[str]:
    """Failures of a stage with another cause than that kernels compute nothing."""
    if record["stage"] == "gpu-tests":
        failures = [failure for file in (record["result"] or {}).values() for failure in file["failed"]]
        kinds = [(failure["test"], failure["message"]) for failure in failures]
        return [f"{test}: {message}" for test, message in kinds if not _WRONG_VALUE.match(message)]
    result = record["result"] or {}
    runs = [result.get("run") or result, *(result.get("variants") or {}).values()]
    rows = [row for run in runs if run for row in run.get("records", []) if row["status"] == "failed"]
    failed = [f"{row['op']} {row['variant']} T={row['T']} {row['timer']}: {row['reason']}" for row in rows]
    codes = {text: code for text, code in record["finished"].items() if code and record["stage"] != "sanitizer"}
    return failed + [f"{record['stage']}: {code} from {text}" for text, code in codes.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
