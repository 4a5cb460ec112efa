"""warmup: which calls it makes. tests/gpu shows that nothing compiles after it."""

import contextlib
import functools
import re

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

import eagle_kernels as ek
from eagle_kernels import ops


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The arguments of every call of norm_concat_linear."""
    seen = []
    original = ops.norm_concat_linear

    @functools.wraps(original)
    def recorded(chunks: object, weight: torch.Tensor, **arguments: object) -> torch.Tensor:
        result = original(chunks, weight, **arguments)
        seen.append(arguments | {"chunks": chunks, "rows": result.shape[0] if result.dim() == 2 else 1})
        return result

    monkeypatch.setattr(ops, "norm_concat_linear", recorded)
    return seen


def test_every_row_count_the_most_first(calls: list[dict]) -> None:
    chunks = [torch.randn(9, 16) for _ in range(2)]
    out = torch.empty(9, 4)
    ek.warmup("norm_concat_linear", chunks, torch.randn(4, 32), out=out, sum_squares=torch.rand(9, 2), rows=range(1, 6))
    assert [call["rows"] for call in calls] == [5, 4, 3, 2, 1]
    assert calls[0]["out"].data_ptr() == out.data_ptr()
    calls.clear()
    ek.warmup("norm_concat_linear", chunks, torch.randn(4, 32))
    assert len(calls) == 9
    calls.clear()
    ek.warmup("norm_concat_linear", chunks, torch.randn(4, 32), rows=[])
    assert not calls


def test_many_rows_are_thinned_out(calls: list[dict]) -> None:
    ek.warmup("norm_concat_linear", [torch.randn(1500, 16)], torch.randn(4, 16), rows=range(150, 1500))
    assert [call["rows"] for call in calls] == [1499, 1024, 512, 256, *range(192, 149, -1)]


def test_what_an_index_gathers_stays_whole(calls: list[dict]) -> None:
    table, hidden = torch.randn(50, 16), torch.randn(6, 16)
    ids = torch.tensor([49, 3, 0, 1, 1, 2])
    ek.warmup("norm_concat_linear", [table, hidden], torch.randn(4, 32), indices=[ids, None], rows=[4])
    assert [chunk.shape[0] for chunk in calls[0]["chunks"]] == [50, 4]
    packed, statistics = torch.randn(50, 32), torch.rand(50, 2)
    ek.warmup(
        "norm_concat_linear", packed, torch.randn(4, 32), num_chunks=2, indices=ids, sum_squares=statistics, rows=[3]
    )
    assert calls[1]["chunks"].shape[0] == calls[1]["sum_squares"].shape[0] == 50
    assert calls[1]["rows"] == 3


@pytest.mark.parametrize("indices", [[None, None], [None], [torch.tensor([2, 0, 1]), None]], ids=["K", "one", "mixed"])
def test_sum_squares_of_chunks_that_no_index_gathers_are_cut(indices: list, calls: list[dict]) -> None:
    """They kept their rows beside fewer rows of the chunks, which the op refuses."""
    chunks, statistics = [torch.randn(3, 16) for _ in range(2)], torch.rand(3, 2)
    ek.warmup("norm_concat_linear", chunks, torch.randn(4, 32), indices=indices, sum_squares=statistics)
    assert [call["rows"] for call in calls] == [call["sum_squares"].shape[0] for call in calls] == [3, 2, 1]


def test_a_generator_is_read_once_and_what_is_no_tensor_named(calls: list[dict]) -> None:
    chunks, weight = [torch.randn(2, 16), torch.randn(2, 16)], torch.randn(4, 32)
    ek.warmup("norm_concat_linear", iter(chunks), weight, residuals=None, indices=None)
    assert [[len(chunk) for chunk in call["chunks"]] for call in calls] == [[2, 2], [1, 1]]
    for wrong, message in (
        (3, "chunks is a int, expected a tensor or a sequence of tensors or None"),
        ([chunks[0], 3], "chunks[1] is a int, expected a torch.Tensor"),
        (UninitializedParameter(), "chunks is a UninitializedParameter, expected an initialized tensor"),
    ):
        with pytest.raises(TypeError, match=f"^norm_concat_linear: {re.escape(message)}$"):
            ek.warmup("norm_concat_linear", wrong, weight)


@pytest.mark.parametrize("chunks", [None, [], [None]], ids=["None", "empty", "of-None"])
def test_without_rows_to_count_it_says_which_arguments_have_them(chunks: object) -> None:
    with pytest.raises(TypeError, match=r"^norm_concat: there are no chunks, hidden or ids, expected a tensor"):
        ek.warmup("norm_concat", chunks)


def test_a_weight_that_requires_grad(calls: list[dict]) -> None:
    """As an nn.Linear has it: the ops refuse it in grad mode, and nothing is differentiated here."""
    ek.warmup("norm_concat_linear", [torch.randn(2, 16)], torch.nn.Linear(16, 4, bias=False).weight)
    assert [call["rows"] for call in calls] == [2, 1]


def test_single_rows(calls: list[dict]) -> None:
    ek.warmup("norm_concat_linear", [torch.randn(16), torch.randn(16)], torch.randn(4, 32))
    assert [call["rows"] for call in calls] == [1]


@pytest.mark.parametrize("op", ["norm_concat", "capture_hidden", "vocab_parallel_embedding", "add_rms_norm"])
def test_the_other_ops(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], getattr(ops, op)

    @functools.wraps(original)
    def recorded(first: object, *args: object, **kwargs: object) -> object:
        seen.append(len(first[0] if isinstance(first, list) else first))
        return original(first, *args, **kwargs)

    monkeypatch.setattr(ops, op, recorded)
    x = torch.randn(7, 16)
    shard = ek.VocabShard.build(7, tp_rank=0, tp_size=1)
    arguments, extra = {
        "norm_concat": (([x, x],), {}),
        "capture_hidden": ((x, x), {"out": torch.empty(7, 16), "sum_squares": torch.empty(7)}),
        "vocab_parallel_embedding": ((torch.arange(7), x, shard), {"out": torch.empty(7, 16)}),
        "add_rms_norm": ((x, x, torch.ones(16)), {}),
    }[op]
    ek.warmup(op, *arguments, **extra, rows=range(1, 8))
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def rows_of_calls(module: torch.nn.Module) -> list[int]:
    """Those of the module's calls to come."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    return seen


