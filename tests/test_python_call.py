"""The compiled primitives as Python calls them, past the dispatcher (csrc/python_call.h): which calls go that way, and
that both ways give the same bits. Nothing is cached from call to call."""

import statistics
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from backends import needs_compiled
from eagle_kernels import dispatch, library

pytestmark = needs_compiled

T, K, H, D = 5, 3, 48, 40


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The primitives that the dispatcher is asked for from here on."""
    names: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Callable:
            def call(*arguments: object) -> object:
                names.extend([name] * name.endswith("_out"))  # choosing a plan asks for set_cpu_isa
                return getattr(torch.ops.eagle_kernels_C, name)(*arguments)

            return call

    monkeypatch.setattr(library, "primitives", library.Primitives(Noted()))
    return names


def test_every_primitive_of_an_op_is_there() -> None:
    functions = {name for name in vars(library.primitives) if not name.startswith("_")}
    packets = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("eagle_kernels_C::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    primitives = {name for name in packets if name.endswith("_out") and has_kernel(name, "CPU")}
    assert {name.removeprefix("eagle_kernels_C::") for name in primitives} <= functions


CALLS: dict[str, Callable[[], object]] = {
    "norm_concat_linear": lambda: ek.norm_concat_linear([rows(T, H)] * K, rows(D, K * H), norm_weight=rows(K, H)),
    "two_step": lambda: ek.norm_concat_linear([rows(700, 64)], rows(D, 64, dtype=torch.bfloat16)),
    "quantized": lambda: ek.norm_concat_linear([rows(T, 64)], ek.quantize(rows(D, 64), "int8_row")),
    "norm_concat": lambda: ek.norm_concat(rows(T, K * H), norm="concat", indices=torch.tensor([1, -1])),
    "residuals": lambda: ek.norm_concat([rows(T, H)] * 2, residuals=[None, rows(T, H)], sum_squares=None),
    "vocab_parallel_embedding": lambda: ek.vocab_parallel_embedding(
        torch.tensor([1]), rows(64, H), ek.VocabShard.build(64, tp_rank=0, tp_size=1), scale=2.0
    ),
    "add_rms_norm": lambda: ek.add_rms_norm(rows(T, H), rows(T, H), rows(H), eps=0)[0],
    "capture_hidden": lambda: ek.capture_hidden(rows(T, 4, H), out=torch.empty(T, H).bfloat16()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_with_plain_tensors_needs_no_dispatcher(call: str, dispatched: list[str]) -> None:
    CALLS[call]()
    assert dispatched == []


@pytest.mark.parametrize("call", CALLS)
def test_both_ways_give_the_same_bits(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = CALLS[call]()
    monkeypatch.setattr(library, "primitives", torch.ops.eagle_kernels_C)
    assert torch.equal(direct, CALLS[call]())


def test_a_profiler_sees_the_primitive(dispatched: list[str]) -> None:
    with torch.profiler.profile() as profile:
        CALLS["add_rms_norm"]()
    assert dispatched == ["add_rms_norm_out"]
    assert "eagle_kernels_C::add_rms_norm_out" in {event.key for event in profile.key_averages()}


def test_a_lazy_view_goes_to_the_dispatcher(dispatched: list[str]) -> None:
    """The memory of a lazy negation still has the values before it, and the result had their bits."""
    for dtype in (torch.float32, torch.float16):  # those of the parts of complex tensors, which negate lazily
        hidden, residual, gain = rows(T, H, dtype=dtype), rows(T, H, seed=1, dtype=dtype), rows(H, dtype=dtype)
        total = ek.add_rms_norm(torch._neg_view(hidden), residual, gain)[1]
        assert torch.equal(total, -hidden + residual)
    assert dispatched == ["add_rms_norm_out"] * 2
    hidden, residual, gain = rows(T, H), rows(T, H, seed=1), rows(H)
    zeros = torch._efficientzerotensor((T, H), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="hidden is a lazy view"):
        ek.add_rms_norm(zeros, residual, gain)


def test_a_lazy_copy_is_made_before_it_is_written() -> None:
    original = rows(T, H)
    kept, copy = original.clone(), torch._lazy_clone(original)
    ek.capture_hidden(rows(T, H, seed=1), out=copy)
    assert torch.equal(original, kept) and torch.equal(copy, rows(T, H, seed=1))


def refcounts(values: list[object]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


def test_no_reference_is_kept_or_lost() -> None:
    dtype = torch.float16  # a dtype that lazy negations have
    chunks, gains = [rows(T, H, dtype=dtype) for _ in range(K)], [rows(H, dtype=dtype) for _ in range(K)]
    weight, out, arguments = rows(D, K * H, dtype=dtype), rows(T, D, dtype=dtype), {"norm_weight": gains}
    calls = {
        "done": lambda: ek.norm_concat_linear(chunks, weight, out=out, **arguments),
        "refused": lambda: ek.norm_concat_linear(chunks, weight[:, 1:], out=out, **arguments),
        "to the dispatcher": lambda: ek.norm_concat_linear(
            [torch._neg_view(chunks[0]), *chunks[1:]], weight, out=out, **arguments
        ),
    }
    watched = [*chunks, *gains, weight, out, chunks, gains]
    before = refcounts(watched)
    for call in calls.values():
        for _ in range(3):
            try:
                call()
            except ValueError:
                continue
    assert refcounts(watched) == before


# Changes in place that turn the arguments of a good call into what no kernel takes: name, change, error message.
CHANGES: dict[str, tuple[Callable[[dict], None], str]] = {
    "a weight resized in place": (lambda a: a["weight"].resize_(D, K * H - 8), r"weight has shape \(40, 136\)"),
    "a weight of fewer rows": (lambda a: a["weight"].resize_(D - 8, K * H), r"out has shape \(5, 40\)"),
    "a weight's dtype": (lambda a: _swap(a["weight"], rows(D, K * H, dtype=torch.float32)), "weight has dtype"),
    "a weight's last stride": (lambda a: _swap(a["weight"], rows(K * H, D).t()), r"weight has strides \(1, 40\)"),
    "a weight's device": (lambda a: _swap(a["weight"], torch.empty(D, K * H, device="meta")), "weight"),
    "a chunk's rows": (lambda a: a["chunks"][1].resize_(T - 1, H), r"chunks\[1\] has shape \(4, 48\)"),
    "a chunk's dtype": (lambda a: _swap(a["chunks"][2], rows(T, H, dtype=torch.float16)), r"chunks\[2\] has dtype"),
    "a chunk's last stride": (lambda a: a["chunks"][0].t_().resize_(T, H).as_strided_((T, H), (1, T)), r"chunks\[0\]"),
    "another chunk in the list": (lambda a: a["chunks"].__setitem__(0, rows(T, H + 1)), r"widths \[49, 48, 48\]"),
    "no chunk in the list": (lambda a: a["chunks"].__setitem__(1, None), r"chunks\[1\] is a NoneType"),
    "a gain's length": (lambda a: a["norm_weight"].resize_(K, H - 1), r"norm_weight has shape \(3, 47\)"),
    "out's rows that overlap": (lambda a: a["out"].as_strided_((T, D), (D - 1, 1)), r"out has strides \(39, 1\)"),
    "out over the weight": (lambda a: a["out"].set_(a["weight"][:T, :D]), "out overlaps weight"),
    "an index that is none": (lambda a: a.__setitem__("indices", rows(T)), r"indices\[0\] has dtype"),
    "eps": (lambda a: a.__setitem__("eps", -1.0), "eps is -1.0"),
}


def _swap(tensor: Tensor, other: Tensor) -> None:
    """The same Python object with another's dtype, strides, device and memory."""
    torch.utils.swap_tensors(tensor, other)


