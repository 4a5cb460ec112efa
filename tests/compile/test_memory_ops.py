"""The compile gate of the four memory-bound ops: what their binaries need on every arch, and how few they are."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from eagle_kernels import plan
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.ops.sources import Sources

if plan.SETTINGS.triton_interpret:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)
pytest.importorskip("triton")

from eagle_kernels.triton_kernels import launch as launching

from compile.offline import ARCHS, Arch, Launch, Row, launches, resources

OPS = ("add_rms_norm", "capture_hidden", "norm_concat", "vocab_parallel_embedding")
KERNELS = {op: importlib.import_module(f"eagle_kernels.triton_kernels.{op}") for op in OPS}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# 64 registers leave room for two programs of 16 warps on an NVIDIA SM, 128 for one. The presets must have two.
MAX_REGISTERS, MAX_REGISTERS_OF_A_FEATURE = 64, 128

Calls = dict[str, Callable[[], None]]


def rows(T: int, H: int, dtype: torch.dtype = BF16, *, stride: int | None = None) -> Tensor:
    return torch.empty_strided((T, H), (stride or H, 1), dtype=dtype, device="meta")


def vector(length: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(length, dtype=dtype, device="meta")


def capture(T: int, H: int, dtype: torch.dtype = BF16, *, residual: bool = True, statistics: bool = True, **layout):
    x = rows(T, H, dtype, **layout)
    KERNELS["capture_hidden"].run((x, x if residual else None, x, vector(T, FP32) if statistics else None))


def capture_mean(T: int, S: int, H: int, dtype: torch.dtype = BF16):
    hidden = torch.empty(T, S, H, dtype=dtype, device="meta")
    KERNELS["capture_hidden"].run((hidden, None, rows(T, H, dtype), vector(T, FP32)))


def add_norm(T: int, H: int, dtype: torch.dtype = BF16, *, gain: torch.dtype = BF16, **layout):
    x = rows(T, H, dtype, **layout)
    KERNELS["add_rms_norm"].run((x, x, vector(H, gain), 1e-6, 1.0, x, x))


def embed(T: int, H: int, dtype: torch.dtype = BF16, *, scale=None, ids=torch.int64, shard=(0, 9, 9, 9, 9), **layout):
    scale = scale if isinstance(scale, tuple) else (scale, None)
    table, out = rows(sum(shard) + 1, H, dtype, **layout), rows(T, H, dtype, **layout)
    KERNELS["vocab_parallel_embedding"].run((vector(T, ids), table, *shard, *scale, out))


def concat(
    N: int,
    widths: tuple[int, ...],
    norm: str,
    dtype: torch.dtype = BF16,
    *,
    packed: bool = False,
    gains: tuple[int, ...] | None = None,
    gain_dtype: torch.dtype = BF16,
    eps: tuple[float, ...] = (1e-6,),
    residuals: tuple[bool, ...] = (),
    indices: tuple[torch.dtype | None, ...] = (),
    statistics: bool = False,
    source_rows: int | None = None,
    **layout,
):
    T, K, width = source_rows or N, len(widths), sum(widths)
    chunks = [rows(T, width, dtype, **layout)] if packed else [rows(T, H, dtype, **layout) for H in widths]
    if gains is None:
        gains = {"none": (), "chunk": (K, widths[0]), "concat": (width,)}[norm]
    matrix = [torch.empty(gains, dtype=gain_dtype, device="meta")] if gains else []
    sources = Sources(
        chunks,
        K,
        norm,
        [vector(H, gain_dtype) for H in widths] if len(set(widths)) > 1 and norm == "chunk" else matrix,
        list(eps),
        1.0,
        [chunk if given else None for chunk, given in zip(chunks, residuals, strict=bool(residuals))],
        [None if kind is None else vector(N, kind) for kind in indices],
        rows(T, K, FP32) if statistics else None,
    )
    KERNELS["norm_concat"].run((sources, rows(N, width, dtype)))


def preset_calls(op: str) -> Calls:
    """Every distinct call that the models of shapes.json make; no binary depends on the row count."""
    models = model_shapes().values()
    widths = {model.target_hidden_size for model in models}
    widths |= {stage.D for model in models for stage in model.stages if stage.context is None}
    if op == "norm_concat":
        stages = sorted({(stage.K, stage.H) for model in models for stage in model.stages})
        return {
            f"K{K}-H{H}-{norm}": lambda K=K, H=H, norm=norm: concat(4, (H,) * K, norm, residuals=(True,) * K)
            for K, H in stages
            for norm in ("none", "chunk", "concat")
        }
    call = {"capture_hidden": capture, "add_rms_norm": add_norm, "vocab_parallel_embedding": embed}[op]
    return {f"H{H}": lambda H=H: call(4, H) for H in sorted(widths)}


FEATURES: dict[str, Calls] = {
    "capture_hidden": {
        "copy": lambda: capture(3, 4096, residual=False, statistics=False),
        "streams": lambda: capture_mean(3, 4, 7168),
        "streams-fp32": lambda: capture_mean(3, 4, 4096, FP32),
        "streams-odd": lambda: capture_mean(3, 4, 2881),
        "fp16-statistics": lambda: capture(3, 4096, FP16, residual=False),
        "fp32": lambda: capture(3, 8192, FP32),
        "blocks": lambda: capture(3, 16384),
        "odd": lambda: capture(3, 2881),
        "unaligned-rows": lambda: capture(3, 4096, stride=4097),
        "one-column": lambda: capture(3, 1),
    },
    "add_rms_norm": {
        "fp32-gain": lambda: add_norm(3, 7168, gain=FP32),
        "fp32": lambda: add_norm(3, 8192, FP32, gain=FP32),
        "fp16": lambda: add_norm(3, 4096, FP16, gain=FP16),
        "blocks": lambda: add_norm(3, 20000),
        "odd": lambda: add_norm(3, 2881),
        "one-column": lambda: add_norm(3, 1),
    },
    "vocab_parallel_embedding": {
        "float-scale": lambda: embed(3, 5376, scale=73.3),
        "tensor-scale": lambda: embed(3, 5376, scale=(None, vector(1))),
        "int32-fp16": lambda: embed(3, 4096, FP16, ids=torch.int32),
        "fp32": lambda: embed(3, 8192, FP32, scale=2.0),
        "blocks": lambda: embed(3, 20000),
        "odd": lambda: embed(3, 101, scale=2.0),
    },
    "norm_concat": {
        **{f"K{K}": lambda K=K: concat(3, (2880,) * K, "chunk", residuals=(True,) * K) for K in range(1, 9)},
        **{f"K{K}-concat": lambda K=K: concat(300, (8192,) * K, "concat") for K in (1, 3, 8)},
        "packed": lambda: concat(3, (4096,) * 3, "chunk", packed=True, residuals=(True,)),
        "packed-concat": lambda: concat(3, (4096,) * 3, "concat", packed=True, statistics=True),
        "unequal": lambda: concat(3, (4096, 2048, 7168), "chunk", eps=(1e-6, 1e-5, 1e-4)),
        "unequal-concat": lambda: concat(3, (4096, 2048, 7168), "concat", residuals=(False, True, False)),
        "some-residuals": lambda: concat(3, (4096,) * 3, "none", residuals=(True, False, True)),
        "mixed-indices": lambda: concat(3, (4096,) * 3, "chunk", indices=(torch.int32, None, torch.int64)),
        "shared-index": lambda: concat(3, (4096,) * 3, "concat", indices=(torch.int64,), statistics=True),
        "unit-gain": lambda: concat(3, (4096,) * 3, "chunk", gains=()),
        "fp32-gain": lambda: concat(3, (4096,) * 3, "chunk", gain_dtype=FP32),
        "statistics": lambda: concat(3, (4096,) * 3, "chunk", statistics=True, residuals=(True,) * 3),
        "fp16": lambda: concat(3, (4096,) * 3, "chunk", FP16, gain_dtype=FP16),
        "fp32": lambda: concat(3, (8192,) * 3, "chunk", FP32, gain_dtype=FP32, residuals=(True,) * 3),
        "fp32-concat": lambda: concat(300, (8192,) * 3, "concat", FP32, gain_dtype=FP32, residuals=(True,) * 3),
        "blocks": lambda: concat(3, (16384,) * 2, "chunk", residuals=(True,) * 2),
        "blocks-concat": lambda: concat(300, (20000, 8192, 9000), "concat", residuals=(True,) * 3),
        "odd": lambda: concat(3, (2881,) * 3, "chunk", residuals=(True,) * 3),
        "odd-concat": lambda: concat(3, (101, 33, 1), "concat"),
    },
}


def launches_by_case(op: str, arch: Arch) -> dict[str, Launch]:
    """Presets first: a binary that a preset and a feature share counts as the preset's, whose limits are stricter."""
    made = {}
    for case, call in (preset_calls(op) | FEATURES[op]).items():
        (made[case],) = launches(call, arch)
    return made


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_resources(op: str, arch: Arch, selected: Callable, record_binary: Callable[[Row], None]) -> None:
    """Each preset and each feature: no spills, shared memory that the arch has, and full-width loads where aligned."""
    faults = []
    presets = preset_calls(op)
    for case, launch in selected(launches_by_case(op, arch)).items():
        found = resources(launch, arch)
        record_binary(Row(launch.kernel.fn.__name__, case, str(arch), launch.specialization.num_warps, found))
        faults += [f"{case}: {fault}" for fault in found.faults(arch)]
        if found.registers > (MAX_REGISTERS if case in presets else MAX_REGISTERS_OF_A_FEATURE):
            faults.append(f"{case}: {found.registers} registers")
        if case in presets and not ("128-bit" in found.loads or "dwordx4" in found.loads):
            faults.append(f"{case}: loads are {found.loads}")
        if case in presets and ("16-bit" in found.loads or "ushort" in found.loads):
            faults.append(f"{case}: loads are {found.loads}")
    assert not faults, "\n".join(faults)


