"""What the ops are measured against: the engines' chains in plain torch, and what torch.compile makes of them.

The chains are those of SGLang 0.5.23 and vLLM 0.33 (`llama_eagle3`, `VocabParallelEmbedding`), with one F.rms_norm per
norm and outputs written in place where torch offers it: the best an eager engine does, not the worst. Each chain of an
op that moves memory has a second form, `preallocated_*`, that allocates nothing: on a CPU an eager chain at large T
spends most of its time on the operating system's mapping of fresh pages, and to be faster than that is no merit.

RMSNorm kernels of other packages are baselines where they are installed: Liger, FlashInfer, vLLM. Each is called as its
engine would; the offset has already been added to the gain. torchao's weight-only linears are baselines too.
"""

import contextlib
import importlib
import importlib.util
import io
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eagle_kernels

from .measure import Call

# The import name of each package whose norm is a baseline, which is also what has to be installed.
_PACKAGES = {"liger": "liger_kernel", "flashinfer": "flashinfer", "vllm": "vllm"}
FOREIGN = tuple(_PACKAGES)

# Baselines whose norms write slices of the concat: this package's norm kernel, or another package's.
SLICES = ("slices", *FOREIGN)

# Baselines for quantized weights.
QUANTIZED = ("dequantize", "int8pack", "torchao")

MEANINGS = {
    "eager": "the engines' chain in plain torch",
    "eager-out": "the same with preallocated outputs and intermediates, for the ops that move memory, on a CPU",
    "slices": "a norm kernel per chunk into its slice of the concat, then torch's product",
    "two-step": "norm_concat, then torch's product, in one call: what a plan takes of many rows",
    "linear": "torch's product alone, over a concat normed before: the ceiling at large T",
    "compile": "torch.compile of the chain",
    "inductor-max": "Inductor with max-autotune, and with freezing on a CPU",
    "dequantize": "the weight dequantized in each call by torch, then this package's op on it, for quantized --weights",
    "int8pack": "the eager norms and cat, then torch._weight_int8pack_mm, for --weights int8_row on a CPU",
    "torchao": "the eager norms and cat, then torchao's weight-only linear, for --weights int8_row and fp8_row",
    "liger": "slices, with Liger's Triton norm",
    "flashinfer": "slices, with FlashInfer's norm",
    "vllm": "slices, with vLLM's norm",
}
BASELINES = tuple(MEANINGS)

# Seconds that the modules of one row may take to compile; above it, fewer copies are made.
COMPILE_BUDGET = 60.0


def normed_concat(
    chunks: Sequence[Tensor], gains: Sequence[Tensor], norm: str, eps: float, out: Tensor | None = None
) -> Tensor:
    """K norms and a cat, a cat and a norm, or a cat alone."""
    if norm == "chunk":
        chunks = [F.rms_norm(chunk, chunk.shape[-1:], gain, eps) for chunk, gain in zip(chunks, gains, strict=True)]
    joined = chunks[0] if len(chunks) == 1 and out is None else torch.cat(list(chunks), -1, out=out)
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


def streams_projection(
    embedding: Tensor, streams: Tensor, gains: Sequence[Tensor], weights: Sequence[Tensor], eps: float
) -> Tensor:
    """[T*S, D]: e_proj of the embedding [T, H] and h_proj of every stream [T*S, H], added.

    The second norm is over as many columns as its gain has: H, or S*H (Qwen4-Exp).
    """
    (T, H), width = embedding.shape, gains[1].numel()
    e = F.linear(F.rms_norm(embedding, (H,), gains[0], eps), weights[0])
    h = F.linear(F.rms_norm(streams.view(-1, width), (width,), gains[1], eps).view(-1, H), weights[1])
    return (h.view(T, -1, h.shape[1]) + e.unsqueeze(1)).view(h.shape)


def slices_unsupported_reason(name: str, norm: str, device: str) -> str | None:
    """Why one of `SLICES` cannot be had; None where it can."""
    if norm != "chunk":
        return f"norms into slices are for norm chunk, and this is norm {norm}"
    return None if name == "slices" else foreign_unsupported_reason(name, device)


def foreign_unsupported_reason(name: str, device: str) -> str | None:
    """Why the kernels of one of `FOREIGN` cannot be timed here; None where they can."""
    if importlib.util.find_spec(_PACKAGES[name]) is None:
        return f"{_PACKAGES[name]} is not installed"
    return None if device == "cuda" else f"the kernels of {_PACKAGES[name]} take CUDA tensors"


def norm_kernel(name: str) -> Callable[[Tensor, Tensor, float, Tensor], object]:
    """norm(x, gain, eps, out) of one of `SLICES`.

    torch's own norm has no out=. `slices` stands in for an engine's norm kernel with a strided out (FlashInfer's): it
    is this package's norm_concat with K = 1, one launch per chunk.
    """
    if name != "slices":
        return ForeignNorms(name).norm
    return lambda x, gain, eps, out: eagle_kernels.norm_concat([x], norm_weight=[gain], eps=eps, out=out)


