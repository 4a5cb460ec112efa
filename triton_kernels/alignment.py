"""Whether kernels may copy operands 16 bytes at a time. Needs no Triton: the plans of all GPU kernels ask it."""

from torch import Tensor


def row_stride(rows: Tensor | None) -> int:
    """The stride of a single row is whatever its view left there; it is never used, but it has to be aligned."""
    return 0 if rows is None or rows.shape[0] <= 1 else rows.stride()[0]


def alignment(*tensors: Tensor | None, of_single_rows: bool = False) -> tuple[bool, bool]:
    """(whether every address and row stride is a multiple of 16 bytes, the same with strides of 16 elements).

    Triton is told of strides in elements, CUDA C++ of bytes. of_single_rows: whether their strides count too.
    """
    addresses, strides, stride_bytes = 0, 0, 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
            if tensor.dim() >= 2:
                stride = tensor.stride()[0] if of_single_rows else row_stride(tensor)
                strides |= stride
                stride_bytes |= stride * tensor.element_size()
    return (addresses | stride_bytes) % 16 == 0, (addresses | strides) % 16 == 0
