"""Two norms, a cat and a linear layer of vLLM as one op inside of vLLM's own forward, eager or compiled.

The norms hand their input through, and the linear layer norms both halves of what it is given: cat + one op for 2
norms + cat + GEMM. The parameters stay where they are, so loading and updating weights see no difference. The op is one
of torch.library's with a fake kernel and returns a new tensor: vLLM's graphs trace it as they trace their own.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...environment import EngineSwitches
from ...plan import cpu_isa
from .. import decision
from ..decision import Call, Decision
from ..eligibility import log_once
from ..held_codes import HeldCodes
from ..projection import EngineProjection, check_backend, parameter_of, probe
from . import LOGGER, replicas
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
    """Mixed in before a linear layer: y = [norm(x[:, :H]), norm'(x[:, H:])] @ weight^T + bias."""

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
            halves = zip(self.projection.chunk_norms, x.chunk(2, -1), strict=True)
            return super().forward(torch.cat([norm.engines_own(half) for norm, half in halves], -1))

    def _as_vllm_returns_it(self, y: Tensor) -> Any:
        # Its own linear layers return a bias that was not added beside the result; nn.Linear does not.
        return (y, None) if getattr(self, "return_bias", False) else y


def put_in(name: str, projection: EngineProjection) -> None:
    """Have two norms and a linear layer run as `projection`, whose modules they are."""
    linear = projection.fc.linear if isinstance(projection.fc, HeldCodes) else projection.fc
    for norm in projection.chunk_norms:
        norm.__class__ = type(type(norm).__name__, (PassThrough, type(norm)), {})
    linear.__class__ = type(type(linear).__name__, (NormedLinear, type(linear)), {})
    linear.projection, linear.eagle_kernels_name = projection, name.rpartition(".")[2]
    fused.add(name)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A stage that may run on the op.

    projection: of two norms and a linear layer.  product: vLLM's own call of the linear layer.
    """

    name: str
    projection: EngineProjection
    product: Call
    max_rows: int
    compiled: bool
    switches: EngineSwitches

    def engine(self, x: Tensor) -> Tensor:
        """vLLM's own stage on [N, 2*H]."""
        halves = zip(self.projection.chunk_norms, x.chunk(2, -1), strict=True)
        return self.product(torch.cat([norm(half) for norm, half in halves], -1))

    def calls(self) -> list[Call]:
        """What is timed: vLLM's stage and ours, as vLLM calls them."""
        # Inductor's norms are one kernel with the cat. Timed as if they took nothing: it compiles for some seconds.
        theirs = self.product if self.compiled else self.engine
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
    weight, engine = parameter_of(projection.fc), candidate.engine
    columns, width = weight.shape
    codes = ""
    if isinstance(projection.fc, HeldCodes):
        codes, weight = weight.format, projection.fc.like()
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
