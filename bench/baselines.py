"""What the ops are measured against: the engines' chains in plain torch, and what torch.compile makes of them.

The chains are those of SGLang 0.5.23 and vLLM 0.33 (`llama_eagle3`, `VocabParallelEmbedding`), with one F.rms_norm per
norm and outputs written in place where torch offers it: the best an eager engine does, not the worst.
"""

import contextlib
import io
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eagle_kernels

from . import foreign_norms
from .measure import Call

# eager: torch's kernels. slices: a norm kernel per chunk that writes its slice of the concat, then the product.
# linear: the product alone, over a concat that was normed before: the ceiling of what fusing a norm can win at large T.
BASELINES = ("eager", "slices", "linear", "compile", "inductor-max", *foreign_norms.NAMES)

# Seconds that the modules of one row may take to compile; above it, fewer copies are made.
COMPILE_BUDGET = 60.0


def normed_concat(
    chunks: Sequence[Tensor], gains: Sequence[Tensor], norm: str, eps: float, out: Tensor | None = None
) -> Tensor:
    """K norms and a cat, a cat and a norm, or a cat alone."""
    if norm == "chunk":
        chunks = [F.rms_norm(chunk, chunk.shape[-1:], gain, eps) for chunk, gain in zip(chunks, gains, strict=True)]
    joined = torch.cat(chunks, -1, out=out)
    if norm != "concat":
        return joined
    normed = F.rms_norm(joined, joined.shape[-1:], gains[0], eps)
    return normed if out is None else out.copy_(normed)


def projection(
    chunks: Sequence[Tensor],
    gains: Sequence[Tensor],
    weight: Tensor,
    norm: str,
    eps: float,
    post_gain: Tensor | None,
) -> Tensor:
    return projected(normed_concat(chunks, gains, norm, eps), weight, eps, post_gain)


def projected(normed: Tensor, weight: Tensor, eps: float, post_gain: Tensor | None) -> Tensor:
    product = F.linear(normed, weight)
    return product if post_gain is None else F.rms_norm(product, product.shape[-1:], post_gain, eps)


# Baselines whose norms write slices of the concat: this package's norm kernel, or another package's.
SLICES = ("slices", *foreign_norms.NAMES)


def slices_refusal(name: str, norm: str, device: str) -> str | None:
    """Why one of `SLICES` cannot be had; None where it can."""
    if norm != "chunk":
        return f"norms into slices are for norm chunk, and this is norm {norm}"
    return None if name == "slices" else foreign_norms.unusable_reason(name, device)


def norm_kernel(name: str) -> Callable[[Tensor, Tensor, float, Tensor], object]:
    """norm(x, gain, eps, out) of one of `SLICES`.

    torch's own norm has no out=. The stand-in for an engine's norm kernel that takes a strided one (FlashInfer's) is
    this package's with K = 1, one launch each.
    """
    if name != "slices":
        return foreign_norms.Norms(name).norm
    return lambda x, gain, eps, out: eagle_kernels.norm_concat([x], norm_weight=[gain], eps=eps, out=out)


def normed_slices(
    norm: Callable, chunks: Sequence[Tensor], gains: Sequence[Tensor], eps: float, concat: Tensor
) -> Tensor:
    """K norms, each of which writes its slice of the concat: no `cat`."""
    for chunk, gain, slot in zip(chunks, gains, concat.chunk(len(chunks), -1), strict=True):
        norm(chunk, gain, eps, slot)
    return concat


def captured(hidden: Tensor, residual: Tensor, slot: Tensor) -> Tensor:
    return slot.copy_(hidden + residual)


def added_norm(hidden: Tensor, residual: Tensor, gain: Tensor, eps: float, out_sum: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.add(hidden, residual, out=out_sum)
    return F.rms_norm(total, total.shape[-1:], gain, eps), total


def masked_embedding(
    ids: Tensor, weight: Tensor, org_begin: int, org_end: int, added_begin: int, added_end: int, added_row: int
) -> Tensor:
    """`get_masked_input_and_mask` of both engines, the gather, and the fill."""
    is_org = (ids >= org_begin) & (ids < org_end)
    is_added = (ids >= added_begin) & (ids < added_end)
    offset = org_begin * is_org + (added_begin - added_row) * is_added
    is_held = is_org | is_added
    rows = F.embedding(is_held * (ids - offset), weight)
    return rows.masked_fill_(~is_held.unsqueeze(-1), 0)


def compiled(chain: Callable, arguments: Sequence[tuple], mode: str | None = None) -> Call:
    """torch.compile of the chain; weights are arguments, so one compilation serves all copies."""
    function = torch.compile(chain, dynamic=False, mode=mode)
    with _quiet_compilation():
        function(*arguments[0])
    return lambda copy: function(*arguments[copy])


class _FrozenProjection(nn.Module):
    """The chain with its weights as parameters, for Inductor to fold and pack."""

    def __init__(
        self, gains: Sequence[Tensor], weight: Tensor, norm: str, eps: float, post_gain: Tensor | None
    ) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(gain, requires_grad=False) for gain in gains])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.post_gain = None if post_gain is None else nn.Parameter(post_gain, requires_grad=False)
        self.norm, self.eps = norm, eps

    def forward(self, chunks: Sequence[Tensor]) -> Tensor:
        return projection(chunks, list(self.gains), self.weight, self.norm, self.eps, self.post_gain)


def frozen_projections(arguments: Sequence[tuple]) -> list[Callable[[Sequence[Tensor]], Tensor]]:
    """Inductor with freezing and max-autotune: a module per copy, since a frozen weight is a constant of its module.

    Fewer than there are copies, but at least two, where all of them would take longer than COMPILE_BUDGET.
    """
    modules: list[Callable] = []
    started = time.perf_counter()
    for chunks, gains, weight, *settings in arguments:
        module = _FrozenProjection(gains, weight, *settings)
        modules.append(_freeze(module, chunks, len(modules)))
        if len(modules) == 1:
            started = time.perf_counter()  # the first one tunes and compiles; the others find its code in the cache
        elif (time.perf_counter() - started) * len(modules) / (len(modules) - 1) > COMPILE_BUDGET:
            break
    return modules


def _freeze(module: nn.Module, chunks: Sequence[Tensor], number: int) -> Callable[[Sequence[Tensor]], Tensor]:
    # Dynamo keeps what it compiled per code object and gives up after eight modules; each copy gets a code of its own.
    code = type(module).forward.__code__.replace(co_name=f"forward_{number}")
    forward = types.FunctionType(code, type(module).forward.__globals__)
    module.__class__ = type(f"FrozenProjection{number}", (type(module),), {"forward": forward})
    function = torch.compile(module, dynamic=False)
    settings = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    with _quiet_compilation(), torch._inductor.config.patch(settings):
        function(chunks)
    return function


@contextlib.contextmanager
def _quiet_compilation() -> Iterator[None]:
    """Compile in this process, where no worker keeps running into the measurement, and keep the tuning log back."""
    # Imported here: importing Inductor takes a second, and a run without compiled baselines does not need it.
    import torch._inductor.config as config

    settings = {"compile_threads": 1, "autotune_num_choices_displayed": 0}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), config.patch(settings):
        warnings.simplefilter("ignore")
        yield
