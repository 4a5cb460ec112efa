"""Targets that count, and drafters whose sources each have a share of the next state; their weights are solved for.

A counting target has the random layers of a real transformers decoder, with attention's output set to zero, so that
token t has the state S_b(t) at boundary b wherever it stands. Its head is solved for t -> t + 1 mod V. A counting
drafter turns its sources into S_N(t + 1), from which the target's own norm and head read t + 2. Each source gives only
a share: the shares are random and large, and only their sum over all sources is the state. With one source wrong, only
noise is left.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import eagle_kernels as ek
from tiny_models import randomise

# At tp 2 the layout pads V to 128, 64 rows a rank; slices by ceil(V / tp) have 35. V <= H: states are independent.
V, H = 70, 96
SIZES = {"vocab_size": V, "hidden_size": H}


class CountingTarget(nn.Module):
    """`states[b]` is S_b, float64 [V, H]; S_N is the stream before the final norm, `normed` the one after it."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = randomise(decoder).eval().requires_grad_(False)
        self.table = self.decoder.embed_tokens.weight
        self.table.normal_(std=0.2)
        for layer in self.decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
        before_norm = []
        hook = self.decoder.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
        output = self.decoder(torch.arange(V)[:, None], output_hidden_states=True)
        hook.remove()
        self.states = [state[:, 0].double() for state in (*output.hidden_states[:-1], *before_norm)]
        self.normed = output.last_hidden_state[:, 0].double()
        self.head = solve(self.normed, torch.eye(V).double().roll(1, 1))

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def forward(self, ids: Tensor, mask: None, positions: None, cache: object) -> SimpleNamespace:
        states = self.decoder(ids, mask, positions, cache, use_cache=True).last_hidden_state
        return SimpleNamespace(logits=states @ self.head.T)


def solve(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The fp32 weight [D, H] of the linear map from rows of inputs [V, H] to rows of outputs [V, D]."""
    return (torch.linalg.pinv(inputs) @ outputs).T.float().contiguous()


def normalized(states: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm in float64."""
    return states * (states.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()


def shares(total: Tensor, count: int, size: float = 6) -> list[Tensor]:
    """Tensors that add up to `total`, each `size` times as large."""
    noise = [size * total.std() * torch.randn_like(total) for _ in range(count - 1)]
    return [*noise, total - sum(noise)]


@contextmanager
def capture_branches(
    target: CountingTarget, boundaries: list[int], buffer: ek.AuxHiddenStates, names: tuple[str, str], residual: bool
) -> Iterator[None]:
    """Captures as engines make them: the branch that a layer ends with, and the residual that it is added to.

    names: the names of the layer's norm that reads the residual, and of the module whose output is the branch.
    """
    with ExitStack() as hooks:
        for k, boundary in enumerate(boundaries):
            reader, branch = (getattr(target.decoder.layers[boundary - 1], name) for name in names)
            read: list[Tensor] = []
            hooks.callback(reader.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0])).remove)

            def write(module: nn.Module, args: tuple, output: Tensor, k: int = k, read: list[Tensor] = read) -> None:
                buffer.capture(k, output.flatten(0, 1), read.pop().flatten(0, 1) if residual else None)

            hooks.callback(branch.register_forward_hook(write).remove)
        yield