def test_through_a_module() -> None:
    table = ek.VocabParallelEmbedding(32, 16)
    seen = rows_of_calls(table)
    ek.warmup(table, torch.arange(20), rows=range(3, 21))
    assert seen == list(range(20, 2, -1))


@pytest.mark.parametrize(
    ("op", "rows", "message"),
    [
        ("norm", None, "op is 'norm', expected a module or"),
        ("norm_concat", [8], "rows goes up to 8, expected"),
        ("norm_concat", [7, -1], r"rows\[1\] is -1, expected"),  # [:-1] are 6 rows
    ],
)
def test_errors(op: str, rows: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ek.warmup(op, [torch.randn(7, 16)], rows=rows)


@pytest.mark.parametrize("is_captured", [False, True], ids=["outside", "in-a-capture"])
def test_a_capture_is_refused_and_the_device_waited_for(
    is_captured: bool, calls: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the device, as a compilation does, ends a capture with an error that names no cause."""
    waits: list[int] = []
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(calls)))
    refused = pytest.raises(RuntimeError, match=r"^warmup: the current stream is being captured, expected")
    with refused if is_captured else contextlib.nullcontext():
        ek.warmup("norm_concat_linear", [torch.randn(2, 16)], torch.randn(4, 16))
    assert [call["rows"] for call in calls] == ([] if is_captured else [2, 1])
    assert waits == ([] if is_captured else [2])


H = 16
STREAMS = {"embeds": torch.randn(7, H)}
MODULES = {
    "embeds": lambda: (ek.MTPProjection(ek.MTPConfig(H)), torch.randn(7, H), STREAMS),
    "positions": lambda: (
        ek.MTPProjection(ek.MTPConfig(H, mask_position_zero=True)),
        torch.randn(7, H),
        {"ids": torch.arange(7), "table": torch.randn(9, H), "positions": torch.arange(7)},
    ),
    "streams": lambda: (ek.MTPStreamsProjection(ek.MTPStreamsConfig(H)), torch.randn(7, 4 * H), STREAMS),
    "qkv": lambda: (ek.Eagle3QKVProjection(ek.Eagle3QKVConfig(H)), torch.randn(7, H), STREAMS),
    "context": lambda: (
        ek.ContextKV(ek.ContextKVConfig(2, H, H, 1, 1, 4)),
        torch.randn(7, 2 * H),
        {
            "positions": torch.arange(7),
            "slots": [torch.arange(7)],
            "cos_sin": torch.randn(9, 4),
            "caches": [(torch.zeros(9, 1, 4), torch.zeros(9, 1, 4))],
        },
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_modules_alone_have_is_cut_too(name: str) -> None:
    """embeds, positions and slots kept their rows, which raised from the second row count on."""
    module, rows, arguments = MODULES[name]()
    seen = rows_of_calls(module)
    ek.warmup(module, rows, **arguments)
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_hidden_states_that_are_gathered_stay_whole() -> None:
    layer = ek.MTPProjection(ek.MTPConfig(H))
    seen = rows_of_calls(layer)
    accepted = torch.tensor([8, 7])
    ek.warmup(layer, torch.randn(9, H), torch.arange(2), table=torch.randn(9, H), indices=accepted)
    assert seen == [9, 9]
