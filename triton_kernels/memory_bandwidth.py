"""Streams of a GPU's memory, the ceiling of `eagle-kernels bench --device cuda`, in Triton, one launch each:

    read(data, sums):  sums[program] = the words of its block added up, mod 2^32
    fill(out):         out = the number of the word's block
    copy(source, out): out = source

torch's streams alone are no upper bound: on an H100 norm_concat_linear moves 2544 GB/s where torch copies 2422
(bench/results/nvidia-h100-80gb-hbm3/decode-curve.json). No block size need be the fastest on every GPU, so the
benchmark tries all of BLOCKS. Operands are contiguous int32 tensors of a multiple of 16 words, on 16 bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dialect import let_next_kernel_start, wait_for_previous_kernel
from .launch import I64, Launch, address, pointer_to, prepared


class Block(NamedTuple):
    """What one program streams, and its warps."""

    words: int
    num_warps: int


# 4, 8, 8 and 16 loads of 16 bytes in each thread.
BLOCKS = (Block(2048, 4), Block(4096, 4), Block(8192, 8), Block(8192, 4))


@triton.jit
def _words_of(program, BLOCK: tl.constexpr):
    return program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]


@triton.jit
def _read(data_ptr, sums_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    at = _words_of(program, BLOCK)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    words = tl.load(data_ptr + at, mask=at < size, other=0)
    tl.store(sums_ptr + program, tl.sum(words, axis=0))


@triton.jit
def _fill(out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    at = _words_of(program, BLOCK)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    tl.store(out_ptr + at, tl.zeros((BLOCK,), dtype=tl.int32) + program, mask=at < size)


@triton.jit
def _copy(source_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = _words_of(tl.program_id(0), BLOCK)
    wait_for_previous_kernel(PDL)
    let_next_kernel_start(PDL)
    tl.store(out_ptr + at, tl.load(source_ptr + at, mask=at < size), mask=at < size)


@prepared
def _prepare(kernel: triton.JITFunction, pointers: int, block: Block, device: torch.device) -> Launch:
    types = (pointer_to(torch.int32),) * pointers + (I64,)
    aligned = tuple(name for name in kernel.arg_names[: len(types)] if name != "sums_ptr")
    return Launch(kernel, types, {"BLOCK": block.words}, device, aligned=aligned, num_warps=block.num_warps)


def programs(data: Tensor, block: Block) -> int:
    """How many programs stream it, and sums a read stores."""
    return -(-data.numel() // block.words)


def _run(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], block: Block) -> None:
    data = tensors[0]
    launch = _prepare(kernel, len(tensors), block, data.device)
    launch((programs(data, block), 1, 1), (*map(address, tensors), data.numel()))


def read(data: Tensor, sums: Tensor, block: Block) -> None:
    _run(_read, (data, sums), block)


def fill(out: Tensor, block: Block) -> None:
    _run(_fill, (out,), block)


def copy(source: Tensor, out: Tensor, block: Block) -> None:
    _run(_copy, (source, out), block)
