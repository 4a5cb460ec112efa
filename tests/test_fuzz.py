"""Any call of any op, on every backend and instruction set that runs here, against float64: `make fuzz`.

Each case is one call: the same tensors for all instruction sets. A read or write outside an operand is a segmentation
fault; build/fuzz/ then has the call that the process died in.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

import eagle_kernels as ek
from backends import CPU_ISAS, environment_of
from eagle_kernels import ops
from eagle_kernels.ops.store_context_kv import StoreContextKV, store_context_kv
from fuzz_calls import Call, draw_call, draw_store
from fuzz_truth import Truth, truths_of
from guards import same_bits, same_bits_or_nan
from test_store_context_kv import check_written

LAST_CALLS = Path(__file__).resolve().parent.parent / "build/fuzz"
SMALL = {"T": (0, 1, 2, 3, 5), "N": (0, 1, 4), "H": (1, 8, 24, 32, 33, 96, 100), "K": (1, 2, 3), "D": (1, 5, 40)}
EVERY_PATH = [
    *({"EAGLE_KERNELS_BACKEND": "cpu", "EAGLE_KERNELS_CPU_ISA": isa} for isa in CPU_ISAS),
    {"EAGLE_KERNELS_BACKEND": "reference"},
]


@pytest.mark.parametrize("op", ops.__all__)
def test_any_call(op: str, for_any: Callable, request: pytest.FixtureRequest, record_property: Callable) -> None:
    record_property("paths", [*CPU_ISAS, "reference"])
    with last_call(request.node.name) as remember:

        def check_everywhere(data: st.DataObject) -> None:
            call = draw_call(op, data, {})
            remember(call)
            invariant = str(int(data.draw(st.booleans(), label="batch_invariant")))
            truths = [] if call.overlaps else truths_of(call)
            for variables in EVERY_PATH:
                note(f"{call} under {variables}, batch invariant {invariant}")
                with environment_of(**variables, EAGLE_KERNELS_BATCH_INVARIANT=invariant):
                    check(call, truths)

        for_any(check_everywhere, few=30)


def check(call: Call, truths: list[Truth]) -> None:
    """Runs the call twice on the active backend: it must match the truth, then give the same bits, and write nothing
    but its outputs."""
    copies = [tensor.clone() for tensor in call.read_only]
    call.poison_outputs()
    if call.overlaps:
        with pytest.raises(ValueError, match=rf"^{call.op}: out overlaps "):
            call.run()
    else:
        results = [result.clone() for result in call.run()]
        for truth, result in zip(truths, results, strict=True):
            missed = truth.miss(result)
            assert missed is None, missed
        call.poison_outputs()
        assert all(map(same_bits, call.run(), results)), "a second run gives other bits"
    assert not call.written_beside_outputs(), "memory beside an output was written"
    assert all(map(same_bits_or_nan, call.read_only, copies)), "an input was written"


def check_any_call(
    op: str, path: str, for_any: Callable, request: pytest.FixtureRequest, record_property: Callable, few: int
) -> None:
    """Random calls of an op on the active backend only, which the saved run calls `path`."""
    record_property("paths", [path])
    with last_call(f"{path.replace(', ', '-')}-{request.node.name}") as remember:

        def check_one(data: st.DataObject) -> None:
            call = draw_call(op, data, SMALL)
            remember(call)
            check(call, [] if call.overlaps else truths_of(call))

        for_any(check_one, few=few)


def test_any_store_of_context(for_any: Callable, request: pytest.FixtureRequest, record_property: Callable) -> None:
    """The op behind `ContextKV`, which is no public call."""
    record_property("paths", [*CPU_ISAS, "reference"])
    check_any_store(EVERY_PATH, for_any, request, few=60)


def check_any_store(paths: list[dict[str, str]], for_any: Callable, request: pytest.FixtureRequest, few: int) -> None:
    with last_call(request.node.name) as remember:

        def check_everywhere(data: st.DataObject) -> None:
            record = draw_store(data)
            for variables in paths:
                remember((variables, record))
                with environment_of(**variables):
                    check_store(record)

        for_any(check_everywhere, few=few)


def check_store(record: StoreContextKV, store: Callable[[StoreContextKV], None] = store_context_kv) -> None:
    """Runs the record twice on the active backend, as `check` does with a public call."""
    read = [value for value in record if isinstance(value, torch.Tensor)][: -len(record.outputs)]
    copies = [tensor.clone() for tensor in read]
    written = []
    for _ in range(2):
        for cache in record.outputs:
            (cache if cache._base is None else cache._base).fill_(float("nan"))
        store(record)
        check_written(record)
        written.append([cache.clone() for cache in record.outputs])
    assert all(map(same_bits_or_nan, *written)), "a second run gives other bits"
    assert all(map(same_bits_or_nan, read, copies)), "an input was written"


@contextlib.contextmanager
def last_call(test: str) -> Iterator[Callable[[object], None]]:
    """A function that writes the next call to a file, which remains if the process dies."""
    LAST_CALLS.mkdir(parents=True, exist_ok=True)
    path = LAST_CALLS / f"{test}.txt"
    with path.open("w", encoding="utf-8") as file:

        def remember(call: object) -> None:
            file.seek(0)
            file.truncate()
            file.write(f"{call!r}\n")
            file.flush()

        yield remember
    path.unlink()


def _wrong_value(results: tuple[torch.Tensor, ...], arguments: tuple) -> None:
    results[0][..., -1] = 3.0


def _lost_nan(results: tuple[torch.Tensor, ...], arguments: tuple) -> None:
    results[0].nan_to_num_()


def _written_input(results: tuple[torch.Tensor, ...], arguments: tuple) -> None:
    arguments[0][:1] = 3


@pytest.mark.parametrize(
    ("op", "fault"),
    [(op, _wrong_value) for op in ops.__all__]
    + [("add_rms_norm", fault) for fault in (_lost_nan, _written_input)]
    + [("norm_concat", _lost_nan)],
)
def test_a_fault_is_found(op: str, fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ek, op)

    def faulty(*arguments: object, **options: object) -> object:
        results = right(*arguments, **options)
        fault(results if isinstance(results, tuple) else (results,), arguments)
        return results

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data())
    def check_any(data: st.DataObject) -> None:
        call = draw_call(op, data, SMALL)
        check(call, [] if call.overlaps else truths_of(call))

    monkeypatch.setattr(ek, op, faulty)
    with pytest.raises(AssertionError):
        check_any()


def _row_elsewhere(record: StoreContextKV) -> None:
    record.k_cache[..., -1].fill_(3.0)


def _rounded_before(record: StoreContextKV) -> None:
    record.k_cache.mul_(1 + 2 * torch.finfo(record.kv.dtype).eps)


@pytest.mark.parametrize("fault", [_row_elsewhere, _rounded_before])
def test_a_fault_of_a_store_is_found(fault: Callable) -> None:
    def faulty(record: StoreContextKV) -> None:
        store_context_kv(record)
        fault(record)

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data())
    def check_any(data: st.DataObject) -> None:
        check_store(draw_store(data), faulty)

    with pytest.raises(AssertionError):
        check_any()


def test_a_process_that_dies_leaves_its_call() -> None:
    """It dies of a read of one byte past an operand."""
    code = """if True:
        import ctypes, torch
        from fuzz_calls import Guarded
        from test_fuzz import last_call
        with last_call("dies") as remember:
            end = Guarded.of(torch.zeros(3, 5), 2, "end", 0.0).buffer
            remember("the call")
            ctypes.string_at(end.data_ptr() + end.nbytes - 1, 1)
            remember("the next call")
            ctypes.string_at(end.data_ptr() + end.nbytes, 1)
    """
    died = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent)
    assert died.returncode == -signal.SIGSEGV
    left = LAST_CALLS / "dies.txt"
    assert left.read_text("utf-8") == "'the next call'\n"
    left.unlink()
