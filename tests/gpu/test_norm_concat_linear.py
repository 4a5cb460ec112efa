"""norm_concat_linear on a GPU: float64 truth on the table and on the presets, and which bits depend on what."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import DATA, allow_independent_roundings, expect, relative_rms
from backends import environment_of
from cases import CASES, Case, operands
from eagle_kernels import library
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.plan import Kernel
from guards import GuardedRows, UnchangedTensors, same_bits

pytestmark = pytest.mark.usefixtures("gpu_backend")

# Both sides of each plan's limit on rows.
ROWS = (1, 8, 9, 16, 17, 32, 48, 49, 128, 129, 1000)
SIZES = sorted({(stage.K, stage.H, stage.D) for model in model_shapes().values() for stage in model.stages})
MODEL = (3, 4096, 4096)


# What CASES leaves out of the warpgroup kernel.
OF_WARPGROUPS = [
    Case("bf16", (896,) * 2, 47, D=257, residuals="all", indices="table"),
    Case("fp16", (896,) * 2, 47, "concat", D=257, indices="shared"),
]


# Tiny values of bf16 and fp32 have products that are subnormal in fp32, where the split kernels do not scale them.
@pytest.mark.parametrize(
    "case", [*(case for case in CASES if case.data != "tiny"), *OF_WARPGROUPS], ids=lambda case: case.id
)
def test_float64_truth(case: Case) -> None:
    call = operands(case, "cuda")
    _, expected = expect(call)
    one_row = case.layout == "row"
    guarded = GuardedRows(1 if one_row else call.N, case.D, case.dtype, "cuda")
    view = guarded.view[0] if one_row else guarded.view
    with UnchangedTensors(call.tensors()):
        assert call.norm_concat_linear(out=view) is view
    guarded.check_around()
    allow_independent_roundings(expected).check(guarded.view)


def make_call(N: int, K: int, H: int, D: int, data: str = "plain", dtype: torch.dtype = torch.bfloat16) -> tuple:
    generator = torch.Generator().manual_seed(K * H + D)
    chunks = [DATA[data](N, H, dtype, generator).cuda() for _ in range(K)]
    weight = torch.randn(D, K * H, device="cuda").mul_((K * H) ** -0.5).to(dtype)
    return chunks, weight, (torch.rand(K, H, device="cuda") + 0.5).to(dtype)


@pytest.mark.parametrize("data", ["plain", "outliers", "scales"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_accuracy_rule_on_every_preset(sizes: tuple[int, int, int], data: str) -> None:
    """At most 1.05 times the error of the engines' eager chain, with and without a gain, in every plan."""
    H = sizes[1]
    chunks, weight, gain = make_call(max(ROWS), *sizes, data=data)
    for norm_weight in (gain, None):
        ones = gain if norm_weight is not None else torch.ones_like(gain)
        exact = [F.rms_norm(chunk.double(), (H,), ones[k].double(), 1e-6) for k, chunk in enumerate(chunks)]
        eager = [
            F.rms_norm(chunk.float(), (H,), ones[k].float(), 1e-6).to(chunk.dtype) for k, chunk in enumerate(chunks)
        ]
        # A slice of the columns at a time: the fp64 weight of K=3, H=8192 is 1.6 GB.
        truth = torch.cat([torch.cat(exact, -1) @ part.double().t() for part in weight.split(1024)], -1)
        eager_rms = relative_rms(F.linear(torch.cat(eager, -1), weight), truth)
        for N in ROWS:
            out = ek.norm_concat_linear([chunk[:N] for chunk in chunks], weight, norm_weight=norm_weight)
            rms = relative_rms(out, truth[:N])
            slack = 1 + 3 / out.numel() ** 0.5
            assert rms <= 1.05 * eager_rms * slack, f"N={N}: {rms:.4g}, eager {eager_rms:.4g}"


@pytest.mark.parametrize("N", ROWS)
def test_the_same_bits_every_time(N: int) -> None:
    chunks, weight, gain = make_call(N, *MODEL)
    first = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    for _ in range(20):
        assert same_bits(first, ek.norm_concat_linear(chunks, weight, norm_weight=gain))


def test_which_shapes_have_a_good_split_for_warpgroups() -> None:
    """What plans ask the library. That of alternatives says so of a width that is to be timed, whatever the shape."""
    assert [library.wgmma_pays(3, H, H, 132) for H in (4096, 5120, 7168)] == [True, False, True]
    assert [library.wgmma_pays(3, H, D, 132) for H, D in ((4096, 5120), (5120, 4096))] == [False, True]


