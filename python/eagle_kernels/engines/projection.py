"""A drafter's projection on the engine's own modules: y = post_norm(fc(chunk_norm(concat_norm(cat of K chunks)))).

`Eagle3Projection` owns its parameters. Here the engine owns them and reloads them when weights are updated in place
(RL): every call reads them from the engine's modules, nothing is packed or folded, nothing can be stale.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from .. import layers, library, plan
from ..dispatch import OPERANDS
from ..huge_pages import use_huge_pages
from ..ops import norm_concat_linear_quantized as quantized
from ..ops.norm_concat import concatenate
from ..ops.norm_concat_linear import project
from ..ops.projection import Projection
from ..ops.sources import Sources
from ..quantized_weight import QuantizedWeight
from ..warmup import warm_up
from .decision import Call, normal_rows
from .eligibility import log_once
from .engine_codes import EngineCodes
from .gates import TargetError


@dataclass(frozen=True, eq=False)
class EngineProjection:
    """On the engine's modules; norms have `weight` and `variance_epsilon`, as RMSNorm of vLLM and SGLang."""

    fc: Any
    num_chunks: int | None  # K of a packed input; None where there is no norm and only its width counts
    concat_norm: Any = None
    chunk_norms: Sequence[Any] = ()
    post_norm: Any = None
    norm_offset: float = 0.0
    fc_unsupported: str | None = None  # why the ops cannot read fc.weight; the engine then runs fc, behind norm_concat

    @property
    def has_norm(self) -> bool:
        return self.concat_norm is not None or len(self.chunk_norms) > 0

    @property
    def op(self) -> str:
        return "norm_concat_linear" if self.fc_unsupported is None else "norm_concat"

    @property
    def kind(self) -> str:
        """What a log line says of the projection: K=3, chunk norm."""
        norms = [("concat", self.concat_norm is not None), ("chunk", len(self.chunk_norms) > 0)]
        chunks = "" if self.num_chunks is None else f"K={self.num_chunks}, "
        codes = f", {self.codes}" if self.codes else ""
        return f"{chunks}{' then '.join(norm for norm, there in norms if there) or 'no'} norm{codes}"

    @property
    def codes(self) -> str:
        """The format of a quantized weight, "" for a dense one."""
        weight = getattr(self.fc, "weight", None)
        return weight.format if isinstance(weight, QuantizedWeight) else ""

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the activations."""
        return self.fc.like() if isinstance(self.fc, EngineCodes) else parameter_of(self.fc)

    @property
    def is_worthwhile(self) -> bool:
        """Whether the engine's own call of fc leaves anything to gain."""
        return self.has_norm or self.post_norm is not None or bool(self.codes)

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        out: Tensor | None = None,
        indices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """[N, D] from K tensors [N, H] or one packed [N, K*H] ([D] from [K*H]); in `out` if the op reads fc's weight.

        indices: the rows to take of each chunk, only without a concat norm; -1 gives a zero row.
        """
        if self.fc_unsupported is not None:
            projected = self.fc(self.normed(chunks, indices))
            return projected if self.post_norm is None else self.post_norm(projected)
        sources = self._sources("norm_concat_linear", self._first_of_two_norms(chunks), *self._norm, indices)
        post_norm_weight, post_norm_eps = None, 0.0
        if self.post_norm is not None:
            post_norm_weight, post_norm_eps = parameter_of(self.post_norm), self.post_norm.variance_epsilon
        weight, bias = parameter_of(self.fc), parameter_of(self.fc, "bias", None)
        values = weight, bias, post_norm_weight, post_norm_eps
        if isinstance(weight, QuantizedWeight):
            return quantized.project(sources, quantized.QuantizedProjection(*values), out)
        return project(sources, tuple.__new__(Projection, values), out)  # as in norm_concat_linear

    __call__ = forward

    def use_huge_pages(self) -> None:
        """Move fc's weight, on a CPU. `probe` does it too, but a shape that was timed is not probed again."""
        use_huge_pages(parameter_of(self.fc, "weight", None))

    def normed(self, chunks: Sequence[Tensor] | Tensor, indices: Sequence[Tensor | None] | None = None) -> Tensor:
        """What fc reads, [N, K*H]."""
        return concatenate(self._sources("norm_concat", self._first_of_two_norms(chunks), *self._norm, indices))

    def _first_of_two_norms(self, chunks: Sequence[Tensor] | Tensor) -> Sequence[Tensor] | Tensor:
        """Two norms in a row: the first is written out, as the engines do, and the second one reads it."""
        if not self.chunk_norms or self.concat_norm is None:
            return chunks
        return concatenate(self._sources("norm_concat", chunks, *_concat_norm(self.concat_norm)))

    @property
    def _norm(self) -> tuple[str, Sequence[Any], list[float]]:
        """(norm, the modules whose weights are its gains, eps) in front of fc."""
        if self.chunk_norms:
            return "chunk", self.chunk_norms, [norm.variance_epsilon for norm in self.chunk_norms]
        return _concat_norm(self.concat_norm)

    def _sources(
        self,
        op: str,
        chunks: Sequence[Tensor] | Tensor,
        norm: str,
        owners: Sequence[Any],
        eps: list[float],
        indices: Sequence[Tensor | None] | None = None,
    ) -> Sources:
        gains = [*map(as_operand, layers.weights_of(owners))]
        return Sources.of_module(op, chunks, self.num_chunks, norm, gains, eps, self.norm_offset, None, indices)


