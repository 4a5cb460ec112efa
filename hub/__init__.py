"""eagle-kernels as a package of Hugging Face's kernel hub: `kernels.get_kernel(...)`, nothing installed.

The public API of eagle-kernels, and `layers`, which `kernels.kernelize` puts into a model.
"""

from . import eagle_kernels
from .eagle_kernels import *  # noqa: F403
from .eagle_kernels.engines.hf_kernels import layers

__all__ = [*eagle_kernels.__all__, "layers"]
