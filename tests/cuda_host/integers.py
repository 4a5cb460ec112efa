"""Calls of the CUDA primitives whose fp32 arithmetic is exact in any order, so that their bits are known: integers, row
sums of squares that are powers of 4 times the width, and gains of 1."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_kernels.plan import Kernel
from eagle_kernels.quantized_weight import FORMATS, QuantizedWeight, scale_shape

_CODES = {"none": 0, "chunk": 1, "concat": 2}


@dataclass(frozen=True)
class Call:
    """One primitive on small integers. `run` calls it in a namespace of ops, with the operands moved by `move`."""

    op: str
    dtype: torch.dtype
    T: int
    K: int
    H: int
    D: int = 0
    norm: str = "none"

    @property
    def id(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        name += f"-{self.format}" if self.format else ""
        name += "-split" if self.split else ""
        return f"{self.op}-{name}-T{self.T}-K{self.K}-H{self.H}-D{self.D}-{self.norm}"

    format: str = ""  # of a quantized weight
    split: bool = False  # the product by the split kernels, whatever T is

    @property
    def kernel(self) -> Kernel:
        """Which kernel it runs: not all GPUs have the fused ones."""
        if self.op != "norm_concat_linear":
            return Kernel.SINGLE
        if self.format:
            by_warpgroups = self.T > 32 and self.dtype == torch.bfloat16 and self.format.endswith("_row")
            return Kernel.WGMMA if by_warpgroups else Kernel.SPLIT
        if self.split:
            return Kernel.SPLIT
        return Kernel.WGMMA if self.T > 16 else Kernel.FUSED

    def operands(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Chunks of -2 and 2 (a mean square of 4), residuals, weight, and indices of which some are out of range."""
        generator = torch.Generator().manual_seed(self.T * self.H + self.D)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator)

        chunks = [(integers(0, 1, self.T, self.H) * 4 - 2).to(self.dtype) for _ in range(self.K)]
        residuals = [integers(-3, 3, self.T, self.H).to(self.dtype) for _ in range(self.K)]
        weight = integers(-3, 3, max(self.D, 1), self.K * self.H).to(self.dtype)
        return chunks, residuals, weight, integers(-1, self.T, self.T)

    def quantized(self) -> QuantizedWeight:
        """The weight as codes with scales that are powers of 2."""
        kind, (_, _, weight, _) = FORMATS[self.format], self.operands()
        rows, columns = scale_shape(kind, weight.shape)
        scales = 2.0 ** (torch.arange(rows * columns).view(rows, columns) % 3 - 1)
        return QuantizedWeight(weight.to(kind.codes), scales.to(kind.scales[0]), self.format)

    def run(self, ops: object, move: Callable[[object], object] = lambda value: value) -> list[Tensor]:
        chunks, residuals, weight, indices = map(move, self.operands())
        out = move(torch.full((self.T, self.D or self.K * self.H), float("nan")).to(self.dtype))
        residuals = residuals if self.norm == "none" else None
        sources = (chunks, self.K, _CODES[self.norm], [], [0.0], 0.0, residuals, [indices], None)
        if self.format:
            quantized = self.quantized()
            codes, scales = move(quantized.codes), move(quantized.scales)
            epilogue = (None, None, 0.0)
            kernel = 2 if self.kernel is Kernel.WGMMA else 0  # csrc/norm_concat_linear.h, ProductKernel
            ops.norm_concat_linear_quantized_out(
                *sources, codes, scales, None, *quantized.block, *epilogue, kernel, True, out
            )
            return [out]
        if self.op == "norm_concat_linear":
            if self.kernel is Kernel.WGMMA:
                ops.norm_concat_linear_wgmma_out(*sources, weight, None, None, 0.0, out)
            else:
                run = ops.norm_concat_linear_split_out if self.split else ops.norm_concat_linear_fused_out
                run(*sources, weight, None, None, 0.0, True, out)
            return [out]
        if self.op == "norm_concat":
            ops.norm_concat_out(*sources, out)
            return [out]
        if self.op == "capture_hidden":
            squares = move(torch.full((self.T,), float("nan")))
            ops.capture_hidden_out(chunks[0], chunks[0].flip(0), out, squares)
            return [out, squares]
        if self.op == "add_rms_norm":
            total = torch.full_like(out, float("nan"))
            ops.add_rms_norm_out(chunks[0], chunks[0], move(torch.ones(self.H)), 0.0, 0.0, out, total)
            return [out, total]
        ops.vocab_parallel_embedding_out(indices, chunks[0], 0, self.T, 0, 0, 0, 3.0, None, out)
        return [out]


_DTYPES = (torch.bfloat16, torch.float16)
CALLS = [
    *(
        Call("norm_concat_linear", dtype, T, 3, 136, D, norm)
        for dtype in _DTYPES
        for T, D in ((3, 37), (13, 37), (3, 4300), (40, 150), (101, 260))
        for norm in _CODES
    ),
    *(
        Call("norm_concat_linear", dtype, T, 3, 136, D, norm, split=True)
        for dtype in _DTYPES
        for T, D in ((13, 37), (40, 150), (101, 260))
        for norm in _CODES
    ),
    *(
        Call("norm_concat_linear", dtype, T, 3, 160, 150, norm, format)
        for dtype in _DTYPES
        for T, norm in ((3, "none"), (40, "chunk"))
        for format in ("fp8_row", "fp8_block32", "mxfp8", "int8_row")
    ),
    *(Call("norm_concat", dtype, 5, 3, H, 0, norm) for dtype in _DTYPES for H in (136, 101) for norm in _CODES),
    *(
        Call(op, dtype, 5, 1, H)
        for op in ("capture_hidden", "add_rms_norm", "vocab_parallel_embedding")
        for dtype in (*_DTYPES, torch.float32)
        for H in (2880, 101)
    ),
]