def normed_slices(
    norm: Callable, chunks: Sequence[Tensor], gains: Sequence[Tensor], eps: float, concat: Tensor
) -> Tensor:
    """K norms, each of which writes its slice of the concat: no `cat`."""
    for chunk, gain, slot in zip(chunks, gains, concat.chunk(len(chunks), -1), strict=True):
        norm(chunk, gain, eps, slot)
    return concat


class NormScratch:
    """F.rms_norm in static memory: torch's own has no out=, and on a CPU it is these operations over fresh tensors."""

    def __init__(self, *shape: int, device: str) -> None:
        self._wide = torch.zeros(*shape, dtype=torch.float32, device=device)
        self._rstd = torch.zeros(*shape[:-1], 1, dtype=torch.float32, device=device)

    @staticmethod
    def num_bytes(T: int, H: int) -> int:
        return 4 * T * (H + 1)

    def norm(self, x: Tensor, gain: Tensor, eps: float, out: Tensor) -> None:
        """out = RMSNorm(x) * gain, for an fp32 gain; the rows of `out` may be strided."""
        wide, rstd = self._wide, self._rstd
        wide.copy_(x)
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=rstd)
        rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        out.copy_(wide.mul_(rstd).mul_(gain))


def preallocated_normed_concat(
    chunks: Sequence[Tensor], gains: Sequence[Tensor], norm: str, eps: float, out: Tensor, scratch: NormScratch
) -> Tensor:
    """Every norm writes its slice: what an engine without a cat would run. `gains` in fp32."""
    if norm == "chunk":
        return normed_slices(scratch.norm, chunks, gains, eps, out)
    torch.cat(list(chunks), -1, out=out)
    if norm == "concat":
        scratch.norm(out, gains[0], eps, out)
    return out


# torchao's weight-only config for a format of weights.
_TORCHAO_CONFIGS = {"int8_row": "Int8WeightOnlyConfig", "fp8_row": "Float8WeightOnlyConfig"}


def torchao_unsupported_reason(format: str) -> str | None:
    if format not in _TORCHAO_CONFIGS:
        return f"it multiplies --weights {' and '.join(_TORCHAO_CONFIGS)}"
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def torchao_linear(weight: Tensor, format: str) -> Callable[[Tensor], Tensor]:
    """A linear layer over torchao's own codes, made from a weight that has the values of `format`."""
    quantization = importlib.import_module("torchao.quantization")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(layer, getattr(quantization, _TORCHAO_CONFIGS[format])())
    return layer


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
        # A copy: Inductor's C++ GEMM template (torch 2.13) packs a frozen weight from the start of its storage, so each
        # view of one tensor got the product with the first.
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
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
            started = time.perf_counter()  # the first one compiles; the others find its C++ code in the cache
        elif (time.perf_counter() - started) * len(modules) / (len(modules) - 1) > COMPILE_BUDGET:
            break
    return modules


def _freeze(module: nn.Module, chunks: Sequence[Tensor], number: int) -> Callable[[Sequence[Tensor]], Tensor]:
    # Dynamo keeps what it compiled per code object and gives up after eight modules; each copy gets its own code.
    code = type(module).forward.__code__.replace(co_name=f"forward_{number}")
    forward = types.FunctionType(code, type(module).forward.__globals__)
    module.__class__ = type(f"FrozenProjection{number}", (type(module),), {"forward": forward})
    function = torch.compile(module, dynamic=False)
    settings = {
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
        # A graph from this cache has the packed weight of the module that put it there (torch 2.13).
        "fx_graph_cache": False,
    }
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


@dataclass(frozen=True)
class ForeignNorms:
    """The norm kernels of one package: `norm` writes into a slice of the concat where the package can, `add_norm`
    leaves (normed, sum) in the two tensors it is given."""

    name: str

    @cached_property
    def _module(self) -> ModuleType:
        path = {"liger": "liger_kernel.ops", "flashinfer": "flashinfer.norm", "vllm": "vllm._custom_ops"}[self.name]
        return importlib.import_module(path)

    def norm(self, x: Tensor, gain: Tensor, eps: float, out: Tensor) -> None:
        """out = RMSNorm(x); the rows of `out` may be strided."""
        if self.name == "flashinfer":
            self._module.rmsnorm(x, gain, eps, out=out)
        elif self.name == "liger":
            out.copy_(self._module.LigerRMSNormFunction.apply(x, gain, eps))  # it has no out=
        elif out.is_contiguous():
            self._module.rms_norm(out, x, gain, eps)
        else:
            dense = x.new_empty(x.shape)  # its kernel writes dense rows only
            self._module.rms_norm(dense, x, gain, eps)
            out.copy_(dense)

    def add_norm(self, hidden: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, sum); hidden and residual are overwritten where the package works in place."""
        if self.name == "liger":
            return self._module.LigerFusedAddRMSNormFunction.apply(hidden, residual, gain, eps)
        if self.name == "flashinfer":
            self._module.fused_add_rmsnorm(hidden, residual, gain, eps)
        else:
            self._module.fused_add_rms_norm(hidden, residual, gain, eps)
        return hidden, residual
