"""The row-parallel form of a replicated projection: the ranks' partial products add up to the projection of one rank.

The engines run it over two and three processes in `tests/engines/sglang` and `tests/engines/vllm`.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import eagle_kernels as ek
from eagle_kernels.engines import row_parallel
from eagle_kernels.engines.engine_codes import EngineCodes
from eagle_kernels.engines.projection import EngineProjection, ProbeError, relative_difference
from eagle_kernels.engines.row_parallel import RowParallelProjection, columns_of

K, H, D, T = 3, 96, 40, 7


class Norm(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + torch.randn(width) / 8).to(dtype), requires_grad=False)
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), 1e-5).to(x.dtype)


def projection(norm: str, dtype: torch.dtype, *, bias: bool = False, post_norm: bool = False) -> EngineProjection:
    torch.manual_seed(1)
    fc = nn.Linear(K * H, D, bias=bias, dtype=dtype).requires_grad_(False)
    return EngineProjection(
        fc,
        K,
        concat_norm=Norm(K * H, dtype) if norm in ("concat", "both") else None,
        chunk_norms=[Norm(H, dtype) for _ in range(K)] if norm in ("chunk", "both") else (),
        post_norm=Norm(D, dtype) if post_norm else None,
    )


def ranks_of(whole: EngineProjection, size: int, all_reduce: Any = torch.clone) -> list[RowParallelProjection]:
    fields = {name: getattr(whole, name) for name in EngineProjection.__dataclass_fields__}
    return [RowParallelProjection(**fields, rank=rank, size=size, all_reduce=all_reduce) for rank in range(size)]


def hidden_states(dtype: torch.dtype) -> Tensor:
    """Chunks of different lengths: a rank that normed its columns by their own statistics would be far off."""
    lengths = torch.tensor([1.0, 30.0, 0.1]).repeat_interleave(H)
    return (torch.randn(T, K * H, generator=torch.Generator().manual_seed(2)) * lengths).to(dtype)


@pytest.mark.parametrize("width", [64, 96, 129, 288, 12288, 21504])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_ranks_have_all_columns_in_whole_tiles(width: int, size: int) -> None:
    ranges = [columns_of(width, rank, size) for rank in range(size)]
    assert [column for begin, end in ranges for column in range(begin, end)] == list(range(width))
    assert all(begin % row_parallel.TILE == 0 for begin, _ in ranges)
    assert max(end - begin for begin, end in ranges) <= (-(-width // row_parallel.TILE) // size + 1) * row_parallel.TILE


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("norm", ["none", "chunk", "concat", "both"])
@pytest.mark.parametrize("given", ["packed", "chunks", "row"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_partial_products_add_up(norm: str, size: int, given: str, bias: bool) -> None:
    whole, x = projection(norm, torch.float32, bias=bias), hidden_states(torch.float32)
    chunks: Any = {"packed": x, "chunks": list(x.split(H, -1)), "row": x[0]}[given]
    added = sum(rank(chunks) for rank in ranks_of(whole, size))
    expected = whole(chunks)
    assert added.shape == expected.shape and relative_difference(added, expected) < 1e-6


def test_each_rank_reads_its_columns_of_the_engine_s_own_weight() -> None:
    whole, x = projection("chunk", torch.float32), hidden_states(torch.float32)
    first, second = ranks_of(whole, 2)
    before = first(x), second(x)
    begin, end = columns_of(K * H, 1, 2)
    whole.fc.weight.data[:, begin:end].mul_(-2)  # an update in place (RL)
    assert torch.equal(first(x), before[0]) and torch.equal(second(x), -2 * before[1])


def test_the_post_norm_follows_the_sum_and_out_is_written() -> None:
    whole, x = projection("chunk", torch.bfloat16, post_norm=True), hidden_states(torch.bfloat16)
    partials = [rank(x) for rank in ranks_of(replace(whole, post_norm=None), 2)]
    (first, _), out = ranks_of(whole, 2, lambda partial: partial + partials[1]), torch.zeros(T, 2 * D).bfloat16()
    assert first(x, out=out[:, D:]).data_ptr() == out[:, D:].data_ptr()
    assert relative_difference(out[:, D:], whole(x)) < 0.01 and not out[:, :D].any()


def engine_codes() -> EngineCodes:
    """fc as an engine keeps it in FP8."""
    quantized = ek.quantize(torch.randn(D, K * H), "fp8_row")
    weight, scales = (nn.Parameter(each, requires_grad=False) for each in (quantized.codes.t(), quantized.scales))
    sizes = {"output_size": D, "input_size": K * H, "weight_block_size": None}
    return EngineCodes(SimpleNamespace(weight=weight, weight_scale=scales, quant_method=None, **sizes))


@pytest.mark.parametrize(
    ("changes", "width", "size", "reason"),
    [
        ({}, K * H, 2, None),
        ({}, K * H, 1, "there is one rank"),
        ({}, K * H, 6, "K*H=288 has less than 64 columns for each of 6 ranks"),
        ({"fc_unsupported": "its quant_method is Fp8"}, K * H, 2, "its quant_method is Fp8"),
        ({"fc": engine_codes()}, K * H, 2, "its weight is fp8_row"),
    ],
)
def test_unsupported_reason(changes: dict, width: int, size: int, reason: str | None) -> None:
    whole = replace(projection("none", torch.bfloat16), **changes)
    assert row_parallel.unsupported_reason(whole, width, size) == reason


class Failing(Norm):
    @property
    def variance_epsilon(self) -> float:
        raise RuntimeError("broken here")

    @variance_epsilon.setter
    def variance_epsilon(self, value: float) -> None:
        pass


def _split_on_a_rank(rank: int, size: int, store: str, failing_rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    whole, x = projection("chunk", torch.bfloat16), hidden_states(torch.bfloat16)

    def engine(packed: Tensor) -> Tensor:
        normed = [norm(chunk) for norm, chunk in zip(whole.chunk_norms, packed.chunk(K, -1), strict=True)]
        return whole.fc(torch.cat(normed, -1))

    def all_reduce(partial: Tensor) -> Tensor:
        total = partial.float()
        dist.all_reduce(total)
        return total.to(partial.dtype)

    ours = whole
    if rank == failing_rank:
        ours = replace(whole, chunk_norms=[Failing(H, torch.bfloat16) for _ in range(K)])
    ranks = {"rank": rank, "size": size, "all_reduce": all_reduce, "group": dist.group.WORLD}
    try:
        split, decided = row_parallel.split(ours, x, 64, engine, **ranks)
        result = (relative_difference(split(x), whole(x)), decided.always, decided.reason)
    except ProbeError as failure:
        result = str(failure)
    torch.save(result, f"{store}.{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize(("size", "failing_rank"), [(2, -1), (3, -1), (2, 1)])
def test_ranks_split_together_or_not_at_all(tmp_path: Path, size: int, failing_rank: int) -> None:
    store = str(tmp_path / "store")
    torch.multiprocessing.spawn(_split_on_a_rank, args=(size, store, failing_rank), nprocs=size)
    results = [torch.load(f"{store}.{rank}") for rank in range(size)]
    if failing_rank == -1:
        assert all(result[1:] == (True, f"row-parallel on {size} ranks, not timed") for result in results)
        assert len({result[0] for result in results}) == 1 and results[0][0] < 0.01
    else:
        assert results == ["it does not run on another rank", "norm_concat_linear does not run here: broken here"]
