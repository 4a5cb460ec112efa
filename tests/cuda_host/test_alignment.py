"""One operand at a time lacks the 16-byte alignment that wide loads need, in its address or its row stride: the
memory-bound ops then load values one by one and give the same bits, and the fused product leaves the call to another
plan."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels.plan import Kernel
from guards import same_bits

pytestmark = pytest.mark.usefixtures("emulated")

T, H = 3, 72
SHARD = ek.VocabShard.build(T, tp_rank=0, tp_size=1)


def moved(rows: Tensor, how: str) -> Tensor:
    """The same values in a buffer where the address, or only the stride of the rows, is no multiple of 16 bytes."""
    if how == "address":
        wide = rows.new_full((*rows.shape[:-1], rows.shape[-1] + 8), float("nan"))
        view = wide[..., 1:-7]
    else:
        wide = rows.new_full((rows.shape[0], rows.shape[1] + 1), float("nan"))
        view = wide[:, :-1]
    return view.copy_(rows)


def _operands(dtype: torch.dtype, *names: str) -> dict[str, Tensor]:
    return {name: torch.randn((H,) if name == "gain" else (T, H)).to(dtype) for name in names}


def _capture(hidden: Tensor, residual: Tensor, out: Tensor) -> None:
    ek.capture_hidden(hidden, residual, out=out, sum_squares=torch.empty(T))


def _add(hidden: Tensor, residual: Tensor, gain: Tensor, out: Tensor, out_sum: Tensor) -> None:
    ek.add_rms_norm(hidden, residual, gain, out=out, out_sum=out_sum)


def _embed(table: Tensor, out: Tensor) -> None:
    ek.vocab_parallel_embedding(torch.tensor([2, -1, 0]), table, SHARD, out=out)


def _concat(chunk: Tensor, residual: Tensor, gain: Tensor, out: Tensor) -> None:
    ek.norm_concat([chunk], norm_weight=[gain], residuals=[residual], out=out)


# Op -> the call, and its operands and outputs.
CALLS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "capture_hidden": (_capture, ("hidden", "residual", "out")),
    "add_rms_norm": (_add, ("hidden", "residual", "gain", "out", "out_sum")),
    "vocab_parallel_embedding": (_embed, ("table", "out")),
    "norm_concat": (_concat, ("chunk", "residual", "gain", "out")),
}
MOVES = [
    (op, name, how)
    for op, (_, names) in CALLS.items()
    for name in names
    for how in ("address", "stride")
    if (name, how) != ("gain", "stride")  # a vector has no stride of rows
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("op", "name", "how"), MOVES, ids="-".join)
def test_the_bits_do_not_depend_on_where_an_operand_lies(op: str, name: str, how: str, dtype: torch.dtype) -> None:
    run, names = CALLS[op]
    operands = _operands(dtype, *names)
    expected = {key: value.clone() for key, value in operands.items()}
    run(**expected)
    operands[name] = moved(operands[name], how)
    run(**operands)
    for key in names:
        assert same_bits(operands[key].contiguous(), expected[key]), key


@pytest.mark.parametrize(
    ("name", "how"),
    [("gain", "address")] + [(name, how) for name in ("chunk", "residual", "weight") for how in ("address", "stride")],
    ids="-".join,
)
def test_the_fused_product_leaves_it_to_another_plan(name: str, how: str, emulated: object) -> None:
    operands = _operands(torch.bfloat16, "chunk", "residual", "gain", "weight")

    def planned() -> Kernel:
        options = {"norm_weight": [operands["gain"]], "residuals": [operands["residual"]]}
        return ek.explain("norm_concat_linear", [operands["chunk"]], operands["weight"], **options).kernel

    def primitive() -> None:
        sources = ([operands["chunk"]], 1, 1, [operands["gain"]], [1e-6], 0.0, [operands["residual"]], [], None)
        out = torch.empty(T, T).bfloat16()
        emulated.norm_concat_linear_fused_out(*sources, operands["weight"], None, None, 0.0, True, out)

    assert planned() is Kernel.FUSED
    primitive()
    operands[name] = moved(operands[name], how)
    assert planned() is Kernel.TWO_STEP
    with pytest.raises(RuntimeError, match=r"^norm_concat_linear: operands: alignment \("):
        primitive()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["chunk", "residual"])
def test_a_single_row_has_the_plan_of_several_where_one_serves_all_T(
    name: str, quantized: bool, emulation: ModuleType
) -> None:
    """Plans ignored the stride of a single row, which no kernel reads: it got the split kernels, two rows did not."""
    operands = _operands(torch.bfloat16, "chunk", "residual", "weight")
    H = 64  # a width that the kernels of codes take
    rows = {key: value[:, :H] for key, value in operands.items()}
    rows[name] = moved(rows[name], "stride")
    weight = ek.quantize(rows["weight"], "fp8_row") if quantized else rows["weight"].contiguous()
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND="cuda"):
        plans, launched = [], []
        for some in (slice(T), slice(1)):
            chunks, options = [rows["chunk"][some]], {"residuals": [rows["residual"][some]]}
            plans.append(str(ek.explain("norm_concat_linear", chunks, weight, **options)))
            emulation.take_launches()
            ek.norm_concat_linear(chunks, weight, **options)
            launched.append([launch.threads for launch in emulation.take_launches() if launch.threads])
    assert plans[0] == plans[1] and "cuda/split" not in plans[0]
    assert launched[0] == launched[1]
