"""Import-only stand-ins for missing modules that the modules of vLLM's models import."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch

if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("torchvision") is None:
    import engines.sglang.standins.sitecustomize  # noqa: F401  Qwen 3.5 and Qwen4-Exp


@pytest.fixture(autouse=True, scope="session")
def no_amx_without_its_kernels() -> Iterator[None]:
    """On a processor with AMX, vLLM's GPU wheel would select CPU kernels that it does not have."""
    with pytest.MonkeyPatch.context() as patched:
        if not hasattr(torch.ops._C, "convert_weight_packed"):
            patched.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="session")
def models_of_gpus() -> None:
    """The modules of dots3-note and Inkling, imported with stand-ins for FlashAttention and, where vLLM is the CPU
    wheel, DeepGEMM and numba."""
    absent = ["vllm_flash_attn", "vllm_flash_attn.flash_attn_interface", "third_party.deep_gemm"]
    with pytest.MonkeyPatch.context() as patched:
        for name in (*(f"vllm.{name}" for name in absent), "numba"):
            patched.setitem(sys.modules, name, MagicMock())
        patched.setattr(
            "vllm.v1.attention.backends.fa_utils.compile_flash_attn_varlen_func_from_specs", None, raising=False
        )
        for model in ("dots3_note", "inkling"):
            importlib.import_module(f"vllm.models.{model}.nvidia.mtp")
