"""Whether kernels may copy operands 16 bytes at a time. Needs no Triton: the plans of all GPU kernels use it."""

from torch import Tensor


def row_stride(rows: Tensor | None) -> int:
    """0 for None and for a single row: its stride is arbitrary and never used, but would have to be aligned."""
    return 0 if rows is None or rows.shape[0] <= 1 else rows.stride()[0]


def alignment(*tensors: Tensor | None, of_single_rows: bool = False) -> tuple[bool, bool]:
    """(whether every address and row stride is a multiple of 16 bytes, the same with strides of 16 elements).

    Triton takes strides in elements, CUDA C++ in bytes. of_single_rows: whether the strides of single rows count too.
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