def _concat_norm(norm: Any) -> tuple[str, Sequence[Any], list[float]]:
    return ("none", (), [1e-6]) if norm is None else ("concat", (norm,), [norm.variance_epsilon])


def parameter_of(module: Any, name: str = "weight", *default: None) -> Any:
    """`as_operand` of the parameter that the module has now."""
    return as_operand(layers.parameter_of(module, name, *default))


def as_operand(parameter: Any) -> Any:
    """The parameter as a tensor of torch's own class, which goes straight to the kernels, and without its gradient,
    which engines leave on outside inference mode.

    vLLM's linear layers hold a subclass with a `__torch_function__` (vLLM 0.33, `model_executor/parameter.py`). A call
    with one is checked in Python, where each access to the parameter takes 1.3 us: 93 us per call with three norms,
    against 14 us with a plain tensor (stubbed launches, AMD EPYC).
    """
    is_one = (is_compiling() or type(parameter) in OPERANDS) and not is_grad_enabled()
    if is_one or not isinstance(parameter, Tensor):
        return parameter
    with torch._C.DisableTorchFunctionSubclass():  # 0.5 us with it, 1.7 without
        return parameter.data


class ProbeError(Exception):
    """Our op does not run here, or not as the engine's own code does; the message says why."""


@contextlib.contextmanager
def leaving_to(engine: str, logger: logging.Logger, name: str) -> Iterator[None]:
    """Whatever fails inside is logged with the name of what stays with the engine, which runs its own code."""
    try:
        yield
    except Exception as failure:  # of a hook, or of a version of the engine that nobody has seen: it must serve on
        because = failure if isinstance(failure, TargetError | ProbeError) else repr(failure)
        log_once(logger, logging.WARNING, f"{name} stays with {engine}: {because}")


# Beyond some hundred rows the plan does not change and no further kernel is compiled (`warmup`), so probing more rows
# than fit into these bytes would only take memory: 805 MB for 16,384 rows of K*H = 12,288 in bf16.
PROBED_BYTES = 64 << 20
# In bf16, norms and products of the same formula differ by 0.4 % (vLLM rounds a normed value twice, we once).
MAX_DIFFERENCE = 0.05


def probe(projection: EngineProjection, width: int, like: Tensor, rows: int, engine: Call | None = None) -> None:
    """Run the projection of [N, width] as the engine will call it; raise ProbeError where that fails.

    Every N is run, up to `rows` on a GPU: this compiles all kernels. A first request would be too late, and in the
    capture of a CUDA graph an uncompiled kernel raises. On CPU, where nothing is compiled, N goes up to 4.

    Args:
        like: a tensor with the dtype and device of the engine's hidden states.
        engine: the engine's own stage, whose result has to agree with ours.
    """
    check_backend(projection.op, like.device, projection.num_chunks or 1)
    try:
        run_probe(projection, rows_to_probe(rows, width, like), engine)
    except ProbeError:
        raise
    except Exception as failure:  # of a kernel, a compiler, or the engine's own module
        raise ProbeError(f"{projection.op} does not run here: {failure}") from failure


def rows_to_probe(rows: int, width: int, like: Tensor) -> Tensor:
    """[N, width] of normal values; N is the engine's `rows` on a GPU and up to 4 on CPU, of PROBED_BYTES at most."""
    most = min(PROBED_BYTES // (width * like.element_size()), rows if _on_gpu(like.device) else 4)
    return normal_rows(max(1, min(rows, most)), width, like)


def check_backend(op: str, device: torch.device, num_chunks: int = 1) -> None:
    """Raise ProbeError where no kernel of ours serves the device: the reference is three times as slow as an engine."""
    try:
        backend, reason = plan.choose_backend(op, device, num_chunks)
    except (RuntimeError, ValueError) as failure:
        raise ProbeError(str(failure).removeprefix("eagle_kernels: ")) from failure
    if backend == "reference":
        install = "" if library.unsupported_reason is None else f"; {_INSTALL}"
        raise ProbeError(f"there are no kernels of ours for it, {reason}{install}")


_INSTALL = "`pip install --no-deps .` in a checkout of eagle-kernels builds and installs them"


@torch.inference_mode()
def run_probe(projection: EngineProjection, packed: Tensor, engine: Call | None) -> None:
    num_chunks = projection.num_chunks or 1
    projection.use_huge_pages()
    # The same memory as K contiguous chunks, as captured layers are.
    chunks = list(packed.view(num_chunks, packed.shape[0], -1))
    got = projection.forward(packed)
    warm_up(projection.op, projection.forward, (packed,), {})
    warm_up(projection.op, projection.forward, (chunks,), {"out": torch.empty_like(got)})
    if engine is None:
        return
    expected = engine(packed)
    difference = relative_difference(got, expected)
    if not difference <= MAX_DIFFERENCE:  # also where ours is NaN
        raise ProbeError(f"{projection.op} gives other values than the engine: {difference:.2g} of their size apart")


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of `expected`; 0 where the latter is 0 or not finite, as it may be with weights
    that were never loaded."""
    if got.shape != expected.shape:
        return float("inf")
    size = expected.float().norm().item()
    if size == 0 or not math.isfinite(size):
        return 0.0
    return (got.float() - expected.float()).norm().item() / size


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
