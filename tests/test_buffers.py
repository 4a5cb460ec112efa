"""AuxHiddenStates and ChainedHiddenStates: slots, steps, views, rotation, and the errors of buffers that never grow."""

import copy
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle_kernels as ek
from guards import UnchangedTensors, same_bits

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


def test_autograd_sees_a_capture_into_kept_views_too(buffer: ek.AuxHiddenStates) -> None:
    for _ in range(2):
        versions = buffer.buffer._version, buffer.sum_squares._version
        buffer.capture(1, torch.randn(T, H).bfloat16())
        assert buffer.buffer._version > versions[0] and buffer.sum_squares._version > versions[1]


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
        pytest.param(
            lambda b: b.capture(0, torch.zeros(1, H).bfloat16(), row=-1), "row is -1, expected at least 0", id="row"
        ),
        *(
            pytest.param(
                lambda b, k=k: b.capture(k, torch.zeros(1, H).bfloat16()),
                f"AuxHiddenStates.capture: k is a {type(k).__name__}, expected an int",
                id=f"k-{k}",
            )
            for k in (1.0, True)
        ),
        pytest.param(
            lambda b: b.packed("2"), "AuxHiddenStates.packed: rows is a str, expected an int", id="rows-as-text"
        ),
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
        *(
            pytest.param(
                lambda b, name=name: getattr(b, name)(-1),
                f"AuxHiddenStates.{name}: rows is -1, expected at least 0",
                id=f"{name}-negative",
            )
            for name in ("packed", "row_sum_squares", "step")
        ),
    ],
)
def test_errors_leave_the_buffer_untouched(buffer: ek.AuxHiddenStates, call: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call(buffer)
    assert buffer.buffer.isnan().all() and buffer.sum_squares.isnan().all()


@pytest.mark.parametrize(
    "small",
    [np.uint8, np.int16, lambda number: torch.tensor(number, dtype=torch.int16)],
    ids=["uint8", "int16", "tensor"],
)
def test_small_integers_name_the_slots_and_rows_of_their_value(small: Callable) -> None:
    """Their products and sums wrapped: np.uint8(2) named slot 0 of 3 slots of 128, row 200 of a step was row 44."""
    buffer = ek.AuxHiddenStates(260, 9, 4096)
    ones = torch.ones(2, 4096).bfloat16()
    buffer.capture(small(8), ones[:1], row=small(7))
    step = buffer.step(small(100), row=small(150))
    for piece in (ones.expand(50, 2, -1).flatten(0, 1)[:60], ones.expand(20, 2, -1).flatten(0, 1)):
        step.capture(small(8), piece)
    written = torch.zeros(260, 9, dtype=torch.bool)
    written[7, 8] = written[150:250, 8] = True
    assert torch.equal(buffer.buffer.view(260, 9, 4096).all(-1), written)
    assert torch.equal(buffer.sum_squares == 4096, written)
    assert buffer.chunk(small(8), small(200)).data_ptr() == buffer.buffer[0, 8 * 4096 :].data_ptr()
    chain = ek.ChainedHiddenStates(260, 4096)
    chain.load(ones.expand(50, 2, -1).flatten(0, 1), row=small(120))
    assert torch.equal(chain.buffer.all(-1).nonzero().flatten(), torch.arange(120, 220))


@pytest.mark.parametrize("name", ["max_tokens", "num_chunks", "hidden_size"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"max_tokens": 1, "num_chunks": 1, "hidden_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"AuxHiddenStates: {name} is 0, expected at least 1"):
        ek.AuxHiddenStates(**sizes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, "bf16"], ids=str)
def test_the_stream_has_a_dtype_of_the_ops(dtype: object) -> None:
    expected = f"HiddenStates: dtype is {dtype!r}, expected torch.bfloat16 or torch.float16 or torch.float32$"
    with pytest.raises(TypeError, match=f"^Aux{expected}"):
        ek.AuxHiddenStates(1, 2, 3, dtype=dtype)
    with pytest.raises(TypeError, match=f"^Chained{expected}"):
        ek.ChainedHiddenStates(1, 3, dtype=dtype)


def test_more_columns_than_int32_counts_are_refused_before_they_are_allocated() -> None:
    with pytest.raises(
        ValueError, match=r"^AuxHiddenStates: K=1000000000 chunks of H=4 have 4000000000 columns, expec"
    ):
        ek.AuxHiddenStates(1, 10**9, 4)


def test_decoding_after_a_long_prefill_uses_the_same_rows() -> None:
    """Thousands of rows, in ragged chunks, then a few: rows are selected by indices, in place."""
    rows, chunks = 3000, (1024, 1024, 951, 1)
    buffer = ek.AuxHiddenStates(rows, K, H, dtype=torch.bfloat16)
    states = [torch.randn(rows, H).bfloat16() for _ in range(K)]
    weight, gain = torch.randn(40, K * H).bfloat16(), torch.rand(K, H).bfloat16()
    begin = 0
    for count in chunks:
        with buffer.step(count, row=begin) as step:
            for k, state in enumerate(states):
                step.capture(k, state[begin : begin + count])
        begin += count
    assert begin == rows and same_bits(buffer.packed(rows), torch.cat(states, -1))
    options = {"norm_weight": gain, "sum_squares": buffer.row_sum_squares(rows)}
    whole = ek.norm_concat_linear(buffer.packed(rows), weight, **options)
    assert whole.shape == (rows, 40)
    accepted = torch.tensor([2999, 0, 1500, 1499])
    before = buffer.buffer.data_ptr(), buffer.buffer.clone()
    few = ek.norm_concat_linear(buffer.packed(rows), weight, indices=accepted, **options)
    squares = buffer.row_sum_squares(rows)[accepted]
    assert same_bits(
        few, ek.norm_concat_linear(buffer.packed(rows)[accepted], weight, **options | {"sum_squares": squares})
    )
    assert buffer.buffer.data_ptr() == before[0] and same_bits(buffer.buffer, before[1])
    for k in range(K):
        buffer.capture(k, -states[k][:4])
    assert same_bits(buffer.packed(4), -torch.cat(states, -1)[:4])
    assert same_bits(buffer.buffer[4:], before[1][4:])


def test_a_step_takes_every_slot_once_in_pieces_or_whole(buffer: ek.AuxHiddenStates) -> None:
    hidden, residual = torch.randn(2, K, T, H).bfloat16()
    with buffer.step(T, row=2) as step:
        for k in (2, 0, 1):
            step.capture(k, hidden[k, :3], residual[k, :3])
            written = step.capture(k, hidden[k, 3:], residual[k, 3:])
            assert written.data_ptr() == buffer.chunk(k, MAX)[5:].data_ptr()
    assert same_bits(buffer.packed(MAX)[2 : 2 + T], torch.cat(list(hidden + residual), -1))
    assert buffer.buffer[:2].isnan().all() and buffer.buffer[2 + T :].isnan().all()
    with buffer.step(0):
        pass


def test_a_slot_twice_is_refused_and_stays_as_it_was(buffer: ek.AuxHiddenStates) -> None:
    step, first, second = buffer.step(T), *torch.randn(2, T, H).bfloat16()
    step.capture(1, first)
    message = "CaptureStep.capture: slot 1 gets rows [7, 14), expected each of the step's 7 rows once"
    with UnchangedTensors([buffer.buffer, buffer.sum_squares]), pytest.raises(RuntimeError, match=re.escape(message)):
        step.capture(1, second)
    with UnchangedTensors([buffer.buffer]), pytest.raises(RuntimeError, match=r"slot 0 gets rows \[0, 8\)"):
        step.capture(0, torch.zeros(T + 1, H).bfloat16())


def test_a_slot_that_is_left_out_is_named(buffer: ek.AuxHiddenStates) -> None:
    hidden = torch.randn(T, H).bfloat16()
    message = (
        "CaptureStep.finish: slot 0 has 3, slot 2 has 0, expected 7 rows in each, because the layers in front of those "
        "boundaries did not run, or not for all rows"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"), buffer.step(T) as step:
        step.capture(0, hidden[:3])
        step.capture(1, hidden)
    with pytest.raises(RuntimeError, match="call its capture, not the buffer's"), buffer.step(T):
        buffer.capture(0, hidden)
    with pytest.raises(ZeroDivisionError), buffer.step(T):
        raise ZeroDivisionError


@pytest.mark.parametrize(("rows", "row"), [(17, 0), (10, 7)])
def test_a_step_of_too_many_rows_is_refused_before_it_starts(buffer: ek.AuxHiddenStates, rows: int, row: int) -> None:
    message = f"AuxHiddenStates.step: the rows end at {row + rows}, expected at most max_tokens = 16, because static"
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.step(rows, row=row)


def chained(**options: object) -> ek.ChainedHiddenStates:
    states = ek.ChainedHiddenStates(MAX, H, **options)
    states.buffer.fill_(float("nan"))
    states.other.fill_(float("nan"))
    return states


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_step_reads_what_the_step_before_left(norm_output: bool, dtype: torch.dtype) -> None:
    states = chained(norm_output=norm_output, dtype=dtype)
    pointer, target, residual = states.current(1).data_ptr(), *torch.randn(2, T, H).to(dtype)
    loaded = states.load(target, residual)
    assert loaded.data_ptr() == pointer and same_bits(states.current(T), target + residual)
    for step in range(3):
        hidden, residual, gain = torch.randn(T, H).to(dtype), torch.randn(T, H).to(dtype) * 9**step, torch.rand(H)
        with UnchangedTensors([hidden, residual, gain]):
            normed = states.advance(hidden, residual, gain, eps=1e-5, norm_offset=1.0)
        assert same_bits(normed, ek.add_rms_norm(hidden, residual, gain, eps=1e-5, norm_offset=1.0)[0])
        assert same_bits(states.other[:T] if norm_output else states.current(T), hidden + residual)
        assert states.current(T).data_ptr() == pointer, "CUDA graphs hold the address"
        assert (normed.data_ptr() == pointer) == norm_output
    assert states.buffer[T:].isnan().all() and states.other[T:].isnan().all()


def test_a_few_rows_after_a_long_prefill_leave_the_rest() -> None:
    states = ek.ChainedHiddenStates(4000, H)
    prefill = torch.randn(4000, H).bfloat16()
    for begin in range(0, 4000, 1536):
        states.load(prefill[begin : begin + 1536], row=begin)
    assert same_bits(states.current(4000), prefill)
    hidden, residual = torch.randn(2, 5, H).bfloat16()
    states.advance(hidden, residual, torch.ones(H))
    assert same_bits(states.current(4000), torch.cat([hidden + residual, prefill[5:]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda s: s.load(torch.zeros(17, H).bfloat16()),
            "ChainedHiddenStates.load: the rows end at 17, expected at most max_tokens = 16, because static buffers "
            "never grow",
            id="load-rows",
        ),
        pytest.param(
            lambda s: s.load(torch.zeros(2, 5).bfloat16()),
            "ChainedHiddenStates.load: target has shape (2, 5), expected (T, H) = (*, 96)",
            id="load-width",
        ),
        pytest.param(
            lambda s: s.load(torch.zeros(2, H)),
            "capture_hidden: out has dtype torch.bfloat16, expected torch.float32, because hidden has dtype "
            "torch.float32",
            id="load-dtype",
        ),
        pytest.param(
            lambda s: s.current(17),
            "ChainedHiddenStates.current: rows is 17, expected at most max_tokens = 16",
            id="current",
        ),
        pytest.param(
            lambda s: s.advance(*torch.zeros(2, 17, H).bfloat16(), torch.ones(H)),
            "ChainedHiddenStates.advance: the rows end at 17, expected at most max_tokens = 16, because static buffers "
            "never grow",
            id="advance-rows",
        ),
        pytest.param(
            lambda s: s.advance(torch.zeros(H).bfloat16(), torch.zeros(H).bfloat16(), torch.ones(H)),
            "ChainedHiddenStates.advance: hidden has shape (96,), expected (T, H) = (*, 96)",
            id="advance-shape",
        ),
        pytest.param(
            lambda s: s.advance(*torch.zeros(2, 3, H).bfloat16(), torch.ones(5)),
            "add_rms_norm: weight has shape (5,), expected (96,) = (H,)",
            id="advance-gain",
        ),
        pytest.param(
            lambda s: s.advance(torch.zeros(3, H).bfloat16(), s.current(3), torch.ones(H)),
            "add_rms_norm: out_sum overlaps residual, expected disjoint memory, because rows are written while others "
            "are read",
            id="advance-alias",
        ),
    ],
)
def test_errors_leave_the_chain_untouched(call: object, message: str) -> None:
    states = chained()
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        call(states)
    assert states.buffer.isnan().all() and states.other.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_token_ids_rotate_within_their_request(dtype: torch.dtype) -> None:
    ids = torch.tensor([10, 11, 12, 20, 30, 31], dtype=dtype)
    address, last_rows = ids.data_ptr(), torch.tensor([2, 3, 5], dtype=dtype)
    rotated = ek.rotate_token_ids(ids, torch.tensor([13, 21, 32], dtype=dtype), last_rows)
    assert rotated.data_ptr() == address and ids.tolist() == [11, 12, 13, 21, 31, 32]
    # Only two of request 0's three rows and one of request 2's were accepted.
    ek.rotate_token_ids(ids, torch.tensor([90, 91, 92], dtype=dtype), torch.tensor([1, 3, 4], dtype=dtype))
    assert ids[[0, 1, 3, 4]].tolist() == [12, 90, 91, 92]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"next_ids": torch.tensor([1, 2])},
            "rotate_token_ids: last_rows has shape (1,), expected (2,), because next_ids has that shape",
            id="requests",
        ),
        pytest.param(
            {"next_ids": torch.tensor([1], dtype=torch.int32)},
            "rotate_token_ids: next_ids has dtype torch.int32, expected torch.int64, because ids has dtype torch.int64",
            id="dtype",
        ),
        pytest.param(
            {"last_rows": torch.tensor([1.0])},
            "rotate_token_ids: last_rows has dtype torch.float32, expected torch.int32 or torch.int64",
            id="rows",
        ),
        pytest.param({"last_rows": torch.tensor([4])}, None, id="out-of-range"),
    ],
)
def test_a_rotation_that_is_refused_leaves_the_ids(arguments: dict, message: str | None) -> None:
    ids = torch.tensor([1, 2, 3, 4])
    arguments = {"next_ids": torch.tensor([9]), "last_rows": torch.tensor([3])} | arguments
    with pytest.raises((ValueError, TypeError, IndexError), match=message and f"^{re.escape(message)}$"):
        ek.rotate_token_ids(ids, **arguments)
    assert ids.tolist() == [1, 2, 3, 4]


