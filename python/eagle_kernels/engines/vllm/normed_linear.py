"""Two norms, a cat and a linear layer of vLLM, or one norm and the layer, as one op inside of vLLM's own forward, eager
or compiled.

The norms return their input as it is, and the linear layer norms both halves of its input: cat + one op instead of 2
norms + cat + GEMM. Where vLLM's forward calls one kernel for norms and cat in place of the norms, the linear layer gets
that kernel's inputs (`FusedNorms`). The parameters stay where they are, so weights are loaded and updated as before.
The op is registered in torch.library with a fake kernel and returns a new tensor, so vLLM's graphs trace it like
vLLM's own.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import DTYPES
from ...warmup import warm_up
from .. import decision
from ..decision import Call, Decision
from ..eligibility import linear_unsupported_reason, log_once, norm_unsupported_reason
from ..engine_codes import EngineCodes
from ..projection import EngineProjection, ProbeError, check_backend, parameter_of, probe, rows_to_probe
from . import LOGGER, cpu_packing, registry, tensor_parallel
from .combine import read_codes
from .registry import Config, batch_invariant_reason, is_on, leaving_to_vllm

# The layers that run on the op in a graph of vLLM's; part of the key of its compile caches.
fused: set[str] = set()

_Base: Any = object  # vLLM's modules, which have no types here


class PassThrough(_Base):
    """Mixed in before a norm whose work the linear layer does."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def engines_own(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Unnormed(NamedTuple):
    """What a kernel of vLLM's would have normed, for the projection behind it.

    chunks, indices: as `EngineProjection.forward` takes them.  own: vLLM's kernel on them; None where norms do it.
    """

    chunks: list[Tensor]
    indices: list[Tensor | None] | None
    own: Callable[[], Tensor] | None