@pytest.mark.parametrize("norm", ["chunk", "concat"])
def test_a_rows_bits_do_not_depend_on_T_within_a_plan(norm: str) -> None:
    """Not where the plan hands the product to cuBLAS: on a GPU with wgmma from 49 rows on, on others from 17."""
    chunks, weight, gain = make_call(128, 2, 2880, 2880)
    options = {"norm": norm, "norm_weight": gain.reshape(-1) if norm == "concat" else gain}
    rows_of_plan: dict[tuple, list[int]] = {}
    for N in range(1, 129):
        plan = ek.explain("norm_concat_linear", [chunk[:N] for chunk in chunks], weight, **options)
        if plan.kernel is not Kernel.TWO_STEP:
            rows_of_plan.setdefault((plan.kernel, plan.tiles), []).append(N)
    assert rows_of_plan
    for rows in rows_of_plan.values():
        whole = ek.norm_concat_linear([chunk[: rows[-1]] for chunk in chunks], weight, **options)
        for N in rows:
            out = ek.norm_concat_linear([chunk[:N] for chunk in chunks], weight, **options)
            assert same_bits(out, whole[:N]), (N, rows)


@pytest.mark.parametrize("sizes", [(2, 2880, 2880), (2, 101, 97)], ids=str)
def test_one_plan_for_all_T_on_request(sizes: tuple[int, int, int], gpu_backend: str) -> None:
    if gpu_backend == "cuda" and sizes[1] % 8:
        pytest.skip("the split kernels do not take this width")
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1", EAGLE_KERNELS_BACKEND=gpu_backend):
        chunks, weight, gain = make_call(1500, *sizes)
        whole = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
        for N in ROWS:
            assert same_bits(ek.norm_concat_linear([c[:N] for c in chunks], weight, norm_weight=gain), whole[:N]), N


def test_a_folded_gain_gives_the_same_bits() -> None:
    """In one pass over the weight, where each gain is multiplied into the weight; norm_concat multiplies x by it."""
    chunks, weight, gain = make_call(max(ROWS), *MODEL)
    folded = (weight.float() * gain.float().reshape(-1)).to(weight.dtype)
    compared = []
    for N in ROWS:
        rows = [chunk[:N] for chunk in chunks]
        if ek.explain("norm_concat_linear", rows, weight, norm_weight=gain).kernel is Kernel.TWO_STEP:
            continue
        compared.append(N)
        assert same_bits(ek.norm_concat_linear(rows, weight, norm_weight=gain), ek.norm_concat_linear(rows, folded)), N
    assert compared[:4] == [1, 8, 9, 16]


@pytest.mark.parametrize("N", [1, 16, 33, 128, 300])
def test_a_bad_row_stays_in_its_row(N: int) -> None:
    chunks, weight, gain = make_call(N + 2, *MODEL)
    clean = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    chunks[0][N], chunks[2][N + 1] = float("nan"), float("inf")
    dirty = ek.norm_concat_linear(chunks, weight, norm_weight=gain)
    assert same_bits(clean[:N], dirty[:N]) and dirty[N:].isnan().all()


class Static:
    """A call on static buffers, as an engine captures it."""

    def __init__(self, N: int, post_norm: bool = False) -> None:
        chunks, self.weight, self.gain = make_call(N, *MODEL)
        self.inputs = chunks
        self.post_norm = {"post_norm_weight": self.gain[0]} if post_norm else {}
        self.residuals = [torch.empty_like(chunk) for chunk in chunks]
        self.index = torch.zeros(N, dtype=torch.int64, device="cuda")
        self.out = torch.empty(N, MODEL[2], dtype=self.weight.dtype, device="cuda")

    def arguments(self) -> dict:
        options = {"norm_weight": self.gain, "residuals": self.residuals, "indices": self.index, **self.post_norm}
        return {"chunks": self.inputs, "weight": self.weight, **options, "out": self.out}

    def run(self) -> None:
        ek.norm_concat_linear(**self.arguments())

    def refill(self, seed: int, real: int) -> None:
        """New contents; indices from `real` on are out of range or those of a row of NaN."""
        torch.manual_seed(seed)
        for rows in (*self.inputs, *self.residuals):
            rows.normal_()
            rows[real:] = float("nan")
        self.index.random_(0, real)
        self.index[real:] = torch.where(self.index[real:] % 2 == 0, -1, len(self.index) - 1)

    def truth(self) -> Tensor:
        rows = [(a + b)[self.index.clamp(min=0)] for a, b in zip(self.inputs, self.residuals, strict=True)]
        normed = [F.rms_norm(x.double(), (MODEL[1],), self.gain[k].double(), 1e-6) for k, x in enumerate(rows)]
        return torch.cat(normed, -1) @ self.weight.double().t()


@pytest.mark.parametrize("N", [1, 5, 17, 60, 128, 300])
def test_a_graph_replays_with_new_contents_and_poisoned_padding(N: int) -> None:
    call = Static(N)
    call.refill(0, N)
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for seed in range(5):
        real = max(1, N - 2 * seed)
        call.refill(seed, real)
        call.out.fill_(float("nan"))
        graph.replay()
        replayed = call.out.clone()
        assert relative_rms(replayed[:real], call.truth()[:real]) < 4e-3
        call.out.fill_(float("nan"))
        call.run()
        assert same_bits(replayed[:real], call.out[:real])


