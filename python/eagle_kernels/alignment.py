"""Whether operands lie so that kernels may copy 16 bytes at a time."""

from torch import Tensor


def row_stride(rows: Tensor | None) -> int:
    """The stride of a single row is whatever its view left there; it is never used, but it has to be aligned."""
    return 0 if rows is None or rows.shape[0] <= 1 else rows.stride(0)


def aligned(*tensors: Tensor | None, stride_unit: int = 1) -> bool:
    """Whether every base address, in bytes, and `stride_unit` times every row stride, in elements, divide by 16.

    All or nothing: an op then has two binaries, not one for each combination of aligned arguments. Triton is told of
    strides in elements; with the element size for a unit the strides count in bytes.
    """
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr() | (row_stride(tensor) * stride_unit if tensor.dim() == 2 else 0)
    return bits % 16 == 0