def test_ids_of_inference_mode_rotate_outside_of_it() -> None:
    """As every output here may be an inference tensor; torch refuses to write one."""
    with torch.inference_mode():
        ids = torch.tensor([1, 2, 3])
    assert ek.rotate_token_ids(ids, torch.tensor([9]), torch.tensor([2])).tolist() == [2, 3, 9]


def seven() -> torch.Tensor:
    return torch.full((2, H), 7.0).bfloat16()


def captured(aux: ek.AuxHiddenStates) -> torch.Tensor:
    aux.capture(0, seven())
    return aux.packed(2)[:, :H]


@pytest.mark.parametrize("change", ["pickle", "copy", "buffer", "data", "view"])
def test_a_capture_goes_to_the_buffer_there_is_now(change: str) -> None:
    """Views are cached between captures, and must not outlive the buffer that they view."""
    aux = ek.AuxHiddenStates(16, K, H)
    view = aux.capture(0, torch.randn(2, H).bfloat16())
    old = aux
    if change == "pickle":
        aux = pickle.loads(pickle.dumps(aux))
        assert len(pickle.dumps(aux)) < 2 * aux.buffer.nbytes + 4096
    elif change == "copy":
        aux = copy.copy(aux)
        aux.buffer = aux.buffer.clone()
    elif change == "buffer":
        aux.buffer, aux.sum_squares = torch.zeros_like(aux.buffer), torch.zeros_like(aux.sum_squares)
    elif change == "data":
        aux.buffer.data = torch.zeros_like(aux.buffer)
    else:
        view.unsqueeze_(0)
    assert torch.equal(captured(aux), seven())
    assert aux is old or not torch.equal(old.packed(2)[:, :H], seven())


