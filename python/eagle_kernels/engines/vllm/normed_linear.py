"""Two norms, a cat and a linear layer of vLLM, or one norm and the layer, as one op inside of vLLM's own forward, eager
or compiled.

The norms hand their input through, and the linear layer norms both halves of what it is given: cat + one op for 2
norms + cat + GEMM. The parameters stay where they are, so loading and updating weights see no difference. The op is one
of torch.library's with a fake kernel and returns a new tensor: vLLM's graphs trace it as they trace their own.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checks import DTYPES
from ...environment import EngineSwitches
from ...plan import cpu_isa
from .. import decision, held_codes
from ..decision import Call, Decision
from ..eligibility import linear_unsupported_reason, log_once
from ..held_codes import HeldCodes
from ..projection import EngineProjection, ProbeError, check_backend, parameter_of, probe
from . import LOGGER, cpu_packing, replicas
from .combine import QUANTIZED, rms_norm_unsupported_reason
from .registry import Config, leaving_to_vllm
from .timing import agreed_seconds

fused: set[str] = set()  # the layers that run on the op; part of the key of vLLM's compile caches

_Base: Any = object  # vLLM's modules, which have no types here


class PassThrough(_Base):
    """Mixed in before a norm whose work the linear layer does."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def engines_own(self, x: Tensor) -> Tensor:
        return super().forward(x)


