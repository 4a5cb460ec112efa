"""What there is: this machine and what is installed on it, the plans of the ops, and what can be measured.

`info` and `list` print it; every saved run has the facts of machine and installation as its environment.
"""

import argparse
import ast
import datetime
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import eagle_kernels
from eagle_kernels import environment, huge_pages, library, ops, plan
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.plan import Plan
from eagle_kernels.version import __version__

from . import baselines
from .cli_types import DTYPES, Command, no_arguments, norm_of
from .measure import available_memory_bytes, last_level_cache_bytes
from .ops import WORKLOADS
from .output import define, say, wrap

DEVICES = ("cuda", "cpu")

# Copies together exceed the cache by this factor. A GPU's L2 is not exactly least-recently-used, and 8 times its size
# is 400 MB on an H100; a server CPU's last level is shared, and 1.25 times its size can be 600 MB already.
CACHE_FACTORS = {"cpu": 1.25, "cuda": 8.0}

# A CUDA graph holds a call for every copy. More copies would take longer to capture than to measure.
MAX_COPIES = {"cpu": 1 << 16, "cuda": 512}

_CLOCK_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def unsupported_reason(device: str) -> str | None:
    """Why nothing can be measured on `device`; None where it can."""
    if device == "cpu" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no GPU"


def cache_bytes(device: str) -> int:
    """The last level before memory."""
    return last_level_cache_bytes() if device == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size


def available_bytes(device: str) -> int:
    """What can be allocated now."""
    if device == "cpu":
        return available_memory_bytes()
    torch.cuda.empty_cache()  # what the allocator keeps of the row before counts as free
    return torch.cuda.mem_get_info()[0]


def nvidia_smi(*fields: str) -> dict[str, str]:
    """These fields of the first visible GPU as nvidia-smi reads them; empty where there is none. It changes nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    # By UUID first: CUDA_VISIBLE_DEVICES renumbers the GPUs for torch, and not for nvidia-smi.
    for selection in ([f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"], []):
        try:
            answer = subprocess.run(["nvidia-smi", *selection, *query], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return {}
        values = answer.stdout.strip().split(", ")
        if answer.returncode == 0 and "\n" not in answer.stdout.strip() and len(values) == len(fields):
            return dict(zip(fields, values, strict=True))
    return {}


def clocks(device: str) -> dict[str, str]:
    """Clocks, power and temperature at this moment; of a CPU, the frequency of its first core."""
    if device == "cuda":
        return nvidia_smi(*_CLOCK_QUERY)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            megahertz = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("cpu MHz")), None)
    except OSError:
        return {}
    return {} if megahertz is None else {"core": f"{float(megahertz):.0f} MHz"}


_PACKAGE = Path(eagle_kernels.__file__).parent
_WORDS_OF_NO_MEANING = re.compile(r"\((?:r|tm)\)|\b(?:processor|cpu)\b|@.*|\b\d+-core\b", re.IGNORECASE)


def read_environment(device: str) -> dict[str, Any]:
    """A flat record of machine, versions, threads, clocks, load and settings, as of now."""
    cpu, cores = cpu_facts(Path("/proc/cpuinfo").read_text()), os.cpu_count() or 1
    return {
        "device": device,
        "device_slug": gpu_slug(torch.cuda.get_device_name(0)) if device == "cuda" else cpu_slug(cpu, cores),
        **(_gpu_facts() if device == "cuda" else {}),
        "cpu_model": cpu["model name"],
        "cpu_cores": cores,
        "cpu_isa": "none" if library.unsupported_reason else plan.cpu_isa(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(device),
        "available_bytes": available_bytes(device),
        "huge_pages": _huge_pages(),
        "clocks": clocks(device),
        "load_average": round(os.getloadavg()[0], 2),
        "backend": plan.SETTINGS.backend or "auto",
        "batch_invariant": plan.SETTINGS.batch_invariant,
        "version": eagle_kernels.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _gpu_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_arch": f"sm_{properties.major}{properties.minor}",
        "gpu_processors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "driver": nvidia_smi("driver_version").get("driver_version", "unknown"),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def say_header(environment: dict[str, Any]) -> None:
    """Print the record in a few lines."""
    env = environment
    cache = f"last-level cache {env['cache_bytes'] >> 20} MiB"
    if env["device"] == "cuda":
        machine = (
            f"{env['gpu']} ({env['device_slug']}): {env['gpu_arch']}, {env['gpu_processors']} multiprocessors, "
            f"{env['gpu_memory_bytes'] >> 30} GiB, {cache}, driver {env['driver']}, CUDA {env['cuda']}"
        )
    else:
        machine = (
            f"{env['cpu_model']} ({env['device_slug']}): {env['cpu_cores']} cores, {env['threads']} threads, kernels "
            f"{env['cpu_isa']}, {cache}, huge pages {env['huge_pages']}"
        )
    versions = f"torch {env['torch']}, triton {env['triton'] or 'none'}, python {env['python']}"
    say(wrap(f"eagle-kernels {env['version']} at {env['commit']}, {versions}, {env['date']}"))
    say(wrap(machine))
    say(wrap(f"clocks as read: {format_clocks(env['clocks'])}"))
    say(f"load average {env['load_average']} at the start, backend {env['backend']}")


def format_clocks(clocks: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in clocks.items()) or "not readable here"


def cpu_facts(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; a model name where Arm kernels give none."""
    first = cpuinfo.partition("\n\n")[0]
    fields = (line.partition(":")[::2] for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, value in fields}
    facts.setdefault("model name", platform.machine())
    facts.setdefault("flags", facts.get("Features", ""))
    return facts


