"""norm_concat_linear against the engines' chain of norms, cat and product, and against torch.compile."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eagle_kernels
from eagle_kernels import Eagle3Config, Eagle3Projection, library, plan, quantize
from eagle_kernels.ops.projection import Projection, project_formula
from eagle_kernels.ops.sources import Sources
from eagle_kernels.ops.sources import formula as sources_formula
from eagle_kernels.quantized_weight import QuantizedWeight, num_bytes

from .. import baselines as engine_chains
from ..baselines import BASELINES, SLICES, compiled, slices_unsupported_reason
from ..measure import FORMS, Call, Footprint, Traffic
from ..workloads import DENSE, Row, Workload
from .draw import Draw, RandomCall
from .host_call import D, H, HostCall, K
from .norm_concat import host_chain as normed_concat
from .sources import make_sources, one_output

# A module takes 0.4 ms to make, and a full garbage collection visits each: with a 64-wide weight, the 37500 modules
# that exceed a 480 MiB cache took 118 s. With any preset's weight 1024 modules exceed every cache.
MAX_LAYERS = 1024

# Baselines that need a concat of their own for each copy.
_WITH_CONCAT = ("linear", *SLICES)


class NormConcatLinear(Workload):
    """Every copy has its own weight, chunks and out; the gains are shared."""

    sizes = ("S", "K", "H", "D")
    forms: tuple[str, ...] = FORMS
    # Without eager-out: its time would be that of the product.
    baselines: tuple[str, ...] = tuple(name for name in BASELINES if name != "eager-out")
    chain: Callable[..., Any] = staticmethod(engine_chains.projection)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        self.source_rows = [row.T] * row.stage.K
        self.weight_bytes = row.stage.D * row.width * self.item
        self.read_bytes = self.weight_bytes
        if row.weight != DENSE:
            self.read_bytes = num_bytes(row.weight, (row.stage.D, row.width))

    def footprint(self, names: Sequence[str]) -> Footprint:
        # A frozen module has a copy of the weight, a folded and a packed one, `prepacked` oneDNN's layout beside the
        # dense one.
        extra = 3 * ("inductor-max" in names and self.row.device == "cpu") + ("prepacked" in names)
        extra += self.row.weight != DENSE
        concats = sum(name in _WITH_CONCAT for name in names) * self.row.T * self.row.width * self.item
        in_float64 = self.weight_bytes // self.item * 8
        touched = self.traffic().total
        return Footprint(touched, touched + extra * self.weight_bytes + concats, in_float64)

    def traffic(self) -> Traffic:
        sources = sum(self.source_rows) * self.row.stage.H * self.item
        return Traffic(self.read_bytes + sources, self.out_rows * self.row.stage.D * self.item)

    def flops(self) -> int:
        return 2 * sum(self.source_rows) * self.row.stage.H * self.row.stage.D

    def allocate(self, copies: int) -> None:
        row, stage = self.row, self.row.stage
        self.weights = self.random(copies, stage.D, row.width, scale=row.width**-0.5).unbind()
        self.quantized = [] if row.weight == DENSE else [quantize(weight, row.weight) for weight in self.weights]
        for weight, codes in zip(self.weights, self.quantized, strict=False):
            weight.copy_(codes.dequantize(row.dtype))  # the numbers of an engine that dequantizes at load
        by_chunk = [self.random(copies, T, stage.H, scale=3.0**k) for k, T in enumerate(self.source_rows)]
        self.chunks = list(zip(*by_chunk, strict=True))
        self.outs = self.poisoned(copies, self.out_rows, stage.D).unbind()
        gains = self._gains()
        # What the checkpoint stores: without the offset, which the op adds in fp32 and a baseline has folded in.
        stored = [gain - stage.norm_offset for gain in gains]
        post_gain = self.random_gain(stage.D) if stage.post_norm else None
        self.options: dict[str, Any] = {
            "norm": row.norm,
            "norm_weight": stored[0] if row.norm == "concat" else stored or None,
            "eps": stage.eps,
            "norm_offset": stage.norm_offset,
            "post_norm_weight": None if post_gain is None else post_gain - stage.norm_offset,
        }
        settings = (row.norm, stage.eps, post_gain)
        pairs = zip(self.chunks, self.weights, strict=True)
        self.chain_arguments = [(chunks, gains, weight, *settings) for chunks, weight in pairs]
        calls = zip(self.chunks, self.quantized or self.weights, self.outs, strict=True)
        self.op_arguments = [((chunks, weight), {**self.options, "out": out}) for chunks, weight, out in calls]

    def _gains(self) -> list[Tensor]:
        if self.row.norm == "none":
            return []
        widths = [self.row.width] if self.row.norm == "concat" else [self.row.stage.H] * self.row.stage.K
        return [self.random_gain(width) for width in widths]

    def _call(self, name: str) -> tuple[Call, int]:
        if name == "dense":
            op, weights, options = eagle_kernels.norm_concat_linear, self.weights, self.options
            return lambda copy: op(self.chunks[copy], weights[copy], **options, out=self.outs[copy]), len(weights)
        if name == "dequantize":
            return self._dequantized_in_the_call(), len(self.weights)
        if name == "two-step":
            return self._in_two_steps(), len(self.weights)
        if name == "int8pack":
            return self._over_codes(self._int8pack_products()), len(self.weights)
        if name == "torchao":
            products = [engine_chains.torchao_linear(weight, self.row.weight) for weight in self.weights]
            return self._over_codes(products), len(products)
        if name in ("layer", "prepacked"):
            layers = [self._layer(weight) for weight in self.weights[:MAX_LAYERS]]
            if name == "prepacked":
                layers = [layer.prepack() for layer in layers]
            return lambda copy: layers[copy](self.chunks[copy], out=self.outs[copy]), len(layers)
        if name in _WITH_CONCAT:
            return self._over_a_concat(name), len(self.weights)
        if name == "inductor-max" and self.row.device == "cuda":
            # Freezing folds constants for the CPU's packed kernels; on a GPU the weights can stay arguments.
            return compiled(self.chain, self.chain_arguments, "max-autotune-no-cudagraphs"), len(self.weights)
        if name == "inductor-max":
            modules = engine_chains.frozen_projections(self.chain_arguments)
            return lambda copy: modules[copy](self.chunks[copy]), len(modules)
        return super()._call(name)

    def _over_a_concat(self, name: str) -> Call:
        """The product over a static buffer of normed rows: filled by K norm kernels in the call, or before it."""
        row = self.row
        concats = self.poisoned(len(self.weights), row.T, row.width).unbind()
        _, gains, _, norm, eps, post_gain = self.chain_arguments[0]
        if name == "linear":
            for chunks, concat in zip(self.chunks, concats, strict=True):
                engine_chains.normed_concat(chunks, gains, norm, eps, out=concat)
            return lambda copy: torch.mm(concats[copy], self.weights[copy].t(), out=self.outs[copy])

        kernel = engine_chains.norm_kernel(name)

        def call(copy: int) -> Tensor:
            normed = engine_chains.normed_slices(kernel, self.chunks[copy], gains, eps, concats[copy])
            return engine_chains.projected(normed, self.weights[copy], eps, post_gain)

        return call

    def _in_two_steps(self) -> Call:
        """Calls the primitive, at every T: for few rows no setting makes a plan choose it."""
        calls = []
        for (chunks, weight), options in self.op_arguments:
            sources = Sources.of_call(self.row.op, chunks, options)
            projection = Projection(weight, None, options["post_norm_weight"], options["eps"])
            calls.append((*sources.for_primitive(), *projection, options["out"]))

        def call(copy: int) -> Tensor:
            library.primitives.norm_concat_linear_two_step_out(*calls[copy])
            return self.outs[copy]

        return call

    def _dequantized_in_the_call(self) -> Call:
        op, options, dtype = eagle_kernels.norm_concat_linear, self.options, self.row.dtype
        return lambda copy: op(self.chunks[copy], self.quantized[copy].dequantize(dtype), **options)

    def _int8pack_products(self) -> list[Callable[[Tensor], Tensor]]:
        def product_of(weight: QuantizedWeight) -> Callable[[Tensor], Tensor]:
            scales = weight.scales.flatten().to(self.row.dtype)
            return lambda normed: torch._weight_int8pack_mm(normed, weight.codes, scales)

        return [product_of(weight) for weight in self.quantized]

    def _over_codes(self, products: Sequence[Callable[[Tensor], Tensor]]) -> Call:
        """The eager norms and cat, then another library's product with codes."""
        _, gains, _, norm, eps, post_gain = self.chain_arguments[0]

        def call(copy: int) -> Tensor:
            product = products[copy](engine_chains.normed_concat(self.chunks[copy], gains, norm, eps))
            return product if post_gain is None else F.rms_norm(product, product.shape[-1:], post_gain, eps)

        return call

    def unsupported_reason(self, name: str) -> str | None:
        form, post_norm = name.partition(":")[0], self.row.stage.post_norm
        is_dense = self.row.weight == DENSE
        if form == "dense" and is_dense:
            return "it is the op itself, where the weight is no code"
        if form in ("layer", "prepacked") and not is_dense:
            return "a quantized weight is timed in the op"
        if form == "dequantize" and is_dense:
            return "the weight is no code"
        if form == "torchao" and (reason := engine_chains.torchao_unsupported_reason(self.row.weight)) is not None:
            return reason
        if form == "int8pack" and (self.row.weight != "int8_row" or self.row.device != "cpu"):
            return "it multiplies --weights int8_row on a CPU"
        if form in ("layer", "prepacked") and (self.row.stage.norm_offset or post_norm or self.row.stage.context):
            return "Eagle3Projection is the block of EAGLE-3: no norm offset, no norm of the result"
        if form == "prepacked" and (self.row.dtype == torch.float32 or self.row.device != "cpu"):
            return "prepack() is for 16-bit weights on the CPU"
        if form == "two-step" and not is_dense:
            return "the weight is codes, and torch's product is one of numbers"
        if form == "two-step" and post_norm and self.row.device == "cpu":
            return "torch's product rounds what the post norm has to see before that"
        if form == "two-step":
            return plan.unsupported_reason(self.row.device, torch.device(self.row.device))
        if form == "linear" and post_norm:
            return "a product alone is not the result where a norm follows it"
        if form in SLICES:
            return slices_unsupported_reason(form, self.row.norm, self.row.device)
        return super().unsupported_reason(name)

    def _layer(self, weight: Tensor) -> Eagle3Projection:
        """The layer over an existing weight."""
        row, stage = self.row, self.row.stage
        config = Eagle3Config(
            num_chunks=stage.K,
            target_hidden_size=stage.H,
            hidden_size=stage.D,
            eps=stage.eps,
            chunk_norm=row.norm == "chunk",
            concat_norm=row.norm == "concat",
        )
        # On meta: initializing a weight that is thrown away takes longer than the row.
        layer = Eagle3Projection(config, dtype=row.dtype, device="meta")
        layer.fc.weight = nn.Parameter(weight, requires_grad=False)
        norms: Any = {"chunk": layer.fc_norm, "concat": [layer.input_norm], "none": []}[row.norm]
        _, gains, *_ = self.chain_arguments[0]
        for norm, gain in zip(norms, gains, strict=True):
            norm.weight = nn.Parameter(gain, requires_grad=False)
        return layer

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        options = dict(self.options)
        post_gain = options.pop("post_norm_weight")
        chunks = [chunk[rows] for chunk in self.chunks[copy]]
        sources = Sources.of_call(self.row.op, chunks, options)
        normed = sources_formula(sources, torch.float64)
        weight = self.quantized[copy].dequantize(torch.float64) if self.quantized else self.weights[copy]
        projection = Projection(weight, None, post_gain, options["eps"])
        return [project_formula(normed, projection, options["norm_offset"])]