class NormedLinear(_Base):
    """Mixed in before a linear layer: y = [norm(x[:, :H]), norm'(x[:, H:])] @ weight^T + bias; of one norm, norm(x)."""

    projection: EngineProjection
    eagle_kernels_name: str

    def forward(self, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return self._as_vllm_returns_it(self.projection(x))
        try:
            return self._as_vllm_returns_it(self.projection(x))
        except Exception as failure:
            log_once(
                LOGGER,
                logging.WARNING,
                f"{self.eagle_kernels_name} stays with vLLM, norm_concat_linear failed: {failure!r}",
            )
            norms = self.projection.chunk_norms
            parts = zip(norms, x.chunk(len(norms), -1), strict=True)
            return super().forward(torch.cat([norm.engines_own(part) for norm, part in parts], -1))

    def _as_vllm_returns_it(self, y: Tensor) -> Any:
        # Its own linear layers return a bias that was not added beside the result; nn.Linear does not.
        return (y, None) if getattr(self, "return_bias", False) else y


def put_in(name: str, projection: EngineProjection) -> None:
    """Have norms and a linear layer run as `projection`, whose modules they are."""
    linear = projection.fc.linear if isinstance(projection.fc, HeldCodes) else projection.fc
    for norm in projection.chunk_norms:
        norm.__class__ = type(type(norm).__name__, (PassThrough, type(norm)), {})
    linear.__class__ = type(type(linear).__name__, (NormedLinear, type(linear)), {})
    linear.projection, linear.eagle_kernels_name = projection, name.rpartition(".")[2]
    fused.add(name)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A stage that may run on the op.

    projection: of its norms and a linear layer.  product: vLLM's own call of the linear layer.
    """

    name: str
    projection: EngineProjection
    product: Call
    max_rows: int
    compiled: bool
    switches: EngineSwitches

    def engine(self, x: Tensor) -> Tensor:
        """vLLM's own stage on [N, K*H]."""
        normed = [norm(part) for norm, part in zip(self.norms, x.chunk(len(self.norms), -1), strict=True)]
        return self.product(normed[0] if len(normed) == 1 else torch.cat(normed, -1))

    @property
    def norms(self) -> Sequence[Any]:
        return self.projection.chunk_norms

    def calls(self) -> list[Call]:
        """What is timed: vLLM's stage and ours, as vLLM calls them."""
        # Inductor's norms are one kernel with the cat. Timed as if they took nothing: it compiles for some seconds.
        theirs = self.product if self.compiled else self.engine
        if len(self.norms) == 1:
            return [theirs, self.projection]
        return [theirs, lambda x: self.projection(torch.cat(x.chunk(2, -1), -1))]


def plan(candidate: Candidate) -> EngineProjection | None:
    """What `put_in` takes, row-parallel where that is on; None where vLLM's own modules stay. Either way one line says
    so."""
    name = candidate.name
    projection, decided = decide(candidate)
    figures = decided.figures("vLLM")
    # A graph is traced once for all row counts: it has the op, or it has not.
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
    if "row_parallel" in candidate.switches.parts:
        split = replicas.split(name, projection, weight, max_rows, engine)
        if split is not None:
            return split
    if candidate.switches.force:
        probe(projection, width, weight, max_rows, engine)
        return projection, decision.FORCED
    if weight.device.type != "cpu":
        shipped = decision.on_gpu(weight.device, width, columns, weight.dtype, codes)
        if not shipped.never:
            probe(projection, width, weight, max_rows, engine)
        return projection, shipped
    check_backend(projection.op, weight.device)
    rows = decision.rows_up_to(max_rows)

    def measure() -> list[list[float]]:
        probe(projection, width, weight, max_rows, engine)
        return decision.seconds_per_call(candidate.calls(), rows, width, weight)

    key = (name, width, columns, weight.dtype, codes, candidate.compiled, rows, torch.get_num_threads(), cpu_isa())
    seconds: Any = decision.once(key, lambda: agreed_seconds(measure, 2, len(rows)))
    theirs, ours = map(tuple, seconds)
    return projection, Decision(rows, theirs, ours)


@dataclass(frozen=True, eq=False)
class Stage:
    """Two norms, a cat and a linear layer of a model that is being loaded, or one norm and the layer.

    norms: in the order of the cat.  column_shard: whether the layer's weight may be this rank's rows alone.
    offsets: the classes of norm that may stand there -> what is added to their weights.
    """

    name: str
    norms: Sequence[Any]
    linear: Any
    offsets: Mapping[type, float]
    config: Config
    switches: EngineSwitches
    column_shard: bool = False

    def keep_dense_on_cpu(self) -> None:
        """Have vLLM leave the weight as it is until `fuse`, where the op may read it."""
        from vllm.platforms import current_platform

        linear = self.linear
        # Packing changes a bias in place, so that the two layouts could not stand side by side.
        if (
            not hasattr(linear, "quant_method")
            or not current_platform.is_cpu()
            or getattr(linear, "bias", None) is not None
        ):
            return
        if linear.weight.dtype in DTYPES and self.unsupported_reason() is None:
            try:
                check_backend("norm_concat_linear", torch.device("cpu"), len(self.norms))
            except ProbeError:  # raised again where the stage is planned, which logs it
                return
            cpu_packing.keep_dense(linear)

    def fuse(self) -> bool:
        """Have it run on the op where that is faster, and pack the weight as vLLM would have where it is not."""
        planned = None
        with leaving_to_vllm(self.name):
            planned = self._planned()
            if planned is not None:
                put_in(self.name, planned)
        if planned is None and cpu_packing.is_kept_dense(self.linear):
            cpu_packing.pack(self.linear)
        return planned is not None

    def _planned(self) -> EngineProjection | None:
        linear = self.linear
        unsupported = self.unsupported_reason()
        if unsupported is not None:
            log_once(LOGGER, logging.INFO, f"{self.name} stays with vLLM: {unsupported}")
            return None
        offset, codes = self.offsets[type(self.norms[0])], held_codes.read(linear, QUANTIZED)
        projection = EngineProjection(codes or linear, len(self.norms), chunk_norms=self.norms, norm_offset=offset)
        dense = None
        if cpu_packing.is_kept_dense(linear) and not self.switches.force:
            kept = cpu_packing.pack(linear)
            # Where vLLM has no layout of its own, it multiplies the dense weight, and both may read it.
            dense = kept if linear.weight.numel() == 0 else None
        timed = projection if dense is None else replace(projection, fc=dense)

        def product(x: Tensor) -> Tensor:
            y = linear(x)
            return y[0] if isinstance(y, tuple) else y

        planned = plan(Candidate(self.name, timed, product, self.config.max_rows, self.config.compiled, self.switches))
        if planned is None:
            return None
        if dense is None:
            return planned
        cpu_packing.unpack(linear, dense)
        return projection

    def unsupported_reason(self) -> str | None:
        """Why the op cannot run it; reads no data."""
        import vllm.envs
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        if vllm.envs.VLLM_BATCH_INVARIANT:
            return "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels"
        unsupported, linear = None, self.linear
        if held_codes.read(linear, QUANTIZED) is None:
            shard = self.column_shard
            unsupported = linear_unsupported_reason(linear, {UnquantizedLinearMethod}, bias=True, column_shard=shard)
        dtype = getattr(linear, "params_dtype", None) or linear.weight.dtype
        for norm in self.norms:
            unsupported = unsupported or rms_norm_unsupported_reason(norm, set(self.offsets), dtype)
        if unsupported is None and len(set(map(type, self.norms))) > 1:
            unsupported = "its norms are of two kinds"
        return unsupported