def test_a_fake_capture_is_not_kept() -> None:
    aux = ek.AuxHiddenStates(16, K, H)
    with FakeTensorMode(allow_non_fake_inputs=True):
        aux.capture(0, torch.empty(2, H, dtype=torch.bfloat16))
    assert torch.equal(captured(aux), seven())
    with FakeTensorMode():
        fake = ek.AuxHiddenStates(16, K, H)
        for _ in range(2):
            assert fake.capture(0, torch.empty(2, H, dtype=torch.bfloat16)).shape == (2, H)


def test_compiled_captures_share_one_graph() -> None:
    aux = ek.AuxHiddenStates(64, K, H)
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda hidden: aux.capture(1, hidden), backend=frames, fullgraph=True, dynamic=True)
    for rows in range(2, 14):
        hidden = torch.randn(rows, H).bfloat16()
        assert torch.equal(compiled(hidden), hidden)
        aux.capture(1, hidden)
    assert frames.frame_count == 1


def test_a_compiled_step_has_one_graph_for_every_number_of_rows() -> None:
    """The number of rows that a view is asked for became a constant of the graph."""
    aux, chained = ek.AuxHiddenStates(64, K, H), ek.ChainedHiddenStates(64, H)
    weight, gain = torch.randn(H, K * H).bfloat16(), torch.rand(K, H).bfloat16()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        n = hidden.shape[0]
        for k in range(K):
            aux.capture(k, hidden)
        sum_squares = aux.row_sum_squares(n)
        out = ek.norm_concat_linear(aux.packed(n), weight, norm_weight=gain, sum_squares=sum_squares)
        chained.load(out)
        return chained.current(n) * 2

    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=frames, fullgraph=True, dynamic=True)
    for rows in range(2, 14):
        hidden = torch.randn(rows, H).bfloat16()
        assert torch.equal(compiled(hidden), step(hidden))
    assert frames.frame_count == 1
