"""Whether kernels may copy operands 16 bytes at a time. Needs no Triton: the plans of all GPU kernels ask it."""

from torch import Tensor


def row_stride(rows: Tensor | None) -> int:
    """The stride of a single row is whatever its view left there; it is never used, but it has to be aligned."""
    return 0 if rows is None or rows.shape[0] <= 1 else rows.stride()[0]


def alignment(*tensors: Tensor | None) -> tuple[bool, bool]:
    """(whether every address and row stride is a multiple of 16 bytes, the same with strides of 16 elements).

    All or nothing: an op then has two binaries, not one for each combination of aligned arguments. Triton is told of
    strides in elements, CUDA C++ of bytes.
    """
    addresses, strides, stride_bytes = 0, 0, 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
            if tensor.dim() >= 2:
                stride = row_stride(tensor)
                if tensor.dim() == 3 and tensor.shape[1] > 1:
                    stride |= tensor.stride(1)  # from stream to stream
                strides |= stride
                stride_bytes |= stride * tensor.element_size()
    return (addresses | stride_bytes) % 16 == 0, (addresses | strides) % 16 == 0


def aligned(*tensors: Tensor | None) -> bool:
    """Whether Triton may be told that every address, in bytes, and every row stride, in elements, divides by 16."""
    return alignment(*tensors)[1]
