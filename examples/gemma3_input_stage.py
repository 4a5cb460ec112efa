"""The main job on a real model: Gemma 3's captured layers through the fc block of an EAGLE-3 drafter.

Runs a `transformers` Gemma3ForCausalLM (real architecture, small config, seeded weights) in bf16, captures three
boundaries straight into an `AuxHiddenStates` buffer, projects them with `Eagle3Projection`, and compares both with what
the model itself reports and with the engines' chain computed in float64. Exits 1 where a comparison fails.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import eagle_kernels as ek
from eagle_kernels.engines.transformers import capture

BATCH, LENGTH = 2, 24


def build_model() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=640,
        intermediate_size=1280,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=160,
        sliding_window=16,
    )
    return Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def build_drafter(hidden_size: int) -> ek.Eagle3Projection:
    """A drafter whose fc has one norm per chunk (EAGLE-3.1: `fc_norm`), read from a config as checkpoints have it."""
    config = ek.Eagle3Config.from_hf(
        {"hidden_size": hidden_size, "fc_norm": True, "rms_norm_eps": 1e-6, "num_aux_hidden_states": 3}
    )
    drafter = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    for norm in drafter.fc_norm:
        norm.weight.uniform_(0.5, 1.5)
    return drafter


def chain(chunks: list[Tensor], drafter: ek.Eagle3Projection, dtype: torch.dtype) -> Tensor:
    """What the engines run: K norms, cat, fc."""
    config = drafter.config
    normed = [
        F.rms_norm(chunk.to(dtype), (chunk.shape[-1],), norm.weight.to(dtype), config.eps)
        for chunk, norm in zip(chunks, drafter.fc_norm, strict=True)
    ]
    return F.linear(torch.cat(normed, -1), drafter.fc.weight.to(dtype))


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


@torch.inference_mode()
def main() -> int:
    model = build_model()
    hidden_size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    # Output ids 1, 4, 7 of an 8-layer model: the last boundary is the stream before the final norm.
    boundaries = ek.capture_layers("gemma3_text", num_layers, [1, 4, 7])
    buffer = ek.AuxHiddenStates(256, len(boundaries), hidden_size)
    drafter = build_drafter(hidden_size)

    ids = torch.randint(model.config.vocab_size, (BATCH, LENGTH))
    with capture(model, boundaries, buffer):
        states = model(ids, output_hidden_states=True).hidden_states
    rows = BATCH * LENGTH
    projected = drafter(buffer.packed(rows), sum_squares=buffer.row_sum_squares(rows))

    failures = 0
    print(f"Gemma3ForCausalLM, {num_layers} layers of {hidden_size}, boundaries {boundaries}, {rows} tokens, bf16")
    for k, boundary in enumerate(boundaries):
        captured = buffer.chunk(k, rows).view(BATCH, LENGTH, hidden_size)
        # The model reports its last state only after the final norm.
        same = captured if boundary < num_layers else model.model.norm(captured)
        equal = torch.equal(same, states[boundary])
        failures += not equal
        print(f"  boundary {boundary}: captured {'==' if equal else '!='} output_hidden_states[{boundary}]")

    chunks = [buffer.chunk(k, rows) for k in range(len(boundaries))]
    truth = chain(chunks, drafter, torch.float64)
    ours, eager = relative_error(projected, truth), relative_error(chain(chunks, drafter, torch.bfloat16), truth)
    failures += not ours <= 1.05 * eager
    print(f"  Eagle3Projection: relative error against float64 {ours:.2e}, the engines' eager chain {eager:.2e}")
    print(f"  {ek.explain('norm_concat_linear', chunks, drafter.fc.weight)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
