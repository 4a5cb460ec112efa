"""AuxHiddenStates: slots, statistics, views, and the errors of a buffer that must not grow."""

import re

import pytest
import torch

import eagle_kernels as ek

T, K, H, MAX = 7, 3, 96, 16


@pytest.fixture
def buffer() -> ek.AuxHiddenStates:
    buffer = ek.AuxHiddenStates(MAX, K, H, dtype=torch.bfloat16)
    buffer.buffer.fill_(float("nan"))
    buffer.sum_squares.fill_(float("nan"))
    return buffer


def test_capture_fills_its_slot_and_nothing_else(buffer: ek.AuxHiddenStates) -> None:
    hidden, residual = torch.randn(2, T, H).bfloat16()
    slot = buffer.capture(1, hidden, residual)
    assert slot.data_ptr() == buffer.chunk(1, T).data_ptr()
    assert torch.equal(buffer.chunk(1, T), hidden + residual)
    truth = (hidden + residual).double().square().sum(-1)
    torch.testing.assert_close(buffer.row_sum_squares(T)[:, 1].double(), truth, rtol=1e-6, atol=0)
    written = torch.zeros(MAX, K * H, dtype=torch.bool)
    written[:T, H : 2 * H] = True
    assert torch.equal(~buffer.buffer.isnan(), written)
    assert torch.equal(~buffer.sum_squares.isnan(), written[:, H // 2 :: H])


def test_captures_of_a_chunked_prefill_follow_each_other(buffer: ek.AuxHiddenStates) -> None:
    hidden = torch.randn(T, H).bfloat16()
    buffer.capture(0, hidden[:5])
    buffer.capture(0, hidden[5:], row=5)
    assert torch.equal(buffer.chunk(0, T), hidden)


def test_the_packed_view_feeds_the_projection_without_a_copy(buffer: ek.AuxHiddenStates) -> None:
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    for k, chunk in enumerate(chunks):
        buffer.capture(k, chunk)
    packed = buffer.packed(T)
    assert packed.data_ptr() == buffer.buffer.data_ptr() and packed.shape == (T, K * H)
    weight, gain = torch.randn(33, K * H).bfloat16(), torch.rand(K, H).bfloat16()
    from_buffer = ek.norm_concat_linear(packed, weight, norm_weight=gain, sum_squares=buffer.row_sum_squares(T))
    torch.testing.assert_close(from_buffer, ek.norm_concat_linear(chunks, weight, norm_weight=gain))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda b: b.capture(0, torch.zeros(17, H).bfloat16()),
            "AuxHiddenStates.capture: the rows end at 17, expected at most max_tokens = 16",
            id="too-many-rows",
        ),
        pytest.param(
            lambda b: b.capture(0, torch.zeros(10, H).bfloat16(), row=7), "the rows end at 17", id="rows-past-the-end"
        ),
        pytest.param(lambda b: b.capture(0, torch.zeros(1, H).bfloat16(), row=-1), "the rows end at 0", id="row-below"),
        pytest.param(
            lambda b: b.capture(3, torch.zeros(1, H).bfloat16()), "k is 3, expected a slot in [0, 3)", id="slot"
        ),
        pytest.param(
            lambda b: b.capture(0, torch.zeros(1, 5).bfloat16()),
            "hidden has shape (1, 5), expected (T, H) = (*, 96)",
            id="width",
        ),
        pytest.param(
            lambda b: b.capture(0, torch.zeros(1, H)),
            "out has dtype torch.bfloat16, expected torch.float32",
            id="dtype",
        ),
        pytest.param(
            lambda b: b.packed(17), "AuxHiddenStates.packed: rows is 17, expected at most max_tokens = 16", id="packed"
        ),
        pytest.param(lambda b: b.chunk(-1, 2), "k is -1, expected a slot in [0, 3)", id="chunk"),
        pytest.param(lambda b: b.row_sum_squares(-1), "rows is -1", id="negative-rows"),
    ],
)
def test_errors_leave_the_buffer_untouched(buffer: ek.AuxHiddenStates, call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call(buffer)
    assert buffer.buffer.isnan().all() and buffer.sum_squares.isnan().all()


@pytest.mark.parametrize("name", ["max_tokens", "num_chunks", "hidden_size"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"max_tokens": 1, "num_chunks": 1, "hidden_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"AuxHiddenStates: {name} is 0, expected at least 1"):
        ek.AuxHiddenStates(**sizes)