class NormedLinear(_Base):
    """Mixed in before a linear layer: y = [norm(x[:, :H]), norm'(x[:, H:])] @ weight^T + bias; of one norm, norm(x)."""

    projection: EngineProjection
    eagle_kernels_name: str
    aside: Unnormed | None = None  # replaces the next input
    gave_up = False  # since a call of the op failed

    def forward(self, x: Tensor | Unnormed) -> Any:
        if torch.compiler.is_compiling():
            return self._as_vllm_returns_it(self._projected(x))
        x, self.aside = self.aside or x, None
        if not self.gave_up:
            try:
                return self._as_vllm_returns_it(self._projected(x))
            except Exception as failure:
                self.gave_up = True
                message = f"{self.eagle_kernels_name} stays with vLLM, norm_concat_linear failed: {failure!r}"
                log_once(LOGGER, logging.WARNING, message)
        return super().forward(self._engines_own_normed(x))

    def _projected(self, x: Tensor | Unnormed) -> Tensor:
        if isinstance(x, Unnormed):
            return self.projection(x.chunks, indices=x.indices)
        # V4's streams are [N, S, H].
        return self.projection(x) if x.dim() == 2 else self.projection(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _engines_own_normed(self, x: Tensor | Unnormed) -> Tensor:
        if isinstance(x, Unnormed) and x.own is not None:
            return x.own()
        norms = self.projection.chunk_norms
        parts = x.chunks if isinstance(x, Unnormed) else x.chunk(len(norms), -1)
        own = [getattr(norm, "engines_own", norm) for norm in norms]
        return torch.cat([norm(part) for norm, part in zip(own, parts, strict=True)], -1)

    def _as_vllm_returns_it(self, y: Tensor) -> Any:
        # vLLM's linear layers return a bias that was not added beside the result; nn.Linear does not.
        return (y, None) if getattr(self, "return_bias", False) else y


@dataclass(frozen=True, eq=False)
class FusedNorms:
    """A layer whose norms and cat are one kernel of vLLM's (`fused_norms`).

    members: those of a subclass of the layer, which gives the kernel's inputs to the projections.
    own: the kernel on [N, K*H] with these norms, no row at position 0; None where calling the norms gives the same.
    gathered: the chunk whose rows come by an index.  passes_through: whether vLLM calls the norms, which then return
        their input.
    unsupported: why the projection cannot get the kernel's inputs.
    shards_rows: whether each rank's projection gets some of the rows, so that a sum over ranks would be wrong.
    """

    layer: Any
    members: Mapping[str, Any]
    own: Callable[..., Tensor] | None = None
    gathered: int | None = None
    passes_through: bool = False
    unsupported: str | None = None
    shards_rows: bool = False

    def put_in(self) -> None:
        self.layer.__class__ = type(type(self.layer).__name__, (type(self.layer),), dict(self.members))


def put_in(name: str, projection: EngineProjection, *, passes_through: bool = True) -> None:
    """Have norms and a linear layer run as `projection`, whose modules they are.

    passes_through: whether vLLM's forward calls the norms.
    """
    linear = projection.fc.linear if isinstance(projection.fc, EngineCodes) else projection.fc
    for norm in projection.chunk_norms if passes_through else ():
        norm.__class__ = type(type(norm).__name__, (PassThrough, type(norm)), {})
    linear.__class__ = type(type(linear).__name__, (NormedLinear, type(linear)), {})
    linear.projection, linear.eagle_kernels_name = projection, name.rpartition(".")[2]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A stage that may run on the op.

    projection: of its norms and a linear layer.  product: vLLM's own call of the linear layer.
    replicated: whether each rank has all of the weight and of x, so that ranks may share the work.
    """

    name: str
    projection: EngineProjection
    product: Call
    max_rows: int
    compiled: bool
    replicated: bool

    def engine(self, x: Tensor) -> Tensor:
        """vLLM's own stage on [N, K*H]."""
        normed = [norm(part) for norm, part in zip(self.norms, x.chunk(len(self.norms), -1), strict=True)]
        return self.product(normed[0] if len(normed) == 1 else torch.cat(normed, -1))

    @property
    def norms(self) -> Sequence[Any]:
        return self.projection.chunk_norms

    def calls(self) -> list[Call]:
        """What is timed: vLLM's stage and ours, as vLLM calls them."""
        # Inductor makes norms and cat one kernel. They are timed as taking nothing: compiling would take some seconds.
        theirs = self.product if self.compiled else self.engine
        if len(self.norms) == 1:
            return [theirs, self.projection]
        return [theirs, lambda x: self.projection(torch.cat(x.chunk(2, -1), -1))]


@dataclass(frozen=True, eq=False)
class _OfFusedNorms(Candidate):
    """A stage whose norms and cat are one kernel of vLLM's."""

    own: Callable[..., Tensor]

    def engine(self, x: Tensor) -> Tensor:
        return self.product(self.own(x, *self.norms))

    def calls(self) -> list[Call]:
        return [self.engine, lambda x: self.projection(x.chunk(2, -1))]


def plan(candidate: Candidate) -> EngineProjection | None:
    """What `put_in` takes, row-parallel where that is on; None where vLLM's own modules stay. Either way one line says
    so."""
    name = candidate.name
    projection, decided = decide(candidate)
    figures = decided.figures("vLLM")
    # A graph is traced once for all row counts: it has the op at all of them or at none.
    if not decided.always:
        because = f"norm_concat_linear is not faster at all row counts, {figures}" if decided.rows else figures
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {because}")
        return None
    log_once(LOGGER, logging.INFO, f"{name} runs norm_concat_linear; {figures}")
    return projection


def decide(candidate: Candidate) -> tuple[EngineProjection, Decision]:
    """The projection, row-parallel where that is on, and the row counts at which it is faster than vLLM's own stage."""
    name, projection, max_rows = candidate.name, candidate.projection, candidate.max_rows
    columns, width = parameter_of(projection.fc).shape
    weight, codes, engine = projection.like, projection.codes, candidate.engine
    if candidate.replicated and is_on("row_parallel"):
        split = tensor_parallel.split(name, projection, weight, max_rows, engine)
        if split is not None:
            return split
    check = functools.partial(probe, projection, width, weight, max_rows, engine)
    if registry.switches.force:
        check()
        return projection, decision.FORCED
    check_backend(projection.op, weight.device)
    projection.use_huge_pages()
    rows = decision.rows_up_to(max_rows)
    key, agree = (name, columns, codes, candidate.compiled), tensor_parallel.agreed_seconds
    theirs, ours = decision.timed(key, candidate.calls(), rows, width, weight, check, agree)
    return projection, Decision(rows, theirs, ours)


@dataclass(frozen=True, eq=False)
class Stage:
    """Two norms, a cat and a linear layer of a model that is being loaded, or one norm and the layer.

    norms: in the order of the cat.  column_shard: whether the layer's weight may be this rank's rows alone.
    offsets: each class that the norms may have -> what it adds to its weight.
    fused_norms: set where vLLM's forward calls a kernel in place of the norms; put in by `fuse`.
    """

    name: str
    norms: Sequence[Any]
    linear: Any
    offsets: Mapping[type, float]
    config: Config
    column_shard: bool = False
    fused_norms: FusedNorms | None = None

    def keep_dense_on_cpu(self) -> None:
        """Have vLLM leave the weight as it is until `fuse`, where the op may read it."""
        from vllm.platforms import current_platform

        linear = self.linear
        weight = getattr(linear, "weight", None)  # quantized layers may have none of that name
        # Packing changes a bias in place, so the two layouts could not exist side by side.
        if (
            not hasattr(linear, "quant_method")
            or not current_platform.is_cpu()
            or getattr(linear, "bias", None) is not None
        ):
            return
        if weight is not None and weight.dtype in DTYPES and self.unsupported_reason() is None:
            try:
                check_backend("norm_concat_linear", torch.device("cpu"), len(self.norms))
            except ProbeError:  # raised again where the stage is planned, which logs it
                return
            cpu_packing.keep_dense(linear)

    def planned(self) -> EngineProjection | None:
        """What `put_in` takes, where the op is faster."""
        linear = self.linear
        unsupported = self.unsupported_reason()
        if unsupported is not None:
            log_once(LOGGER, logging.INFO, f"{self.name} stays with vLLM: {unsupported}")
            return None
        offset, codes = self.offsets[type(self.norms[0])], read_codes(linear, column_shard=self.column_shard)
        projection = EngineProjection(codes or linear, len(self.norms), chunk_norms=self.norms, norm_offset=offset)
        dense = None
        if cpu_packing.is_kept_dense(linear) and not registry.switches.force:
            kept = cpu_packing.pack(linear)
            # Where vLLM has no layout of its own, it multiplies the dense weight, and both can read it.
            dense = kept if linear.weight.numel() == 0 else None
        timed = projection if dense is None else replace(projection, fc=dense)

        def product(x: Tensor) -> Tensor:
            y = linear(x)
            return y[0] if isinstance(y, tuple) else y

        config, fused_norms = self.config, self.fused_norms
        # A sum over ranks must not mix the rows of a rank's own heads, nor rows of x that another rank does not have.
        replicated = not self.column_shard and (fused_norms is None or not fused_norms.shards_rows)
        record = (self.name, timed, product, config.max_rows, config.compiled, replicated)
        kernel = None if fused_norms is None else fused_norms.own
        planned = plan(Candidate(*record) if kernel is None else _OfFusedNorms(*record, kernel))
        if planned is None:
            return None
        if fused_norms is not None and fused_norms.gathered is not None:
            _probe_gathered(planned, fused_norms.gathered, config.max_rows)
        if dense is None:
            return planned
        cpu_packing.unpack(linear, dense)
        return projection

    def unsupported_reason(self) -> str | None:
        """Why the op cannot run it; reads no data."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        if (unsupported := batch_invariant_reason()) is not None:
            return unsupported
        unsupported, linear = None if self.fused_norms is None else self.fused_norms.unsupported, self.linear
        shard = self.column_shard
        if unsupported is None and read_codes(linear, column_shard=shard) is None:
            unsupported = linear_unsupported_reason(linear, {UnquantizedLinearMethod}, bias=True, column_shard=shard)
        dtype = getattr(linear, "params_dtype", None) or linear.weight.dtype
        for norm in self.norms:
            unsupported = unsupported or norm_unsupported_reason(norm, set(self.offsets), dtype)
        if unsupported is None and len(set(map(type, self.norms))) > 1:
            unsupported = "its norms are of two kinds"
        return unsupported


@torch.inference_mode()
def _probe_gathered(projection: EngineProjection, gathered: int, rows: int) -> None:
    """Run the projection with one chunk's rows gathered, for each dtype of token ids; `probe` runs it without."""
    packed = rows_to_probe(rows, parameter_of(projection.fc).shape[1], projection.like)
    chunks = list(packed.view(2, len(packed), -1))
    for dtype in (torch.int32, torch.int64):
        indices: list[Tensor | None] = [None, None]
        indices[gathered] = torch.arange(len(packed), dtype=dtype, device=packed.device)
        warm_up(projection.op, projection.forward, (chunks,), {"indices": indices})


def fuse(stages: Sequence[Stage]) -> bool:
    """Have the stages of a layer run on the op where that is faster for all of them, and pack their weights as vLLM
    would have where it is not."""
    fused_norms = stages[0].fused_norms
    with leaving_to_vllm(stages[0].name):
        planned = [projection for stage in stages if (projection := stage.planned()) is not None]
        if len(planned) == len(stages):
            for stage, projection in zip(stages, planned, strict=True):
                put_in(stage.name, projection, passes_through=fused_norms is None or fused_norms.passes_through)
                if stage.config.compiled:  # other layers change no graph, and the target's has the same key
                    fused.add(stage.name)
            if fused_norms is not None:
                fused_norms.put_in()
            return True
    for stage in stages:
        if cpu_packing.is_kept_dense(stage.linear):
            cpu_packing.pack(stage.linear)
    return False