def cpu_slug(cpu: dict[str, str], cores: int) -> str:
    """A name for bench/results/: brand, widest matrix or vector unit, cores.

    Hypervisors hide the model ("Intel(R) Xeon(R) Processor"); the flags still say what the kernels can use.
    """
    flags = set(cpu["flags"].split())
    units = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "asimd")
    unit = next((unit for unit in units if unit in flags), "")
    words = [_WORDS_OF_NO_MEANING.sub(" ", cpu["model name"]), unit, f"{cores}core"]
    return _slug(" ".join(words))


def gpu_slug(name: str) -> str:
    """`nvidia-h100-80gb-hbm3`."""
    return _slug(name)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _huge_pages() -> str:
    asks = ", and torch asks for them" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else ""
    return huge_pages.mode() + asks


def _commit() -> str:
    """The commit of the checkout that the package is imported from, "+" where it has changes; else "release".

    A tree that was carried to another machine without its .git has its commit in a file COMMIT (gpu_session.sh).
    """
    if (carried := _PACKAGE / "COMMIT").exists():
        return carried.read_text().strip()
    git = ("git", "-C", str(_PACKAGE))
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        # A package installed inside some other project's checkout is not part of that project.
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "version.py"], capture_output=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "release"
    if commit.returncode or tracked.returncode:
        return "release"
    return commit.stdout.strip() + ("+" if changes.stdout else "")


_PRESET, _TOKENS, _DTYPES = "llama3.1-8b", (1, 16, 64, 512), ("bf16", "fp32")


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as one JSON object on standard output")


def _run_info(arguments: argparse.Namespace) -> int:
    sections = {"versions": _versions, "build": _build, "devices": _found_devices}
    facts: dict[str, Any] = {title: dict(lines()) for title, lines in sections.items()}
    facts["environment"] = list(_environment())
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    facts["plans"] = {device: list(_plans(device)) for device in devices}
    if arguments.json:
        say(json.dumps(facts, indent=1))
        return 0
    for title in sections:
        say(title)
        for name, text in facts[title].items():
            define(name, text, column=18)
        say()
    say("environment")
    for variable in facts["environment"]:
        say(wrap(f"{variable['name']} = {variable['setting']}", first="  "))
        say(wrap(f"{variable['values']}: {variable['meaning']}", indent="      ", first="      "))
    for device, plans in facts["plans"].items():
        say()
        _say_plans(device, plans)
    return 0


