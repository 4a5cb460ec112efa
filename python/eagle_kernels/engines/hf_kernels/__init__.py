"""Hugging Face `kernels`: the ops as layers that `kernelize` puts into a model whose layers carry a kernel layer name.

>>> from kernels import Mode, kernelize, use_kernel_mapping
>>> with use_kernel_mapping(mapping("RMSNorm")):
...     model = kernelize(model, mode=Mode.INFERENCE)

The same layers without an installed package: `hub/build.py`.
"""

from dataclasses import dataclass

from torch import nn

from ... import checks

LAYERS = ("RMSNorm", "GemmaRMSNorm", "Eagle3Projection", "MTPProjection")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class InstalledLayer:
    """kernels' RepositoryProtocol, for a layer of `layers` in the installed package: nothing is downloaded."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        from . import layers

        return getattr(layers, self.layer_name)


def mapping(*layer_names: str) -> dict[str, dict[str, InstalledLayer]]:
    """For `kernels.use_kernel_mapping` or `register_kernel_mapping`: these layers on every device.

    layer_names: of "RMSNorm", "GemmaRMSNorm", "Eagle3Projection" and "MTPProjection"; ValueError for any other.
    """
    for name in layer_names:
        if name not in LAYERS:
            raise checks.error(ValueError, "mapping", f"a layer name is {name!r}", f"one of {list(LAYERS)}")
    return {name: dict.fromkeys(DEVICES, InstalledLayer(name)) for name in layer_names}