WORKLOAD = NormConcatLinear


def random_call(draw: Draw) -> RandomCall:
    arguments, options = make_sources(draw)
    sources = Sources.of_call("norm_concat_linear", *arguments, options)
    dtype, D = sources.chunks[0].dtype, draw.choose("D", 1, 5, 31, 64, 130)
    weight = draw.rows(D, sources.width, torch.float32).clamp(-3, 3) / math.sqrt(sources.width)
    wide = draw.choose("weight_rows_apart", False, True)
    weight = torch.cat([weight, weight], 1).to(dtype)[:, : sources.width] if wide else weight.to(dtype)
    bias = draw.gain(D, dtype=dtype) if draw.choose("bias", False, True) else None
    post_norm = draw.gain(D, dtype=dtype) if draw.choose("post_norm", False, False, True) else None
    eps = options["eps"]
    if post_norm is not None and not isinstance(eps, float):
        options["eps"] = [*eps, 1e-4]
    projection = Projection(weight, bias, post_norm, eps if isinstance(eps, float) else 1e-4)
    matrices = sources.as_matrices()
    truth = project_formula(sources_formula(matrices, torch.float64), projection, sources.norm_offset)
    # The engines' order: x is rounded to the dtype, the product's sums are fp32, the result is rounded.
    rounded = sources_formula(matrices).to(dtype)
    eager = project_formula(rounded.float(), projection, sources.norm_offset).to(dtype)
    options |= {"bias": bias, "post_norm_weight": post_norm}
    return one_output(draw, (*arguments, weight), options, truth, eager, sources)


def host_calls() -> dict[str, HostCall]:
    chunks, gains, weight = [torch.randn(1, H) for _ in range(K)], torch.rand(K, H), torch.randn(D, K * H)
    out = torch.empty(1, D)
    config = Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, eps=1e-6, chunk_norm=True)
    layer = Eagle3Projection(config, dtype=torch.float32)
    op = eagle_kernels.norm_concat_linear

    def chain() -> Tensor:
        return F.linear(normed_concat(chunks, gains), weight)

    return {
        "norm_concat_linear": HostCall(lambda: op(chunks, weight, norm_weight=gains), chain, goal=0.35),
        "norm_concat_linear out=": HostCall(lambda: op(chunks, weight, norm_weight=gains, out=out), chain, goal=0.3),
        "Eagle3Projection": HostCall(lambda: layer(chunks), chain, goal=0.45),
    }
