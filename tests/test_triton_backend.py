"""When the triton backend is chosen, and what is said where it is not."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

import eagle_kernels as ek
from backends import environment_of
from eagle_kernels import library, plan, tuned_configs
from eagle_kernels.tuned_configs import Gpu, Tiles


@pytest.fixture(autouse=True)
def no_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unsupported_reason", None)
    monkeypatch.setattr(library, "cuda_archs", ())
    plan.clear()
    yield
    plan.clear()


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> str:
    """The plan of an op on CUDA tensors, on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with environment_of():
        return str(plan.choose("norm_concat", torch.device("cuda")))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cuda_tensors_go_to_triton(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(monkeypatch, capability).startswith("norm_concat: triton/one kernel, because cuda: this build has no")


def test_an_old_gpu_gets_the_reference_and_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_gpu(monkeypatch, (7, 5))
    assert said.startswith("norm_concat: reference/plain torch") and "compute capability 7.5" in said


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in on_gpu(monkeypatch, (9, 0))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = torch.zeros(1, 8)
    wanted = r"EAGLE_KERNELS_BACKEND is 'triton'.*TRITON_INTERPRET=1"
    with environment_of(EAGLE_KERNELS_BACKEND="triton"), pytest.raises(RuntimeError, match=wanted):
        ek.capture_hidden(row, out=torch.zeros(1, 8))
    with environment_of(EAGLE_KERNELS_BACKEND="triton", TRITON_INTERPRET="1"):
        assert ek.explain("capture_hidden", row).backend == "triton"


def test_the_split_kernels_take_one_width_that_16_byte_copies_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else takes norm_concat and a library's product or, where one plan serves all T, tiles of 8 warps."""
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA A100", 80, 163 << 10))
    aligned = plan.Problem("norm_concat_linear", torch.device("cuda"), 2, 4, torch.bfloat16, 4096, (4096,))
    unaligned = (aligned._replace(widths=(2888,)), aligned._replace(elements_aligned=False))
    others = [("the chunks differ in width", aligned._replace(widths=(2048, 4096)))]
    others += [("an address, a row stride or H is", problem) for problem in unaligned]
    with environment_of():
        assert plan.triton_projection(aligned).kernel is plan.Kernel.SPLIT
        for reason, problem in others:
            chosen = plan.triton_projection(problem)
            assert chosen.kernel is plan.Kernel.TWO_STEP and chosen.reason.startswith(reason)
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        assert plan.triton_projection(aligned).tiles.num_warps == 4
        assert [plan.triton_projection(problem).tiles.num_warps for problem in unaligned] == [8, 8]


OF_FP16 = "codes times their scales may leave the range of torch.float16"
CODES = plan.Problem("norm_concat_linear_quantized", torch.device("cuda"), 2, 4, torch.bfloat16, 4096, (4096,))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"widths": (2048, 4096)}, "the chunks differ in width"),
        ({"widths": (4104,)}, "an address, a row stride or H is no multiple of 16"),
        ({"elements_aligned": False}, "an address, a row stride or H is no multiple of 16"),
        ({"widths": (4112,), "block_columns": 32}, "H=4112 is no multiple of the 32 columns that share a scale"),
        ({"widths": (4112,), "block_columns": 2 * 4112}, None),
        ({"block_columns": 128}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_codes_go_to_the_split_kernels_where_blocks_divide_a_chunk(
    changed: dict, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA A100", 80, 163 << 10))
    monkeypatch.setattr(plan, "unsupported_reason", lambda backend, device: None)
    problem = CODES._replace(**({"block_columns": 2 * 4096} | changed))
    for backend, rejected in (("triton", ""), ("cuda", f"cuda: {OF_FP16}; ")):
        chosen = plan.quantized_projection(problem._replace(code_bits=4, dtype=torch.float16), backend, "", "")
        if reason is None:
            assert (chosen.backend, chosen.kernel) == ("triton", plan.Kernel.SPLIT)
            assert chosen.reason.startswith(f"{rejected}the codes are widened as they are multiplied")
        else:
            assert (chosen.backend, chosen.kernel) == ("reference", plan.Kernel.TORCH)
            assert chosen.reason.startswith(f"the weight is dequantized in every call: {rejected}triton: {reason}")


def test_codes_are_multiplied_in_the_tiles_of_at_most_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 128 rows, and at every T where one plan serves all, though a dense weight goes to a library. Where sums are
    scaled, at up to 192 rows too, and a step has columns of one scale."""
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA A100", 80, 163 << 10))

    def tiles_of(**changed: object) -> Tiles | None:
        return plan.quantized_projection(problem._replace(**changed), "triton", "", "").tiles

    for columns in (32, 128):
        problem = CODES._replace(block_columns=columns)
        tiles = tiles_of(rows=64)
        assert tiles == tiles_of(rows=65) == tiles_of(rows=128)
        assert plan.triton_projection(problem._replace(rows=5000)).tiles is None
        assert tiles.BK > 32
        scaled = tiles_of(rows=64, scales_sums=True)
        assert min(columns, tiles.BK) == scaled.BK
        assert scaled == tiles_of(rows=192, scales_sums=True)
        with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
            assert tiles_of(rows=1) == tiles_of(rows=5000)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rows": 128}, "the codes are widened"),
        ({"rows": 129}, None),
        ({"rows": 5000, "code_bits": 4}, None),
        ({"rows": 129, "dtype": torch.float16}, None),
        # What only the split kernels ask for.
        ({"rows": 129, "widths": (2048, 4100)}, None),
        ({"rows": 129, "elements_aligned": False, "bytes_aligned": False}, None),
        ({"rows": 129, "widths": (4112,), "block_columns": 32}, None),
        ({"rows": 193, "scales_sums": True, "block_columns": 128}, None),
        ({"rows": 192, "scales_sums": True, "block_columns": 128}, "the codes are widened"),
        ({"rows": 64, "block_columns": 32, "in_blocks": True}, "the codes are widened"),
        ({"rows": 65, "block_columns": 32, "in_blocks": True}, None),
        (
            {"rows": 5000, "scales_sums": True, "block_columns": 128, "dtype": torch.float16},
            "a code times the scale of its block may leave the range of torch.float16",
        ),
        ({"rows": 129, "dtype": torch.float32}, "the numbers have 16 bits, and the rows 32"),
    ],
    ids=str,
)
def test_codes_of_many_rows_are_dequantized_once(
    changed: dict, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the library's product, which needs exact numbers of 16 bits; `explain` says why others are not."""
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA A100", 80, 163 << 10))
    problem = CODES._replace(block_columns=2 * 4096)._replace(**changed)
    chosen = plan.quantized_projection(problem, "triton", "", "")
    if reason is None:
        assert (chosen.backend, chosen.kernel, chosen.tiles) == ("triton", plan.Kernel.TWO_STEP, None)
        once = "the codes are dequantized once for the library's product"
        assert chosen.reason == f"T={problem.rows} > {plan._max_rows_of_codes(problem)}: {once}"
    else:
        assert chosen.kernel is plan.Kernel.SPLIT
        is_read = reason == "the codes are widened"
        assert chosen.reason.startswith(reason if is_read else f"dequantizing once: {reason}"), chosen
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        assert plan.quantized_projection(problem, "triton", "", "").kernel is not plan.Kernel.TWO_STEP


def test_an_amd_gpu_dequantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mm with out_dtype raises there."""
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("AMD Instinct", "gfx942", 64 << 10))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    chosen = plan.quantized_projection(CODES._replace(rows=300, block_columns=2 * 4096), "triton", "", "")
    assert chosen.kernel is plan.Kernel.SPLIT and "on AMD's GPUs" in chosen.reason


def test_an_amd_gpu_multiplies_in_fp32_where_torch_refuses_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A post norm or a bias in fp32 wants the sums of the library's product unrounded."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    mm, refusals = torch.mm, [RuntimeError("float output with half input is not enabled for ROCm")]

    def refusing(*operands: torch.Tensor, out_dtype: torch.dtype | None = None, out: torch.Tensor) -> torch.Tensor:
        if out_dtype is not None:
            raise refusals[-1]
        return mm(*operands, out=out)

    monkeypatch.setattr(torch, "mm", refusing)
    x, weight, out = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.empty(3, 5)
    with pytest.raises(RuntimeError):
        kernels._library_matmul_fp32(x, weight, None, out)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    kernels._library_matmul_fp32(x, weight, None, out)
    assert torch.equal(out, x.float() @ weight.float().t())
    refusals.append(torch.OutOfMemoryError("a copy of both in fp32 would need more"))
    with pytest.raises(torch.OutOfMemoryError):
        kernels._library_matmul_fp32(x, weight, None, out)


def test_codes_take_tiles_where_a_table_prefers_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_of", lambda device: Gpu("NVIDIA A100", 80, 163 << 10))
    tiles = Tiles(BT=16, BD=32, BK=64, splits=2, swap=True, num_warps=4, num_stages=2, finalize_columns=64)
    monkeypatch.setattr(tuned_configs, "_tuned_rows", lambda *facts: {16: tiles, 64: None})
    problem = CODES._replace(rows=64, block_columns=128)
    assert plan.triton_projection(problem).tiles is None
    assert plan.quantized_projection(problem, "triton", "", "").tiles == tiles


def test_codes_without_triton_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = CODES._replace(block_columns=32, code_bits=4, dtype=torch.float16)
    chosen = plan.quantized_projection(problem, "cuda", "", "")
    assert (chosen.backend, chosen.kernel) == ("reference", plan.Kernel.TORCH)
    assert chosen.reason.endswith(f"cuda: {OF_FP16}; triton: triton is not installed")


def test_a_workspace_made_in_inference_mode_can_be_written_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's products: "Inplace update to inference tensor outside InferenceMode is not allowed"."""
    pytest.importorskip("triton")
    workspace = importlib.import_module("eagle_kernels.triton_kernels.workspace")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.inference_mode():
        buffer = workspace._grown("norm_concat_linear", 4, torch.device("cpu"), [])
        product = workspace.matrix_in(buffer, torch.float32, 2, 2, 2)
    torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=product)
    assert (buffer == 3).all()


class StubStreams:
    """In place of a GPU's: a call of `workspace` on a stream of this name, and which stream has waited for which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = importlib.import_module("eagle_kernels.triton_kernels.workspace")
        self.waits: list[tuple[str, str]] = []
        self.current = threading.local()
        self.captured: set[str] = set()
        empty = torch.empty
        monkeypatch.setattr(self.module, "_idle", [])
        monkeypatch.setattr(self.module, "_of_thread", self.module._OfThread())
        monkeypatch.setattr(self.module, "current_stream", lambda index: self.current.name)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self.current.name, self.waits))
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.name in self.captured)
        monkeypatch.setattr(torch, "empty", lambda *size, device, **dtype: empty(*size, **dtype))

    def workspace(self, stream: str, numel: int = 8) -> torch.Tensor:
        self.current.name = stream
        return self.module.workspace("norm_concat_linear", numel, torch.device("cuda", 0))

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        assert stream.cuda_stream, "CUDA may refuse to say whether the legacy stream is captured"
        before, self.current.name = self.current.name, stream.name
        yield
        self.current.name = before


class Stream(NamedTuple):
    name: str
    waits: list[tuple[str, str]]

    @property
    def cuda_stream(self) -> int:
        return 0 if self.name == "main" else 1

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self.name, other.name))


def test_threads_do_not_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call launches its kernels after it has got its workspace, and another thread's call may come in between."""
    pytest.importorskip("triton")
    streams = StubStreams(monkeypatch)
    with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b:
        mine, other = streams.workspace("main"), a.submit(streams.workspace, "a").result()
        third = b.submit(streams.workspace, "a").result()  # one stream, but the kernels of two calls may alternate
        assert len({buffer.data_ptr() for buffer in (mine, other, third)}) == 3
        assert a.submit(streams.workspace, "a").result() is other
        assert streams.workspace("main") is mine
        assert streams.waits == []
        assert streams.workspace("second") is mine
        assert streams.waits == [("second", "main")]


def test_a_new_thread_takes_over_the_workspace_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs hold its address, so it is not freed; and threads that come and go allocate it once."""
    pytest.importorskip("triton")
    streams = StubStreams(monkeypatch)
    streams.workspace("main")
    with ThreadPoolExecutor(1) as thread:
        large = [thread.submit(streams.workspace, "a", numel).result() for numel in (8, 20)][-1]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(streams.workspace, "b").result() is large
    assert streams.waits == [("b", "a")]  # what the first thread has launched may not have run yet
    (idle,) = streams.module._idle
    assert [buffer.numel() for buffer in idle.buffers[0]] == [8, 20]


def test_branches_of_one_graph_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the thread's workspace, and nothing else orders their replay. What is outside of a capture can neither
    be waited for from inside nor wait for it: CUDA refuses the one, and the other would be captured too."""
    pytest.importorskip("triton")
    streams = StubStreams(monkeypatch)
    streams.workspace("main")
    streams.captured |= {"capture", "branch"}
    streams.workspace("capture")
    assert streams.waits == []
    streams.workspace("branch")
    streams.workspace("capture")
    assert streams.waits == [("branch", "capture"), ("capture", "branch")]
    streams.workspace("main")
    assert len(streams.waits) == 2
    streams.workspace("branch")
    assert streams.waits[2:] == [("branch", "capture")], "the eager call between them does not hide it"
    streams.workspace("eager")
    assert streams.waits[3:] == [("eager", "main")], "nor does the captured one between two eager calls"
    streams.workspace("capture")
    assert streams.waits[4:] == [("capture", "branch")]
    streams.captured.clear()
    streams.workspace("main")
    assert streams.waits[5:] == [("main", "capture"), ("main", "eager")]
