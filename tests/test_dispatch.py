"""Which calls go straight to their kernel, and which PyTorch gets to see as a registered op; the bits are the same."""

import contextlib
import types
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import eagle_kernels as ek
from backends import environment_of, fused_up_to, needs_compiled
from eagle_kernels import library

T, K, H, D, V = 3, 2, 48, 40, 12
SHARD = ek.VocabShard.build(V, tp_rank=0, tp_size=1)


class Dispatched(TorchDispatchMode):
    """The names of the ops of both namespaces that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("eagle_kernels"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Recorded:
    """`library.primitives` with a list of all primitives that were called."""

    def __init__(self, primitives: object) -> None:
        self.primitives, self.names = primitives, []

    def __getattr__(self, name: str) -> object:
        self.names.append(name)
        return getattr(self.primitives, name)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The registered ops that run from here on."""
    names: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.packet = name, getattr(torch.ops.eagle_kernels, name)

        def __call__(self, *arguments: object) -> object:
            names.append(self.name)
            return self.packet(*arguments)

        def __getattr__(self, attribute: str) -> object:
            return getattr(self.packet, attribute)

    for op in CALLS:
        for name in (op, f"{op}_out"):
            monkeypatch.setattr(torch.ops.eagle_kernels, name, Noted(name))
    return names


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def projection(out: torch.Tensor | None, **changes: object) -> object:
    arguments = {"norm_weight": rows(K, H), "eps": (1e-6, 1e-5), "residuals": (None, rows(T, H))} | changes
    return ek.norm_concat_linear([rows(T, H), rows(T, H)], rows(D, K * H), out=out, **arguments)


def concat(out: torch.Tensor | None, **changes: object) -> object:
    arguments = {"norm": "concat", "norm_weight": rows(K * H), "indices": torch.tensor([2, -1, 0])} | changes
    return ek.norm_concat(rows(T, K * H), num_chunks=K, out=out, **arguments)


def embedding(out: torch.Tensor | None) -> object:
    return ek.vocab_parallel_embedding(torch.tensor([3, 11, 99]), rows(V, H), SHARD, scale=1.5, out=out)


def sum_and_norm(out: torch.Tensor | None) -> object:
    return ek.add_rms_norm(rows(T, H), rows(T, H + 1)[:, 1:], rows(H), out=out, out_sum=torch.empty(T, H).bfloat16())[0]


def capture(out: torch.Tensor) -> object:
    return ek.capture_hidden(rows(T, H), rows(T, H + 1)[:, 1:], out=out)


CALLS = {
    "norm_concat_linear": (projection, D),
    "norm_concat": (concat, K * H),
    "vocab_parallel_embedding": (embedding, H),
    "add_rms_norm": (sum_and_norm, H),
    "capture_hidden": (capture, H),
}


