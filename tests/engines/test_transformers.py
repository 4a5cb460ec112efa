"""Captures from a real transformers model equal what the model itself reports, at every boundary."""

import re

import pytest
import torch

import eagle_kernels as ek

transformers = pytest.importorskip("transformers")

from eagle_kernels.engines.transformers import capture  # noqa: E402

BATCH, LENGTH, LAYERS, H = 2, 5, 4, 64


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=128,
        hidden_size=H,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=4,
    )
    return transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


@torch.inference_mode()
@pytest.mark.parametrize("boundary", range(LAYERS + 1))
def test_every_boundary_equals_output_hidden_states(model: torch.nn.Module, boundary: int) -> None:
    ids = torch.randint(128, (BATCH, LENGTH))
    buffer = ek.AuxHiddenStates(BATCH * LENGTH, 1, H)
    with capture(model, [boundary], buffer):
        states = model(ids, output_hidden_states=True).hidden_states
    captured = buffer.packed(BATCH * LENGTH).view(BATCH, LENGTH, H)
    # The last reported state is already past the final norm.
    assert torch.equal(captured if boundary < LAYERS else model.model.norm(captured), states[boundary])


@torch.inference_mode()
def test_the_model_is_restored_on_exit(model: torch.nn.Module) -> None:
    buffer = ek.AuxHiddenStates(8, 2, H)
    with pytest.raises(ZeroDivisionError), capture(model, [0, LAYERS], buffer):
        raise ZeroDivisionError
    model(torch.randint(128, (1, 3)))
    assert not buffer.buffer.any()


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        pytest.param([0, 5], "transformers.capture: boundary is 5, expected one in [0, 4]", id="above-N"),
        pytest.param([-1, 0], "boundary is -1", id="negative"),
        pytest.param([1], "boundaries is [1], expected 2 of them", id="count"),
    ],
)
def test_bad_boundaries_set_no_hook(model: torch.nn.Module, boundaries: list[int], message: str) -> None:
    def hooks() -> list[int]:
        return [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model.model.layers]

    buffer, before = ek.AuxHiddenStates(8, 2, H), hooks()
    with pytest.raises(ValueError, match=re.escape(message)), capture(model, boundaries, buffer):
        pass
    assert hooks() == before