def test_an_embeddings_blocks_leave_few_lanes_idle() -> None:
    """At most one in eight at the widths of every model: 5376 columns are 3 blocks of 2048. A block has 512 or more."""
    for case, call in preset_calls("vocab_parallel_embedding").items():
        (launch,) = launches(call, 90)
        constants = launch.specialization.constants
        H, block = constants[:2]
        assert 7 * -(-H // block) * block <= 8 * H or block == 512, case


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("H", [896, 4096, 8192])
def test_a_row_that_one_block_covers_is_read_once(H: int, arch: Arch) -> None:
    """The kernels' source has two passes; the compiler merges their loads where nothing is written in between."""
    calls = {
        "add_rms_norm": lambda: add_norm(3, H),
        "norm_concat": lambda: concat(3, (H,) * 3, "chunk", residuals=(True,) * 3),
    }
    for op, call in calls.items():
        (launch,) = launches(call, arch)
        # x, residual and gain; 16 columns of bf16 a thread are two loads each.
        assert resources(launch, arch).loads == "128-bit x6", op


def specializations(op: str, calls: list[Callable[[], None]]) -> set[launching.Specialization]:
    return {launch.specialization for call in calls for launch in launches(call, 90)}


SIZES = (1, 2, 15, 16, 17, 4096, 70000)
STRIDES = (4096, 4112, 8192, 3 * 4096, 2**33)

SAME: dict[str, list[Callable[[], None]]] = {
    "capture_hidden": [
        *(lambda T=T: capture(T, 4096) for T in SIZES),
        *(lambda s=s: capture(7, 4096, stride=s) for s in STRIDES),
        lambda: capture(1, 4096, stride=5),  # the stride of a single row is not used
    ],
    "add_rms_norm": [
        *(lambda T=T: add_norm(T, 4096) for T in SIZES),
        *(lambda s=s: add_norm(7, 4096, stride=s) for s in STRIDES),
    ],
    "vocab_parallel_embedding": [
        *(lambda T=T: embed(T, 4096) for T in SIZES),
        *(lambda s=s: embed(7, 4096, stride=s) for s in STRIDES),
        # Ranks, one of which holds nothing, and ids beyond 32 bits.
        *(
            lambda b=b: embed(7, 4096, shard=b)
            for b in [(0, 1, 1, 1, 1), (16, 32, 32, 32, 16), (2**33, 2**34, 0, 0, 1)]
        ),
    ],
    "norm_concat": [
        *(lambda N=N: concat(N, (4096,) * 3, "chunk", indices=(torch.int64,), source_rows=5) for N in SIZES),
        *(lambda T=T: concat(7, (4096,) * 3, "chunk", indices=(torch.int64,), source_rows=T) for T in SIZES),
        *(
            lambda s=s: concat(7, (4096,) * 3, "chunk", indices=(torch.int64,), source_rows=5, stride=s)
            for s in STRIDES
        ),
        lambda: concat(7, (4096,) * 3, "chunk", indices=(torch.int64,), source_rows=5, eps=(1.0,)),
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_one_binary_for_all_rows_ranks_and_strides(op: str) -> None:
    assert len(specializations(op, SAME[op])) == 1


def test_one_binary_for_a_concat_norm_on_both_sides_of_its_split() -> None:
    assert len(specializations("norm_concat", [lambda N=N: concat(N, (4096,) * 3, "concat") for N in SIZES])) == 1


UNALIGNED: dict[str, list[Callable[[], None]]] = {
    "capture_hidden": [lambda s=s: capture(7, 4096, stride=s) for s in (4097, 4104, 4111)],
    "add_rms_norm": [lambda s=s: add_norm(7, 4096, stride=s) for s in (4097, 4104, 4111)],
    "vocab_parallel_embedding": [lambda s=s: embed(7, 4096, stride=s) for s in (4097, 4104, 4111)],
    "norm_concat": [
        lambda s=s: concat(7, (4096,) * 3, "chunk", indices=(torch.int64,), source_rows=5, stride=s)
        for s in (4097, 4104, 4111)
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_unaligned_rows_are_one_binary_more(op: str) -> None:
    assert len(specializations(op, UNALIGNED[op])) == 1
    assert len(specializations(op, [*SAME[op], *UNALIGNED[op]])) == 2


def test_a_binary_serves_two_calls_and_a_capture_compiles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `Launch` itself, with the driver and the compiler replaced by what counts calls."""
    compiled, launched = [], []
    capturing = False

    class Binary:
        def __getitem__(self, grid: tuple) -> Callable:
            return lambda *arguments: launched.append(grid)

    def compile_kernel(kernel: object, *_specialization: object) -> Binary:
        compiled.append(kernel)
        return Binary()

    monkeypatch.setattr(launching, "compile_kernel", compile_kernel)
    monkeypatch.setattr(launching, "_binaries", {})
    monkeypatch.setattr(launching.triton.runtime.driver, "_active", _NoDriver())
    monkeypatch.setattr(launching, "_current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    launching.forget_prepared()

    for T in SIZES:
        capture(T, 4096)
    assert len(compiled) == 1 and launched == [(T, 1, 1) for T in SIZES]
    capturing = True
    capture(3, 4096)
    assert len(launched) == len(SIZES) + 1
    with pytest.raises(RuntimeError, match=r"capture_hidden: .*not compiled.*eagle_kernels\.warmup\('capture_hidden'"):
        capture(3, 2048)
    with pytest.raises(RuntimeError, match=r"capture_hidden: .*not compiled"):
        capture(3, 4096, stride=4097)
    assert len(compiled) == 1 and len(launched) == len(SIZES) + 1
    launching.forget_prepared()  # prepared launches hold these binaries


def test_a_launch_goes_to_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is the current one, which is put back; each device has a binary of its own."""
    current, launched = [0], []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted.index)
        yield
        current.pop()

    class Binary:
        def __init__(self) -> None:
            self.loaded_on = current[-1]

        def __getitem__(self, grid: tuple) -> Callable:
            return lambda *arguments: launched.append((self.loaded_on, current[-1], grid, arguments))

    monkeypatch.setattr(launching, "compile_kernel", lambda *arguments: Binary())
    monkeypatch.setattr(launching, "_binaries", {})
    monkeypatch.setattr(launching, "_current_device", lambda: current[-1])
    monkeypatch.setattr(launching, "has_pdl", lambda device: True)
    monkeypatch.setattr(launching.triton.runtime.driver, "_active", _NoDriver())
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    prepare, numbers = KERNELS["add_rms_norm"]._prepare, (16, 0, 32, 0, 48, 1e-6, 1.0, 64, 0, 80, 0)
    for index in (0, 1, 0, 1):
        prepare(BF16, BF16, 64, torch.device("cuda", index))((3, 1, 1), numbers)
    launching.forget_prepared()
    assert launched == 2 * [(index, index, (3, 1, 1), (*numbers, 64, 64, True)) for index in (0, 1)]
    assert current == [0] and len(launching._binaries) == 2


@pytest.mark.parametrize("op", OPS)
def test_what_is_prepared_serves_its_signature_alone(op: str) -> None:
    """Calls of every preset and feature, aligned and not, one after the other: each launches what it does alone."""
    calls = [*preset_calls(op).values(), *FEATURES[op].values(), *SAME[op], *UNALIGNED[op]]
    calls += calls[::-1]
    alone = [launch for call in calls for launch in launches(call, 90)]
    assert launches(lambda: [call() for call in calls], 90) == alone


class _NoDriver:
    def get_current_target(self) -> None:
        return None


def test_names() -> None:
    """The recorder above sees the arguments that a kernel has: one type for each run-time parameter."""
    for op in OPS:
        for launch in (entry for call in SAME[op][:1] for entry in launches(call, 90)):
            assert isinstance(launch, Launch)
            types, constants = launch.specialization.types, launch.specialization.constants
            assert len(types) + len(constants) == len(launch.kernel.arg_names)
            assert set(launch.specialization.aligned) <= set(launch.kernel.arg_names)
