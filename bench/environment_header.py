"""Where and on what a run was measured: the record that goes into the JSON, the lines above the table, the folder."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import eagle_kernels
from eagle_kernels import library, plan

from . import devices
from .info import triton_version

_PACKAGE = Path(eagle_kernels.__file__).parent
_WORDS_OF_NO_MEANING = re.compile(r"\((?:r|tm)\)|\b(?:processor|cpu)\b|@.*|\b\d+-core\b", re.IGNORECASE)


def read_environment(device: str) -> dict[str, object]:
    """A flat record of machine, versions, threads, clocks, load and settings, as of now."""
    cpu = cpu_facts(Path("/proc/cpuinfo").read_text())
    return {
        "device": device,
        "device_slug": gpu_slug(torch.cuda.get_device_name(0)) if device == "cuda" else cpu_slug(cpu, os.cpu_count()),
        **(_gpu_facts() if device == "cuda" else {}),
        "cpu_model": cpu["model name"],
        "cpu_cores": os.cpu_count(),
        "cpu_isa": "none" if library.unsupported_reason else plan.cpu_isa(),
        "threads": torch.get_num_threads(),
        "cache_bytes": devices.cache_bytes(device),
        "available_bytes": devices.available_bytes(device),
        "huge_pages": _huge_pages(),
        "clocks": devices.clocks(device),
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


def _gpu_facts() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_arch": f"sm_{properties.major}{properties.minor}",
        "gpu_processors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "driver": devices.nvidia_smi("driver_version").get("driver_version", "unknown"),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def format_header(environment: dict[str, object]) -> str:
    """The record as a few lines."""
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
    return (
        f"eagle-kernels {env['version']} at {env['commit']}, torch {env['torch']}, triton {env['triton'] or 'none'}, "
        f"python {env['python']}, {env['date']}\n{machine}\n"
        f"clocks as read: {format_clocks(env['clocks'])}\n"
        f"load average {env['load_average']} at the start, backend {env['backend']}"
    )


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
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def _commit() -> str:
    """The commit of the checkout that the package is imported from, "+" where it has changes; else "release".

    A tree that was carried to another machine without its .git says in a file COMMIT what it was (gpu_session.sh).
    """
    if (carried := _PACKAGE / "COMMIT").exists():
        return carried.read_text().strip()
    git = ("git", "-C", str(_PACKAGE))
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        # An environment inside some other project's checkout is not that project.
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "version.py"], capture_output=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "release"
    if commit.returncode or tracked.returncode:
        return "release"
    return commit.stdout.strip() + ("+" if changes.stdout else "")
