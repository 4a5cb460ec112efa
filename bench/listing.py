"""What there is to measure: ops, presets, backends and baselines, and what keeps one from running here."""

import argparse
from collections.abc import Iterator

from eagle_kernels import environment, ops, plan
from eagle_kernels.model_shapes import model_shapes

from . import devices, foreign_norms
from .baselines import BASELINES
from .selection import norm_of

_MEANINGS = {
    "eager": "the engines' chain in plain torch",
    "slices": "a norm kernel per chunk into its slice of the concat, then torch's product",
    "linear": "torch's product alone, over a concat normed before: the ceiling at large T",
    "compile": "torch.compile of the chain",
    "inductor-max": "Inductor with max-autotune, and with freezing on a CPU",
    "liger": "slices, with Liger's Triton norm",
    "flashinfer": "slices, with FlashInfer's norm",
    "vllm": "slices, with vLLM's norm",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    sections = {"ops": _ops(), "presets": _presets(), "devices": _devices(), "backends": _backends()}
    for title, lines in (sections | {"baselines": _baselines()}).items():
        print(title)
        for line in lines:
            print(f"  {line}")
        print()
    return 0


def _ops() -> Iterator[str]:
    yield ", ".join(ops.__all__)


def _presets() -> Iterator[str]:
    yield f"{'NAME:STAGE':<32}{'K':>3}{'H':>7}{'D':>7}  norm"
    for name, model in model_shapes().items():
        for stage in model.stages:
            post_norm = ", norm of the result" if stage.post_norm else ""
            unsure = "" if model.certain else "  (not from the model's own config)"
            name_and_stage = f"{name}:{stage.kind}"
            yield f"{name_and_stage:<32}{stage.K:>3}{stage.H:>7}{stage.D:>7}  {norm_of(stage)}{post_norm}{unsure}"


def _devices() -> Iterator[str]:
    for device in devices.DEVICES:
        yield f"{device:<14}{devices.unusable_reason(device) or 'usable'}"


def _backends() -> Iterator[str]:
    for backend in environment.BACKENDS:
        reasons = {device: plan.unusable_reason(backend, device) for device in _usable_devices()}
        answers = ", ".join(f"{device}: {reason or 'usable'}" for device, reason in reasons.items())
        yield f"{backend:<14}{answers}"


def _baselines() -> Iterator[str]:
    for name in BASELINES:
        reason = foreign_norms.unusable_reason(name, _usable_devices()[0]) if name in foreign_norms.NAMES else None
        yield f"{name:<14}{_MEANINGS[name]}{f' (not here: {reason})' if reason else ''}"


def _usable_devices() -> list[str]:
    return [device for device in devices.DEVICES if devices.unusable_reason(device) is None]