@pytest.mark.parametrize("change", CHANGES)
def test_a_good_call_lets_no_bad_one_through(change: str) -> None:
    """The same objects again, one of them changed in place: the call raises its usual error and writes nothing."""
    arguments = {
        "chunks": [rows(T, H, seed=k) for k in range(K)],
        "weight": rows(D, K * H),
        "norm_weight": rows(K, H),
        "out": torch.zeros(T, D).bfloat16(),
    }

    def call() -> Tensor:
        options = {name: value for name, value in arguments.items() if name not in ("chunks", "weight")}
        return ek.norm_concat_linear(arguments["chunks"], arguments["weight"], **options)

    for _ in range(3):
        call()
    edit, message = CHANGES[change]
    edit(arguments)
    out = arguments["out"].clone()
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    assert torch.equal(arguments["out"], out)


class Watched(Tensor):
    """A subclass: torch shows it the ops that it is an argument of."""


@pytest.mark.parametrize("language", ["C", "Python"])
def test_operands_are_plain_tensors_alone_and_in_lists(language: str) -> None:
    are_plain = library.primitives.are_plain if language == "C" else dispatch._have_plain_types
    x, parameter, watched = rows(T, H), torch.nn.Parameter(rows(H)), rows(T, H).as_subclass(Watched)
    assert are_plain(x, None, parameter, [x, None, parameter], [])
    for other in (watched, [watched], [x, watched], (x,), [x, [x]], 1.0, "x", torch.bfloat16):
        assert not are_plain(x, other) and not are_plain(other, x), other


def test_threads_of_python_go_on_while_a_kernel_runs() -> None:
    """Otherwise a thread that only reads the clock would see a gap as long as the kernel, here 20 ms."""
    chunks, weight = [rows(1024, 1024) for _ in range(K)], rows(1024, K * 1024)
    gaps, stop = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            gaps[0] = max(gaps[0], now - last)
            last = now

    def longest_gap() -> float:
        """As a share of a call's time."""
        gaps[0], started = 0.0, time.perf_counter()
        ek.norm_concat_linear(chunks, weight)
        return gaps[0] / (time.perf_counter() - started)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert statistics.median(longest_gap() for _ in range(21)) < 0.6
    finally:
        stop.set()
        thread.join()
