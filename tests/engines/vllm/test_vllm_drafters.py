"""docs/models.md has every drafter of the real vLLM's registry."""

import pytest

from eagle_kernels.models.drafters import VLLM

registry = pytest.importorskip("vllm.model_executor.models.registry")

# Of 0.32; 0.33 serves them no more.
GONE = {"MedusaModel"}


def test_every_drafter_of_the_registry_has_a_row() -> None:
    served = set(registry._SPECULATIVE_DECODING_MODELS)
    served |= {name for name in registry.ModelRegistry.models if name.endswith("ForMTP")}
    rows = {name for row in VLLM for name in row.architectures}
    assert served - GONE <= rows, served - GONE - rows
