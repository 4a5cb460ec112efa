"""norm_concat against the engines' chain of norms and cat."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels
from eagle_kernels.model_shapes import InputStage
from eagle_kernels.ops.sources import Sources
from eagle_kernels.ops.sources import formula as sources_formula

from .. import baselines as engine_chains
from ..baselines import SLICES, NormScratch, slices_unsupported_reason
from ..measure import Call, Footprint, Traffic
from ..workloads import Workload
from .draw import Draw, RandomCall
from .host_call import H, HostCall, K
from .sources import make_sources, one_output


class NormConcat(Workload):
    """Every copy has its own chunks and out."""

    sizes = ("K", "H")
    baselines = ("eager", "eager-out", "compile", *SLICES)
    chain = staticmethod(engine_chains.normed_concat)

    @staticmethod
    def no_stage_reason(stage: InputStage) -> str | None:
        return "each residual stream is projected by itself" if stage.projects_streams else None

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched, scratch = self.traffic().total, NormScratch.num_bytes(self.row.T, self._normed_width())
        return Footprint(touched, touched, scratch if "eager-out" in names else 0)

    def traffic(self) -> Traffic:
        concat = self.row.T * self.row.width * self.item
        return Traffic(concat, concat)

    def _normed_width(self) -> int:
        return {"chunk": self.row.stage.H, "concat": self.row.width, "none": 0}[self.row.norm]

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        by_chunk = [self.random(copies, row.T, stage.H, scale=3.0**k) for k in range(stage.K)]
        self.chunks = list(zip(*by_chunk, strict=True))
        self.outs = self.poisoned(copies, row.T, row.width).unbind()
        widths = {"chunk": [stage.H] * stage.K, "concat": [row.width], "none": []}[row.norm]
        gains = [self.random_gain(width) for width in widths]
        stored = [gain - stage.norm_offset for gain in gains]
        self.options: dict[str, Any] = {
            "norm": row.norm,
            "norm_weight": stored[0] if row.norm == "concat" else stored or None,
            "eps": stage.eps,
            "norm_offset": stage.norm_offset,
        }
        pairs = zip(self.chunks, self.outs, strict=True)
        self.chain_arguments = [(chunks, gains, row.norm, stage.eps, out) for chunks, out in pairs]
        pairs = zip(self.chunks, self.outs, strict=True)
        self.op_arguments = [((chunks,), {**self.options, "out": out}) for chunks, out in pairs]

    def _preallocated(self) -> Call:
        scratch = NormScratch(self.row.T, self._normed_width(), device=self.row.device)
        _, gains, norm, eps, _ = self.chain_arguments[0]
        wide = [gain.float() for gain in gains]
        return lambda copy: engine_chains.preallocated_normed_concat(
            self.chunks[copy], wide, norm, eps, self.outs[copy], scratch
        )

    def _call(self, name: str) -> tuple[Call, int]:
        if name not in SLICES:
            return super()._call(name)
        kernel = engine_chains.norm_kernel(name)

        def call(copy: int) -> Tensor:
            chunks, gains, _, eps, out = self.chain_arguments[copy]
            return engine_chains.normed_slices(kernel, chunks, gains, eps, out)

        return call, len(self.outs)

    def unsupported_reason(self, name: str) -> str | None:
        if name in SLICES:
            return slices_unsupported_reason(name, self.row.norm, self.row.device)
        return super().unsupported_reason(name)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        chunks = [chunk[rows] for chunk in self.chunks[copy]]
        sources = Sources.of_call(self.row.op, chunks, self.options)
        return [sources_formula(sources, torch.float64)]


WORKLOAD = NormConcat


def random_call(draw: Draw) -> RandomCall:
    arguments, options = make_sources(draw)
    sources = Sources.of_call("norm_concat", *arguments, options)
    matrices = sources.as_matrices()
    truth = sources_formula(matrices, torch.float64)
    eager = sources_formula(matrices).to(sources.chunks[0].dtype)
    return one_output(draw, arguments, options, truth, eager, sources)


def host_chain(chunks: Sequence[Tensor], gains: Tensor) -> Tensor:
    return torch.cat([F.rms_norm(chunk, (H,), gains[k], 1e-6) for k, chunk in enumerate(chunks)], -1)


def host_calls() -> dict[str, HostCall]:
    chunks, gains = [torch.randn(1, H) for _ in range(K)], torch.rand(K, H)
    call = HostCall(
        lambda: eagle_kernels.norm_concat(chunks, norm_weight=gains), lambda: host_chain(chunks, gains), goal=0.3
    )
    return {"norm_concat": call}
