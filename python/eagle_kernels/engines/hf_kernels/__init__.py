"""Hugging Face `kernels`: the ops as layers that `kernelize` puts into a model whose layers carry a kernel layer name.

>>> from kernels import Mode, kernelize, use_kernel_mapping
>>> with use_kernel_mapping(mapping("RMSNorm")):
...     model = kernelize(model, mode=Mode.INFERENCE)

`repository/` is a kernel repository without code of its own: it exports `layers`, so that the kernels library can
load from an installed package what it loads from the Hub.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parent / "repository"
DEVICES = ("cpu", "cuda")


def mapping(*layer_names: str) -> dict[str, dict[str, object]]:
    """For `kernels.use_kernel_mapping` or `register_kernel_mapping`: these layers of `layers` on every device."""
    from kernels import LocalLayerRepository

    return {
        name: {device: LocalLayerRepository(REPOSITORY, layer_name=name) for device in DEVICES} for name in layer_names
    }
