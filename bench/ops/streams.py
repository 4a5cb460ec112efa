"""norm_concat_linear over residual streams, [e_proj | h_proj] of an mHC target's MTP stage, against the engines' two
products and their sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eagle_kernels import MTPStreamsConfig, MTPStreamsProjection
from eagle_kernels.ops.projection import Projection, project_formula
from eagle_kernels.ops.sources import Sources
from eagle_kernels.ops.sources import formula as sources_formula
from eagle_kernels.quantized_linear import QuantizedLinear
from eagle_kernels.quantized_weight import QuantizedWeight

from .. import baselines as engine_chains
from ..measure import Call, Footprint
from ..workloads import Row
from .norm_concat_linear import MAX_LAYERS, NormConcatLinear


class StreamsProjection(NormConcatLinear):
    """Every copy has its own weight, whole and in its two halves. The flops are the engines': each embedding is
    multiplied once."""

    forms = ("op", "layer", "dense")
    baselines = ("eager", "compile", "dequantize")
    chain = staticmethod(engine_chains.streams_projection)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.out_rows = row.T * row.stage.streams
        self.source_rows = [row.T, self.out_rows]

    def footprint(self, names: Sequence[str]) -> Footprint:
        of_product = super().footprint(names)
        return Footprint(of_product.touched, of_product.resident + self.weight_bytes, of_product.fixed)

    def allocate(self, copies: int) -> None:
        super().allocate(copies)
        row, stage = self.row, self.row.stage
        halves = [[half.contiguous() for half in weight.split(stage.H, 1)] for weight in self.weights]
        _, gains, *_ = self.chain_arguments[0]
        pairs = zip(self.chunks, halves, strict=True)
        self.chain_arguments = [(*chunks, gains, weights, stage.eps) for chunks, weights in pairs]
        of_embedding = torch.arange(self.out_rows, device=row.device) // stage.streams
        self.options["indices"] = [of_embedding, None]
        normed = {"norm": "none", "norm_weight": None} if self._over_row else {}  # the layer calls norm_concat before
        self.op_arguments = [(sources, options | self.options | normed) for sources, options in self.op_arguments]

    def _gains(self) -> list[Tensor]:
        stage = self.row.stage
        return [self.random_gain(stage.H), self.random_gain(stage.H * (stage.streams if self._over_row else 1))]

    @property
    def _over_row(self) -> bool:
        return self.row.stage.hnorm_over == "row"

    def _call(self, name: str) -> tuple[Call, int]:
        if name != "layer":
            return super()._call(name)
        layers = [self._module(weight) for weight in (self.quantized or self.weights)[:MAX_LAYERS]]

        def call(copy: int) -> Tensor:
            embedding, streams = self.chunks[copy]
            out = self.outs[copy]
            layers[copy](streams.view(embedding.shape[0], -1), embeds=embedding, out=out.view(embedding.shape[0], -1))
            return out

        return call, len(layers)

    def unsupported_reason(self, name: str) -> str | None:
        form = name.partition(":")[0]
        if form not in (*self.forms, *self.baselines):
            return f"a stage of streams has no {form}"
        if form in ("op", "dense", "dequantize") and self._over_row:
            return "no call of the op has a norm over all streams: the layer calls norm_concat before it"
        if form == "layer":  # of many rows it makes two products, the op one
            return None
        return super().unsupported_reason(name)

    def _module(self, weight: Tensor | QuantizedWeight) -> MTPStreamsProjection:
        row, stage = self.row, self.row.stage
        config = MTPStreamsConfig(
            hidden_size=stage.H,
            out_features=stage.D,
            enorm_eps=stage.eps,
            hnorm_eps=stage.eps,
            norm_offset=stage.norm_offset,
            num_streams=stage.streams,
            hnorm_over=stage.hnorm_over,
        )
        layer = MTPStreamsProjection(config, max_tokens=row.T, dtype=row.dtype, device="meta")
        if isinstance(weight, QuantizedWeight):
            layer.eh_proj = QuantizedLinear(weight)
        else:
            layer.eh_proj.weight = nn.Parameter(weight, requires_grad=False)
        for norm, gain in zip((layer.enorm, layer.hnorm), self._stored_gains(), strict=True):
            norm.weight = nn.Parameter(gain, requires_grad=False)
        return layer

    def _stored_gains(self) -> list[Tensor]:
        """As the checkpoint has them, without the offset."""
        return self.options["norm_weight"]

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        stage = self.row.stage
        embedding, streams = self.chunks[copy]
        first, second = self._stored_gains()
        e = self._normed(embedding, first)[rows // stage.streams]
        h = self._normed(streams.view(-1, second.numel()), second).view(-1, stage.H)[rows]
        weight = self.quantized[copy].dequantize(torch.float64) if self.quantized else self.weights[copy]
        return [project_formula(torch.cat((e, h), -1), Projection(weight, None, None, stage.eps), 0.0)]

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        options = {"norm_weight": [gain], "eps": self.row.stage.eps, "norm_offset": self.row.stage.norm_offset}
        return sources_formula(Sources.of_call("norm_concat", [x], options), torch.float64)