def _say_plans(device: str, plans: list[dict[str, Any]]) -> None:
    """A line per op and kernel; below it the reason at the largest T, unless it is that of the line before."""
    say(f"plan on {device}, norm_concat_linear for {_PRESET}")
    say(f"  {'op':<24}  {'dtype':<9}  {'T':<11}  runs")
    lines: dict[tuple[str, str], dict[str, list[str]]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for planned in plans:
        same = (planned["op"], planned["runs"])
        lines.setdefault(same, {}).setdefault(planned["dtype"], []).append(str(planned["T"]))
        reasons[same] = planned["reason"]
    before = None
    for (op, runs), by_dtype in lines.items():
        reason = reasons[op, runs]
        for counts, dtypes in itertools.groupby(by_dtype, key=by_dtype.__getitem__):
            say(f"  {op:<24}  {','.join(dtypes):<9}  {','.join(counts):<11}  {runs}")
        if reason != before:
            say(wrap(reason, indent="      ", first="      "))
        before = reason


def _versions() -> Iterator[tuple[str, str]]:
    yield "eagle-kernels", __version__
    yield "torch", torch.__version__
    yield "triton", triton_version() or "not installed"
    yield "python", platform.python_version()


def triton_version() -> str | None:
    """Triton's version without importing it: the import alone takes longer than the rest of this command."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _build() -> Iterator[tuple[str, str]]:
    yield "compiled kernels", library.unsupported_reason or f"loaded from {library.COMPILED_LIBRARY}"
    for name, value in library.build_info.items():
        yield name, value or "none"


def _found_devices() -> Iterator[tuple[str, str]]:
    isa = "none" if library.unsupported_reason else plan.cpu_isa()
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, instruction set {isa}"
    if not torch.cuda.is_available():
        yield "cuda", "no device"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"


def _environment() -> Iterator[dict[str, str]]:
    """The table of `environment.py`, with the active setting beside each variable."""
    # python -OO keeps no docstring.
    page = environment.__doc__ or ast.get_docstring(ast.parse(inspect.getsource(environment))) or ""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| EAGLE_")]
    for name, values, meaning in ([cell.strip() for cell in row] for row in rows):
        field = name.removeprefix("EAGLE_KERNELS_").lower()
        # The switches of the engines' plugins are read when an engine loads one.
        setting = getattr(plan.SETTINGS, field) if hasattr(plan.SETTINGS, field) else "read by the engine"
        if isinstance(setting, bool):  # as the variable is set
            setting = int(setting)
        setting = "auto" if setting is None else str(setting)
        yield {"name": name, "setting": setting, "values": values, "meaning": meaning}


def _plans(device_type: str) -> Iterator[dict[str, Any]]:
    """What would run, at a few row counts of each op and dtype."""
    for op, dtype, T in itertools.product(ops.__all__, _DTYPES, _TOKENS):
        runs, reason = _explain(op, T, dtype, device_type)
        yield {"op": op, "dtype": dtype, "T": T, "runs": runs, "reason": reason}


def _explain(op: str, T: int, dtype: str, device_type: str) -> tuple[str, str]:
    try:
        planned = _plan(op, device_type)(T, DTYPES[dtype])
    except RuntimeError as unsupported:
        return "nothing", str(unsupported)
    return f"{planned.backend}/{planned.method}", planned.reason


def _plan(op: str, device_type: str) -> Callable[[int, torch.dtype], Plan]:
    stage, device = model_shapes()[_PRESET].stage("eagle3"), torch.device(device_type)
    if op != "norm_concat_linear":
        return lambda T, dtype: plan.choose(op, device)
    return lambda T, dtype: plan.choose(op, device, stage.K, T, dtype, stage.D, (stage.H,))


def _run_list(arguments: argparse.Namespace) -> int:
    say("ops")
    say(wrap(", ".join(op if op in ops.__all__ else f"{op} (bench alone)" for op in WORKLOADS), first="  "))
    say("\npresets")
    for line in _presets():
        say(f"  {line}")
    for title, answers in {"devices": _devices(), "backends": _backends(), "baselines": _baselines()}.items():
        say(f"\n{title}")
        for name, answer in answers:
            define(name, answer)
    return 0


def _presets() -> Iterator[str]:
    yield f"{'NAME:STAGE':<32}{'K':>3}{'H':>7}{'D':>7}  norm"
    any_unsure = False
    for name, model in model_shapes().items():
        for stage in model.stages:
            more = ", post norm" if stage.post_norm else ""
            more += f", S={stage.streams}" if stage.streams > 1 else ""
            unsure = "" if model.certain else " *"
            any_unsure |= not model.certain
            name_and_stage = f"{name}:{stage.kind}"
            yield f"{name_and_stage:<32}{stage.K:>3}{stage.H:>7}{stage.D:>7}  {norm_of(stage)}{more}{unsure}"
    if any_unsure:
        yield "* not from the model's own config"


def _devices() -> Iterator[tuple[str, str]]:
    for device in DEVICES:
        yield device, unsupported_reason(device) or "usable"


def _backends() -> Iterator[tuple[str, str]]:
    for backend in environment.BACKENDS:
        reasons = {device: plan.unsupported_reason(backend, torch.device(device)) for device in _usable_devices()}
        answers = ", ".join(f"{device}: {reason or 'usable'}" for device, reason in reasons.items())
        yield backend, answers


def _baselines() -> Iterator[tuple[str, str]]:
    for name, meaning in baselines.MEANINGS.items():
        reason = baselines.torchao_unsupported_reason("int8_row") if name == "torchao" else None
        if name in baselines.FOREIGN:
            reason = baselines.foreign_unsupported_reason(name, _usable_devices()[0])
        yield name, f"{meaning}{f' (not here: {reason})' if reason else ''}"


def _usable_devices() -> list[str]:
    return [device for device in DEVICES if unsupported_reason(device) is None]


INFO = Command(
    "What is installed, what this machine has, and which backend would run each op, and why.",
    _add_info_arguments,
    _run_info,
)
LIST = Command(
    "What there is to measure: ops, presets, backends and baselines, and what keeps one from running here.",
    no_arguments,
    _run_list,
)
