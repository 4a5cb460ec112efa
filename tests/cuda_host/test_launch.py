"""The launch layer of the wheel over the emulated CUDA runtime: device, stream, attributes, errors."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import eagle_kernels as ek
from backends import environment_of
from guards import same_bits

pytestmark = pytest.mark.usefixtures("emulated")

ROOT = Path(__file__).resolve().parents[2]
HOPPER, ADA = {"capability": 90, "shared_bytes": 227 << 10}, {"capability": 89, "shared_bytes": 99 << 10}


@pytest.fixture
def gpu(emulation: ModuleType) -> Callable[..., int]:
    """Puts the tensors on a GPU like this and returns its index; clears the recorded launches."""

    def use(**facts: int) -> int:
        index = emulation.set_device(descending_warps=False, **facts)
        emulation.take_launches()
        return index

    yield use
    emulation.set_stream(0)
    emulation.set_driver(13000)


def capture() -> torch.Tensor:
    hidden = torch.arange(3 * 64, dtype=torch.float32).reshape(3, 64)
    return ek.capture_hidden(hidden, out=torch.empty(3, 64))


def test_a_launch_goes_to_the_tensors_device_and_its_current_stream(
    emulation: ModuleType, gpu: Callable[..., int]
) -> None:
    devices = [gpu(**HOPPER), gpu(**ADA)]
    assert devices[0] != devices[1]
    for device in (*devices, devices[0]):
        for stream in (0, 7):
            emulation.set_index(device)
            emulation.set_stream(stream)
            assert same_bits(capture(), torch.arange(3 * 64, dtype=torch.float32).reshape(3, 64))
            (launch,) = emulation.take_launches()
            assert (launch.device, launch.stream) == (device, stream)
            assert (launch.grid, launch.threads, launch.rows, launch.cluster) == ([3, 1], 32, 1, 1)
            assert emulation.current_device() == 0  # restored


def projected(T: int, **options: object) -> torch.Tensor:
    """A projection whose plan depends on T and the options; `weight` is a format of codes."""
    weight, gain = torch.randn(72, 256).bfloat16(), torch.rand(2, 128).bfloat16()
    codes = options.pop("weight", None)
    chunks = [torch.randn(T, 128).bfloat16() for _ in range(2)]
    return ek.norm_concat_linear(chunks, ek.quantize(weight, codes) if codes else weight, norm_weight=gain, **options)


def in_one_plan() -> torch.Tensor:
    with environment_of(EAGLE_KERNELS_BACKEND="cuda", EAGLE_KERNELS_BATCH_INVARIANT="1"):
        return projected(40)


def embedded() -> torch.Tensor:
    shard = ek.VocabShard.build(200, tp_rank=0, tp_size=1)
    return ek.vocab_parallel_embedding(torch.arange(5), torch.randn(200, 128).bfloat16(), shard)


# A call of each kernel, and of each plan of the projection.
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "norm_concat": lambda: ek.norm_concat([torch.randn(9, 128).bfloat16()] * 2),
    "vocab_parallel_embedding": embedded,
    "add_rms_norm": lambda: ek.add_rms_norm(*[torch.randn(9, 128).bfloat16()] * 2, torch.rand(128).bfloat16())[0],
    "fused": lambda: projected(3),
    "wgmma": lambda: projected(40),
    "split": in_one_plan,
    "library": lambda: projected(200),
    "epilogue": lambda: projected(200, post_norm_weight=torch.rand(72).bfloat16()),
    "fused codes": lambda: projected(3, weight="fp8_row"),
    "wgmma codes": lambda: projected(40, weight="fp8_row"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_goes_to_the_tensors_device_and_stream(
    name: str, emulation: ModuleType, gpu: Callable[..., int]
) -> None:
    """With its workspace; the current device is put back."""
    results = []
    devices = [gpu(**HOPPER), gpu(**HOPPER | {"shared_bytes": 225 << 10})]
    for device, stream in itertools.product((*devices, devices[0]), (0, 7)):
        emulation.set_index(device)
        emulation.set_stream(stream)
        torch.manual_seed(0)
        results.append(CALLS[name]())
        launches = emulation.take_launches()
        assert {(launch.device, launch.stream) for launch in launches if launch.threads} == {(device, stream)}
        assert {launch.device for launch in launches} == {device}
        assert emulation.current_device() == 0
        assert same_bits(results[0], results[-1])


@pytest.mark.parametrize(("gpu", "counts"), [("nvidia-h100-80gb-hbm3", {1, 2}), ("nvidia-h200", {1, 2, 3})])
def test_as_many_clusters_run_at_once_as_its_driver_says(gpu: str, counts: set[int], emulation: ModuleType) -> None:
    """The splits of every GPU with as many SMs stand on these counts."""
    device = json.loads((ROOT / "bench/results" / gpu / "device.json").read_text(encoding="utf-8"))
    sms = device["attributes"]["multiprocessors"]
    for row in device["clusters"]:
        blocks = row["at_once"]["1"] // sms
        for size in range(1, 9):
            assert emulation.clusters_at_once(sms, size, blocks) == row["at_once"][str(size)], (row, size)
    assert {row["at_once"]["1"] // sms for row in device["clusters"]} == counts


@pytest.mark.parametrize("sms", [1, 2, 16, 18, 78, 114, 144, 148])
def test_other_gpus_have_room_for_no_more_blocks_than_they_have(sms: int, emulation: ModuleType) -> None:
    for size, blocks in itertools.product(range(1, 9), (1, 2, 3)):
        at_once = emulation.clusters_at_once(sms, size, blocks)
        assert at_once <= sms * blocks // size and (at_once > 0) == (size <= min(sms, 16) * blocks), (size, blocks)


def test_only_hopper_and_later_start_before_the_previous_kernel_has_ended(
    emulation: ModuleType, gpu: Callable[..., int]
) -> None:
    for facts, pdl in ((HOPPER, True), (ADA, False), (HOPPER | {"capability": 120}, True)):
        gpu(**facts)
        capture()
        assert [launch.pdl for launch in emulation.take_launches()] == [pdl]


def test_a_kernel_asks_once_on_each_device_for_more_than_48_KB(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    """The ring takes 83 KB. No other test has these sizes: the kernel must not have asked before."""
    chunks = [torch.randn(8, 64).half() for _ in range(8)]
    gains, weight = [torch.rand(64).half() for _ in range(8)], torch.randn(4256, 512).half()
    shared = 226 << 10  # a GPU that no other test has
    index = gpu(capability=90, shared_bytes=shared)
    results = [ek.norm_concat_linear(chunks, weight, norm_weight=gains) for _ in range(2)]
    asked, *launches = emulation.take_launches()
    assert (asked.device, asked.threads, asked.shared_bytes) == (index, 0, shared)
    assert [launch.threads for launch in launches] == [256, 256]
    assert all(48 << 10 < launch.shared_bytes <= shared for launch in launches)

    other = gpu(capability=90, shared_bytes=shared - 1024)
    results.append(ek.norm_concat_linear(chunks, weight, norm_weight=gains))
    asked, launch = emulation.take_launches()
    assert (asked.device, asked.threads, launch.device) == (other, 0, other)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize(
    ("T", "H", "rows"), [(3, 64, 1), (1055, 64, 3), (9000, 64, 8), (9001, 896, 4), (9000, 100, 1), (9000, 4096, 1)]
)
def test_rows_share_a_block_where_every_sm_has_two(
    T: int, H: int, rows: int, emulation: ModuleType, gpu: Callable[..., int]
) -> None:
    gpu(**HOPPER)
    emulation.run_kernels(False)
    hidden, gain = torch.empty(T, H).bfloat16(), torch.ones(H).bfloat16()
    try:
        ek.capture_hidden(hidden, out=torch.empty_like(hidden))
        ek.add_rms_norm(hidden, hidden, gain)
        ek.norm_concat([hidden, hidden])
    finally:
        emulation.run_kernels(True)
    for launch, y in zip(emulation.take_launches(), (1, 1, 2), strict=True):
        assert (launch.grid, launch.rows) == ([-(-T // rows), y], rows)


def test_a_grid_beyond_cudas_limit_is_an_error(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    """In 32 bits 2^32 + 1 blocks would be one, and the launch would succeed. No page is touched."""
    gpu(**HOPPER)
    emulation.run_kernels(False)
    try:
        for count in (2**31, 2**32 + 1):
            rows = torch.zeros(1, 1).bfloat16().expand(count, 1)
            with pytest.raises(RuntimeError, match=r"norm_concat: CUDA has error 9 .*expected none"):
                ek.norm_concat([rows], norm="none", out=torch.empty(count, 1, dtype=torch.bfloat16))
    finally:
        emulation.run_kernels(True)
    assert emulation.take_launches() == []


def test_scales_further_apart_than_32_bits_are_an_error(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    """The fused kernel keeps the offset of a block's scale in 32 bits, and would read another scale."""
    gpu(**HOPPER)
    H, D = 256, 256
    codes, x = torch.ones(D, H).to(torch.float8_e4m3fn), torch.ones(1, H).bfloat16()
    for stride, is_read in ((1 << 20, True), (1 << 32, False)):
        memory = torch.empty(stride + 2, dtype=torch.uint8)
        scales = memory.as_strided((2, 2), (stride, 1))
        scales.copy_(torch.tensor([[127, 127], [128, 129]]))  # 1, 1, 2 and 4
        weight = ek.QuantizedWeight(codes, scales.view(torch.float8_e8m0fnu), "fp8_block128")
        with environment_of(EAGLE_KERNELS_BACKEND="cuda"):
            if is_read:
                (row,) = ek.norm_concat_linear([x], weight, norm="none")
                assert torch.equal(row, torch.tensor([256.0, 768.0]).bfloat16().repeat_interleave(128))
                continue
            with pytest.raises(RuntimeError, match="norm_concat_linear_quantized: CUDA has error 801"):
                ek.norm_concat_linear([x], weight, norm="none")