def dispatched(call: Callable, out: torch.Tensor) -> list[str]:
    with Dispatched() as seen:
        call(out)
    return [name for name in seen.names if not name.endswith("set_cpu_isa")]


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("with_out", [True, False], ids=["out", "allocating"])
def test_a_plain_call_is_one_primitive(
    op: str, with_out: bool, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if op == "capture_hidden" and not with_out:
        pytest.skip("it is out-only")
    call, columns = CALLS[op]
    out = torch.empty(T, columns).bfloat16()
    with fused_up_to(T):
        call(out)  # chooses the plan
        recorded = Recorded(library.primitives)
        monkeypatch.setattr(library, "primitives", recorded)
        call(out if with_out else None)
    assert recorded.names == [f"{op}_out"] and registered == []


def test_a_parameter_is_plain_without_grad_mode(registered: list[str]) -> None:
    """Engines call with parameters; through the registered op a call would cost 5 us more."""
    with torch.no_grad():
        ek.add_rms_norm(rows(T, H), rows(T, H), torch.nn.Parameter(rows(H)))
    assert registered == []


def needs(what: str) -> contextlib.AbstractContextManager:
    """Something in PyTorch that has to see the ops."""
    return {
        "a dispatch mode": Dispatched,
        "FakeTensorMode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    }[what]()


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("what", ["a dispatch mode", "FakeTensorMode"])
def test_whoever_looks_at_ops_sees_the_registered_one(op: str, what: str, registered: list[str]) -> None:
    call, columns = CALLS[op]
    with needs(what):
        call(torch.empty(T, columns).bfloat16())
    assert registered == [f"{op}_out"]


@pytest.mark.parametrize("op", ["norm_concat_linear", "norm_concat", "vocab_parallel_embedding"])
def test_functorch_sees_the_registered_op(op: str, registered: list[str]) -> None:
    call, _ = CALLS[op]
    torch.func.functionalize(lambda: call(None))()
    assert op in registered


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("op", CALLS)
def test_a_trace_is_refused(op: str) -> None:
    """torch.jit.trace records nothing of a call that goes straight to its kernel: the function that it returned gave
    new memory as it was."""
    call, columns = CALLS[op]

    def traced(x: torch.Tensor) -> torch.Tensor:
        call(torch.empty(T, columns).bfloat16())
        return x

    with pytest.raises(RuntimeError, match=r"^eagle_kernels: torch\.jit\.trace is tracing the call, expected torch"):
        torch.jit.trace(traced, torch.ones(1))


@pytest.mark.parametrize("op", CALLS)
def test_tensor_subclasses_see_the_registered_op(op: str, registered: list[str]) -> None:
    call, columns = CALLS[op]
    call(TwoTensor(torch.empty(T, columns).bfloat16(), torch.empty(T, columns).bfloat16()))
    assert registered[0] == f"{op}_out"


@pytest.mark.parametrize("op", CALLS)
def test_both_ways_give_the_same_bits(op: str) -> None:
    call, columns = CALLS[op]
    plain, seen = (torch.full((T, columns), torch.nan).bfloat16() for _ in range(2))
    call(plain)
    with Dispatched() as dispatched:
        call(seen)
    assert dispatched.names[0] == f"eagle_kernels::{op}_out"
    assert not plain.isnan().any()
    assert torch.equal(plain, seen)


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
def test_a_forced_backend_is_obeyed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, columns = CALLS[op]
    recorded = Recorded(library.primitives)
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        monkeypatch.setattr(library, "primitives", recorded)
        call(torch.empty(T, columns).bfloat16())
    assert recorded.names == []


@pytest.mark.parametrize("op", ek.ops.__all__)
def test_explain_refuses_what_the_op_does_not_take(op: str) -> None:
    """A misspelled argument was ignored, and the plan was that of another call."""
    expected = rf"{op}: norn, epsilon is no argument, expected some of \[.*'out'.*\]"
    with pytest.raises(TypeError, match=expected):
        ek.explain(op, torch.zeros(1, 2), norn="chunk", epsilon=1e-6)


@pytest.mark.parametrize("name, value", [("BACKEND", "tpu"), ("CPU_ISA", "sse"), ("BATCH_INVARIANT", "yes")])
def test_a_setting_that_does_not_exist_is_the_calls_error(name: str, value: str) -> None:
    """Not the import's: an engine with a mistyped variable starts, and the command line reports it in one sentence."""
    with environment_of(**{f"EAGLE_KERNELS_{name}": value}):
        for call in (ek.capture_hidden, lambda *args, **options: ek.explain("capture_hidden", *args, **options)):
            with pytest.raises(ValueError, match=rf"EAGLE_KERNELS_{name} is '{value}', expected one of \("):
                call(torch.zeros(1, 2), out=torch.empty(1, 2))


def test_an_eps_of_its_own_for_the_post_norm() -> None:
    post_norm = {"post_norm_weight": rows(D), "eps": (1e-6, 1e-6, 1e-2)}
    out = torch.empty(T, D).bfloat16()
    projection(out, **post_norm)
    assert torch.equal(out, projection(None, **post_norm))
    assert not torch.equal(out, projection(None, **post_norm | {"eps": 1e-6}))


@needs_compiled
@pytest.mark.parametrize("op", CALLS)
def test_a_failure_that_is_no_argument_is_not_hidden(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A primitive that fails on a call that passes every check: its own error comes out, as a device's would."""
    failing = types.SimpleNamespace(**{f"{op}_out": lambda *_: (_ for _ in ()).throw(RuntimeError("device lost"))})
    call, columns = CALLS[op]
    with fused_up_to(T):
        call(torch.empty(T, columns).bfloat16())  # chooses the plan
        monkeypatch.setattr(library, "primitives", failing)
        with pytest.raises(RuntimeError, match=r"^device lost$"):
            call(torch.empty(T, columns).bfloat16())


ONE_SHOT = {
    "generator": lambda values: (value for value in values),
    "iter": iter,
    "map": lambda values: map(lambda value: value, values),
}


@pytest.mark.parametrize("how", ONE_SHOT)
@pytest.mark.parametrize("with_out", [True, False], ids=["out", "allocating"])
@pytest.mark.parametrize("argument", ["chunks", "norm_weight", "residuals", "indices", "eps"])
def test_an_iterable_is_read_once(argument: str, with_out: bool, how: str) -> None:
    arguments = {
        "chunks": [rows(T, H), rows(T, H).flip(0)],
        "norm_weight": [rows(H), rows(H).flip(0)],
        "residuals": [None, rows(T, H)],
        "indices": [torch.tensor([2, -1, 0]), torch.tensor([1, 1, 2])],
        "eps": [1e-6, 1e-2],
    }
    once = arguments | {argument: ONE_SHOT[how](arguments[argument])}
    again = arguments | {argument: ONE_SHOT[how](arguments[argument])}
    out = torch.empty(T, D).bfloat16() if with_out else None
    weight = rows(D, K * H)
    assert torch.equal(ek.norm_concat(**arguments), ek.norm_concat(**once))
    expected = ek.norm_concat_linear(weight=weight, **arguments)
    assert torch.equal(expected, ek.norm_concat_linear(weight=weight, out=out, **again))


@needs_compiled
@pytest.mark.parametrize("gain", [pytest.param(rows(K * H), id="flat"), pytest.param(rows(1, K * H), id="one-row")])
def test_a_gain_in_another_norms_form_raises(gain: torch.Tensor) -> None:
    out = torch.full((T, K * H), torch.nan).bfloat16()
    with pytest.raises(
        ValueError, match=r"norm_concat: norm_weight has shape \(.*96,?\), expected \(K, H\) = \(2, 48\)"
    ):
        concat(out, norm="chunk", norm_weight=gain)
    assert out.isnan().all()
