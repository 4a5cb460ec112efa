"""What the driver says of the GPU: sizes, clocks, and how many clusters of each instance's blocks run at once.

`clusters_at_once` of csrc/cuda/h200.h counts on what an H100 said. The standard library and libcuda are enough: the
kernel that is asked about is PTX that does nothing, so that shared memory and threads limit its clusters, as they do
those of the instances. Nothing is raised: a refusal by the driver, or a machine without one, becomes a sentence of the
result.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator

from .stages import ROOT, WORK, write_json

INSTANCES = ROOT / "bench" / "results" / "cuda_instances.json"
_CLUSTERS = range(1, 17)  # blocks; more than 8, which no kernel here has, show the size of a GPC

# CUdevice_attribute.
_ATTRIBUTES = {
    "multiprocessors": 16,
    "l2_bytes": 38,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "shared_bytes_of_a_multiprocessor": 81,
    "shared_bytes_of_a_block": 97,
    "capability_major": 75,
    "capability_minor": 76,
}
_MAX_DYNAMIC_SHARED_BYTES, _NON_PORTABLE_CLUSTERS = 8, 14  # CUfunction_attribute
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID

PTX = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing()\n{\n  ret;\n}\n"


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def read_device() -> dict:
    """What could be read; `failed` says what ended the reading, if something did."""
    device: dict = {"smi": _smi()}
    try:
        driver = _Driver()
        device["cuda"], device["attributes"] = driver.version(), dict(driver.attributes())
        device["clusters"] = [sizes | {"at_once": driver.clusters(**sizes)} for sizes in _instances()]
    except (OSError, AttributeError, ValueError, KeyError) as failure:
        device["failed"] = f"{type(failure).__name__}: {failure}"
    return device


def _smi() -> str:
    """Clocks, their limits and what lowers them, and the driver's version, as nvidia-smi prints them."""
    query = ["nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE,POWER,TEMPERATURE"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as failure:
        return str(failure)


def _instances() -> list[dict[str, int]]:
    """The different blocks of the projection's kernels (make instances)."""
    instances = json.loads(INSTANCES.read_text(encoding="utf-8"))["instances"].values()
    blocks = sorted({(instance["threads"], instance["shared"]) for instance in instances})
    return [{"threads": threads, "shared_bytes": shared_bytes} for threads, shared_bytes in blocks]


class _Driver:
    """The functions of libcuda that are called here, on the first visible GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), PTX)
        self._kernel = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"nothing")
        self._call("cuFuncSetAttribute", self._kernel, _NON_PORTABLE_CLUSTERS, 1)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} returned {code}")

    def version(self) -> int:
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    def attributes(self) -> Iterator[tuple[str, int]]:
        value = ctypes.c_int()
        for name, number in _ATTRIBUTES.items():
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
            yield name, value.value

    def clusters(self, threads: int, shared_bytes: int) -> dict[int, int | str]:
        """{blocks of a cluster: how many such clusters run at the same time, or the driver's refusal}."""
        at_once: dict[int, int | str] = {}
        for blocks in _CLUSTERS:
            attribute = _LaunchAttribute(_CLUSTER_DIMENSION)
            attribute.value[:3] = (1, blocks, 1)
            config = _LaunchConfig((1, blocks, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1)
            count = ctypes.c_int()
            try:
                self._call("cuFuncSetAttribute", self._kernel, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
                self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._kernel, ctypes.byref(config))
                at_once[blocks] = count.value
            except OSError as refused:
                at_once[blocks] = str(refused)
        return at_once


def main() -> int:
    """0 whatever was read."""
    write_json(WORK / "device.json", read_device())
    return 0


if __name__ == "__main__":
    sys.exit(main())
