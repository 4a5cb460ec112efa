"""The devices a run can measure: what keeps one from being used, its cache, its memory, its clocks as read."""

import shutil
import subprocess

import torch

from .rotation import available_memory_bytes, last_level_cache_bytes

DEVICES = ("cuda", "cpu")

# Copies together exceed the cache by this factor. A GPU's L2 is not exactly least-recently-used, and 8 of it is 400 MB
# on an H100; a server CPU's last level is shared, and 1.25 of it can be 600 MB already.
CACHE_FACTORS = {"cpu": 1.25, "cuda": 8.0}

# A CUDA graph holds a call for every copy. More of them would take longer to capture than to measure.
MOST_COPIES = {"cpu": 1 << 16, "cuda": 512}

_CLOCK_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def unusable_reason(device: str) -> str | None:
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
