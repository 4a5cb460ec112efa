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

from .info import triton_version
from .rotation import available_memory_bytes, last_level_cache_bytes

_PACKAGE = Path(eagle_kernels.__file__).parent
_WORDS_OF_NO_MEANING = re.compile(r"\((?:r|tm)\)|\b(?:processor|cpu)\b|@.*|\b\d+-core\b", re.IGNORECASE)


def read_environment(device: str) -> dict[str, object]:
    """A flat record of machine, versions, threads, load and settings, as of now."""
    cpu = cpu_facts(Path("/proc/cpuinfo").read_text())
    isa = "none" if library.missing_reason else plan.cpu_isa()
    return {
        "device": device,
        "device_slug": device_slug(cpu, os.cpu_count()),
        "cpu_model": cpu["model name"],
        "cpu_cores": os.cpu_count(),
        "cpu_isa": isa,
        "threads": torch.get_num_threads(),
        "cache_bytes": last_level_cache_bytes(),
        "available_bytes": available_memory_bytes(),
        "huge_pages": _huge_pages(),
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


def format_header(environment: dict[str, object]) -> str:
    """The record as three lines."""
    env = environment
    return (
        f"eagle-kernels {env['version']} at {env['commit']}, torch {env['torch']}, {env['date']}\n"
        f"{env['cpu_model']} ({env['device_slug']}): {env['cpu_cores']} cores, {env['threads']} threads, kernels "
        f"{env['cpu_isa']}, last-level cache {env['cache_bytes'] >> 20} MiB, huge pages {env['huge_pages']}\n"
        f"load average {env['load_average']} at the start, backend {env['backend']}"
    )


def cpu_facts(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; a model name where Arm kernels give none."""
    first = cpuinfo.partition("\n\n")[0]
    fields = (line.partition(":")[::2] for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, value in fields}
    facts.setdefault("model name", platform.machine())
    facts.setdefault("flags", facts.get("Features", ""))
    return facts


def device_slug(cpu: dict[str, str], cores: int) -> str:
    """A name for bench/results/: brand, widest matrix or vector unit, cores.

    Hypervisors hide the model ("Intel(R) Xeon(R) Processor"); the flags still say what the kernels can use.
    """
    flags = set(cpu["flags"].split())
    units = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "asimd")
    unit = next((unit for unit in units if unit in flags), "")
    words = [_WORDS_OF_NO_MEANING.sub(" ", cpu["model name"]), unit, f"{cores}core"]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def _commit() -> str:
    """The commit of the checkout that the package is imported from, "+" where it has changes; else "release"."""
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
