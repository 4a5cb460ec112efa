"""What the kernels library loads: the layers of the installed package."""

from eagle_kernels.engines.hf_kernels import layers

__all__ = ["layers"]