@pytest.mark.parametrize("gpu_backend", ["triton"], indirect=True)
def test_warmup_leaves_nothing_to_compile_or_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle_kernels.triton_kernels import launch, workspace

    monkeypatch.setattr(launch, "_binaries", {})
    launch.forget_prepared()
    monkeypatch.setattr(workspace, "_idle", [])
    monkeypatch.setattr(workspace, "_of_thread", workspace._OfThread())
    chunks, weight, gain = make_call(512, *MODEL)
    out = torch.empty(512, MODEL[2], dtype=weight.dtype, device="cuda")

    def call(N: int) -> None:
        ek.norm_concat_linear([chunk[:N] for chunk in chunks], weight, norm_weight=gain, out=out[:N])

    message = r"norm_concat_linear: .*eagle_kernels\.warmup"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(3)
    torch.cuda.synchronize()
    ek.warmup("norm_concat_linear", chunks, weight, norm_weight=gain, out=out, rows=range(1, 513))
    own = workspace._of_thread.workspaces.buffers[weight.device.index]
    binaries, buffers = len(launch._binaries), [buffer.data_ptr() for buffer in own]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for N in (1, 16, 17, 33, 100, 129, 512):
            call(N)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for N in (1, 20, 64, 512):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(N)
        graph.replay()
    torch.cuda.synchronize()
    assert len(launch._binaries) == binaries
    assert [buffer.data_ptr() for buffer in own] == buffers


@pytest.mark.parametrize("post_norm", [False, True])  # only the split kernels and the last of two steps have it
@pytest.mark.parametrize("rows", [(16, 12), (128, 100)], ids=str)
def test_streams_take_turns_with_the_workspace(rows: tuple[int, int], post_norm: bool) -> None:
    """Calls on two streams at once: each result must be the one that a call alone gives."""
    calls = [make_call(N, *MODEL) for N in rows]
    options = {"post_norm_weight": calls[0][2][0]} if post_norm else {}
    expected = [ek.norm_concat_linear(chunks, weight, norm_weight=gain, **options) for chunks, weight, gain in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for _ in range(20):
        for stream, (chunks, weight, gain) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(ek.norm_concat_linear(chunks, weight, norm_weight=gain, **options))
    torch.cuda.synchronize()
    for k, result in enumerate(results):
        assert same_bits(result, expected[k % 2])


@pytest.mark.parametrize("N", [8, 17, 128])
def test_a_weight_that_the_previous_kernel_wrote_is_seen(N: int) -> None:
    """Copies of the weight start before the previous kernel has ended only where that kernel lets its successor start
    early, which no kernel of torch does."""
    chunks, weight, gain = make_call(N, *MODEL)
    weights = [weight, weight.flip(0).contiguous()]
    expected = [ek.norm_concat_linear(chunks, other, norm_weight=gain) for other in weights]
    written = torch.empty_like(weight)
    for turn in range(50):
        written.copy_(weights[turn % 2])
        out = ek.norm_concat_linear(chunks, written, norm_weight=gain)
        assert same_bits(out, expected[turn % 2]), turn


@pytest.mark.parametrize("post_norm", [False, True])  # at 8 rows by the split kernels, at 40 in two steps
@pytest.mark.parametrize("N", [8, 40])
def test_a_chain_of_dependent_launches_in_a_graph(N: int, post_norm: bool) -> None:
    """Each op reads what the one before it just wrote, and the workspace is used again at once: programmatic dependent
    launch must wait for both."""
    K, H, D = MODEL
    _, weight, gain = make_call(N, *MODEL)
    source, hidden = torch.randn(N, H, device="cuda").bfloat16(), torch.empty(N, D, dtype=torch.bfloat16, device="cuda")
    buffer = ek.AuxHiddenStates(N, K, H, device="cuda")
    options = {"post_norm_weight": gain[0]} if post_norm else {}

    def chain() -> None:
        hidden.copy_(source)
        for step in range(12):
            for k in range(K):
                buffer.capture(k, hidden, source)
            statistics = buffer.row_sum_squares(N) if step % 2 else None
            packed = buffer.packed(N)
            of_rows = {"sum_squares": statistics, "num_chunks": K}
            ek.norm_concat_linear(packed, weight, norm_weight=gain, **of_rows, **options, out=hidden)

    chain()
    torch.cuda.synchronize()
    expected = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(50):
        hidden.fill_(float("nan"))
        buffer.buffer.fill_(float("nan"))
        graph.replay()
        assert same_bits(hidden, expected)


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("N", [1, 8, 9, 16, 17, 32, 48])
def test_the_launches_it_promises(gpu_backend: str, N: int, post_norm: bool) -> None:
    call = Static(N, post_norm)
    plan = ek.explain("norm_concat_linear", **call.arguments())
    if plan.kernel is Kernel.TWO_STEP:
        pytest.skip("how many launches the library's product takes is its own")
    launches = 2 if plan.kernel is Kernel.SPLIT else 1
    if gpu_backend == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert launches == 1 + post_norm, plan
    call.refill(0, N)
    call.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.run()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == launches, kernels