def test_a_rows_bits_do_not_depend_on_the_rows_of_its_block(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    """7 rows, in blocks of one and of three; the last block of three has two rows too many."""
    hidden, gain = torch.randn(7, 512).bfloat16(), torch.rand(512).bfloat16()
    ids = torch.tensor([3, -1, 6, 0, 2**40, 5, 1])

    def results() -> list[torch.Tensor]:
        squares = torch.empty(7, 1)
        captured = ek.capture_hidden(hidden, hidden.flip(0), out=torch.empty_like(hidden), sum_squares=squares[:, 0])
        mean = ek.capture_hidden(hidden.view(7, 2, 256), out=torch.empty(7, 256).bfloat16())
        embedded = ek.vocab_parallel_embedding(ids, hidden, ek.VocabShard.build(7, tp_rank=0, tp_size=1))
        concat = ek.norm_concat([hidden, hidden], norm="concat", indices=ids)
        normed = ek.norm_concat([hidden, hidden], indices=ids, norm_weight=[gain, gain])
        return [captured, squares, mean, embedded, concat, normed, *ek.add_rms_norm(hidden, hidden, gain)]

    gpu(**HOPPER)
    alone, rows_of_block = results(), [launch.rows for launch in emulation.take_launches()]
    assert set(rows_of_block) == {1}
    gpu(**HOPPER, multiprocessors=1)
    together, rows_of_block = results(), [launch.rows for launch in emulation.take_launches()]
    assert set(rows_of_block) == {3}
    for one, several in zip(alone, together, strict=True):
        assert same_bits(one, several)


def test_before_a_library_product_there_is_one_launch_for_all_rows(
    emulation: ModuleType, gpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many rows as Triton would take in two rounds; Triton is not imported."""
    gpu(**HOPPER)
    monkeypatch.setitem(sys.modules, "triton", None)
    chunks, weight = [torch.randn(4097, 16).bfloat16() for _ in range(2)], torch.randn(24, 32).bfloat16()
    out = ek.norm_concat_linear(chunks, weight)
    (launch,) = emulation.take_launches()
    assert (launch.grid[0], launch.rows) == (513, 8)
    normed = ek.norm_concat(chunks)
    assert same_bits(out, torch.mm(normed, weight.t()))


def test_of_a_concat_that_is_there_the_product_is_all(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    gpu(**HOPPER)
    packed, weight = torch.randn(20, 2 * 16 + 3).bfloat16()[:, :32], torch.randn(24, 32).bfloat16()
    expected = torch.mm(packed, weight.t())
    chunks = list(packed.split(16, dim=1))
    for sources in (packed, chunks):
        out = ek.norm_concat_linear(sources, weight, norm="none", num_chunks=2)
        assert same_bits(out, expected) and emulation.take_launches() == []
    index, residual = torch.arange(20), torch.zeros(20, 16).bfloat16()
    others = [{"indices": [index, None]}, {"residuals": [None, residual]}, {"norm": "chunk"}]
    for more in others:
        ek.norm_concat_linear(chunks, weight, **{"norm": "none"} | more)
        assert len(emulation.take_launches()) == 1
    ek.norm_concat_linear(chunks[::-1], weight, norm="none")
    assert len(emulation.take_launches()) == 1


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (-1, "the tensors are on cuda:-1, expected an index below 64"),
        (64, "the tensors are on cuda:64, expected an index below 64"),
        (63, r"CUDA has error 101 \(invalid device ordinal\), expected none"),
    ],
)
def test_a_device_that_is_not_there(index: int, message: str, emulation: ModuleType, gpu: Callable[..., int]) -> None:
    gpu(**HOPPER)
    emulation.set_index(index)
    with pytest.raises(RuntimeError, match=f"capture_hidden: {message}"):
        capture()
    assert emulation.take_launches() == []


def test_an_error_of_the_launch_is_told_and_the_device_put_back(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    gpu(**HOPPER)
    gpu(**ADA)
    emulation.fail_next_launch(400)
    with pytest.raises(RuntimeError, match=r"capture_hidden: CUDA has error 400 \(emulated error\), expected none"):
        capture()
    assert emulation.current_device() == 0
    capture()


def test_a_driver_older_than_the_runtime_is_named(emulation: ModuleType, gpu: Callable[..., int]) -> None:
    """Plans do not let such a driver get here (tests/test_cuda_backend.py)."""
    gpu(**HOPPER)
    emulation.set_driver(12090)
    with pytest.raises(RuntimeError, match="capture_hidden: CUDA has error 35"):
        capture()
