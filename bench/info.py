"""What is installed, what this machine has, and which backend would run each op, and why."""

import argparse
import importlib
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Callable, Iterator

import torch

from eagle_kernels import environment, library, ops, plan
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.plan import Plan
from eagle_kernels.version import __version__

from . import choices
from .op_modules import op_module

_PRESET, _TOKENS, _DTYPES = "llama3.1-8b", (1, 16, 64, 512), ("bf16", "fp32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    sections = {"versions": _versions, "build": _build, "devices": _devices, "environment": _environment}
    for title, lines in sections.items():
        _print_section(title, lines())
    for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        title = f"plan on {device_type}, norm_concat_linear for {_PRESET}"
        _print_section(title, _plan_table(device_type))
    return 0


def _print_section(title: str, rows: Iterator[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(title)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip())
    print()


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
    try:
        compiled = importlib.import_module("eagle_kernels._C")
    except ImportError as failure:
        yield "build info", f"none: {failure}"
        return
    for name, value in compiled.build_info().items():
        yield name, value or "none"
    yield "cpu features", ", ".join(compiled.cpu_features())


def _devices() -> Iterator[tuple[str, str]]:
    isa = "none" if library.unsupported_reason else plan.cpu_isa()
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, instruction set {isa}"
    if not torch.cuda.is_available():
        yield "cuda", "no device"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"


def _environment() -> Iterator[tuple[str, str, str, str]]:
    """The table of `environment.py`, with the setting in force beside each variable."""
    rows = [line.split("|")[1:-1] for line in environment.__doc__.splitlines() if line.startswith("| EAGLE_")]
    for name, values, meaning in ([cell.strip() for cell in row] for row in rows):
        field = name.removeprefix("EAGLE_KERNELS_").lower()
        # The switches of the engines' plugins are read when an engine loads one.
        setting = getattr(plan.SETTINGS, field) if hasattr(plan.SETTINGS, field) else "read by the engine"
        yield name, "= " + ("auto" if setting is None else str(setting)), f"({values})", meaning


def _plan_table(device_type: str) -> Iterator[tuple[str, ...]]:
    yield "op", "dtype", "T", "runs", "because"
    for op in ops.__all__:
        for dtype in _DTYPES:
            plans = [(T, _explain(op, T, dtype, device_type)) for T in _TOKENS]
            for (runs, because), group in itertools.groupby(plans, key=lambda entry: entry[1]):
                yield op, dtype, ",".join(str(T) for T, _ in group), runs, because


def _explain(op: str, T: int, dtype: str, device_type: str) -> tuple[str, str]:
    try:
        planned = _plan(op, device_type)(T, choices.DTYPES[dtype])
    except RuntimeError as unusable:
        return "nothing", str(unusable)
    # The limit on T is the same for a group of rows; T itself would split the group.
    return f"{planned.backend}/{planned.method}", planned.reason.replace(f"T={T} ", "T ")


def _plan(op: str, device_type: str) -> Callable[[int, torch.dtype], Plan]:
    if op != "norm_concat_linear":
        return lambda T, dtype: plan.simple_plan(op, torch.device(device_type))
    stage = model_shapes()[_PRESET].stage("eagle3")
    if (backend := plan.choose_backend(op, device_type)[0]) in ("cuda", "triton"):
        plan_gpu = op_module(op).plan_cuda if backend == "cuda" else op_module(op).plan_triton
        return lambda T, dtype: plan_gpu(T, stage.K, stage.H, stage.D, dtype, torch.device(device_type))
    return lambda T, dtype: op_module(op).plan_sizes(T, stage.K * stage.H, stage.D, dtype, device_type)
