"""Eagle3Projection and VocabParallelEmbedding: values, state_dict, packing, loading."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune

import eagle_kernels as ek
from backends import environment_of, needs_packing
from eagle_kernels import layers
from eagle_kernels.ops.sources import Sources
from eagle_kernels.quantized_weight import FORMATS
from guards import UnchangedTensors, same_bits

K, H, D, T = 3, 72, 40, 9


def make_layer(dtype: torch.dtype = torch.bfloat16, **norms: bool | float) -> ek.Eagle3Projection:
    torch.manual_seed(1)
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, eps=1e-5, **norms)
    layer = ek.Eagle3Projection(config, dtype=dtype)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return layer


def truth(layer: ek.Eagle3Projection, state: dict, chunks: list[torch.Tensor]) -> torch.Tensor:
    """The engines' block in float64, from the state_dict (SGLang 0.5.23 llama_eagle3: concat norm first)."""
    state = {name: value.double() for name, value in state.items()}
    x, eps, offset = torch.cat(chunks, -1).double(), layer.config.eps, layer.config.norm_offset
    if "input_norm.weight" in state:
        x = F.rms_norm(x, (K * H,), offset + state["input_norm.weight"], eps)
    if "fc_norm.0.weight" in state:
        gains = [offset + state[f"fc_norm.{k}.weight"] for k in range(K)]
        x = torch.cat([F.rms_norm(p, (H,), gain, eps) for p, gain in zip(x.chunk(K, -1), gains, strict=True)], -1)
    return F.linear(x, state["fc.weight"], state.get("fc.bias"))


NORMS = [
    pytest.param({}, id="none"),
    pytest.param({"chunk_norm": True}, id="chunk"),
    pytest.param({"concat_norm": True}, id="concat"),
    pytest.param({"chunk_norm": True, "concat_norm": True, "bias": True}, id="both-bias"),
    pytest.param({"chunk_norm": True, "concat_norm": True, "norm_offset": 1.0}, id="both-offset"),
    pytest.param({"norm_offset": 1.0}, id="none-offset"),
]


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        pytest.param(torch.bfloat16, False, id="bf16"),
        pytest.param(torch.bfloat16, True, id="bf16-packed", marks=needs_packing),
        pytest.param(torch.float32, False, id="fp32"),
    ],
)
def test_projection_matches_float64(dtype: torch.dtype, norms: dict, packed: bool) -> None:
    layer = make_layer(dtype, **norms)
    state = layer.state_dict()
    if packed:
        layer.prepack()
    chunks = [torch.randn(T, H).to(dtype) * 4**k for k in range(K)]
    expected = truth(layer, state, chunks)
    buffer = ek.AuxHiddenStates(T, K, H, dtype=dtype)
    for k, chunk in enumerate(chunks):
        buffer.capture(k, chunk)
    out = torch.full((T, D), float("nan"), dtype=dtype)
    results = [
        layer(chunks),
        layer(torch.cat(chunks, -1)),
        layer(chunks, out=out),
        layer(buffer.packed(T), sum_squares=buffer.row_sum_squares(T)),
    ]
    assert results[2] is out
    for result in results:
        error = (result.double() - expected).norm() / expected.norm()
        # One output rounding and at most two of the input (2^-9 each, uniform: /sqrt(3)).
        assert error < (3 * 2**-9 / 3**0.5 if dtype == torch.bfloat16 else 1e-6)


FRESH = {
    "Eagle3Projection": lambda offset: ek.Eagle3Projection(
        ek.Eagle3Config(K, H, D, chunk_norm=True, concat_norm=True, norm_offset=offset)
    ),
    "MTPProjection": lambda offset: ek.MTPProjection(ek.MTPConfig(H, norm_offset=offset)),
    "MTPStreamsProjection": lambda offset: ek.MTPStreamsProjection(
        ek.MTPStreamsConfig(H, norm_offset=offset, hnorm_over="row")
    ),
    "ContextKV": lambda offset: ek.ContextKV(
        ek.ContextKVConfig(K, H, D, 1, 1, 8, chunk_norm=True, layer_norm=True, norm_offset=offset)
    ),
}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)
def test_a_fresh_norm_has_unit_gain(make: Callable, offset: float) -> None:
    gains = [norm.weight for norm in make(offset).modules() if isinstance(norm, torch.nn.RMSNorm)]
    assert gains and all(torch.equal(offset + gain, torch.ones_like(gain)) for gain in gains)


@pytest.mark.parametrize("norms", NORMS)
def test_state_dict_names_are_those_of_checkpoints(norms: dict) -> None:
    layer = make_layer(**norms)
    expected = {"fc.weight"} | ({"fc.bias"} if norms.get("bias") else set())
    if norms.get("chunk_norm"):
        expected |= {f"fc_norm.{k}.weight" for k in range(K)}
    if norms.get("concat_norm"):
        expected |= {"input_norm.weight"}
    assert set(layer.state_dict()) == expected
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@needs_packing
def test_packing_keeps_one_copy_and_survives_a_reload() -> None:
    layer, other = make_layer(chunk_norm=True), make_layer(chunk_norm=True)
    other.fc.weight.mul_(-3)
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert layer.prepack() is layer
    assert layer.fc.weight is None and "fc.weight" not in dict(layer.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.prepack()
    layer.load_state_dict(other.state_dict())
    assert layer.fc.packed is not None
    torch.testing.assert_close(layer(chunks), other(chunks))
    assert torch.equal(layer.state_dict()["fc.weight"], other.fc.weight)
    layer.half()
    assert layer.state_dict()["fc.weight"].dtype == torch.float16
    # Where oneDNN multiplies no fp16 (AMD Zen 4, Intel before Sapphire Rapids) the weight stays dense, and works.
    assert (layer.fc.packed is not None) == torch.ops.mkldnn._is_mkldnn_fp16_supported()
    torch.testing.assert_close(layer([chunk.half() for chunk in chunks]), other.half()([c.half() for c in chunks]))


@pytest.mark.parametrize(
    "packed", [pytest.param(False, id="dense"), pytest.param(True, id="packed", marks=needs_packing)]
)
@pytest.mark.parametrize("norms", NORMS)
def test_an_iterable_is_read_once(norms: dict, packed: bool) -> None:
    layer = make_layer(**norms)
    layer = layer.prepack() if packed else layer
    chunks, residuals = torch.randn(2, K, T, H).bfloat16().unbind()
    indices = [torch.tensor([2, -1, 0, 99]) for _ in range(K)]
    expected = layer(list(chunks), residuals=list(residuals), indices=indices)
    for out in (None, torch.empty(4, D).bfloat16()):
        once = {"residuals": map(torch.clone, residuals), "indices": iter(indices), "out": out}
        assert torch.equal(layer((chunk for chunk in chunks), **once), expected)


@needs_packing
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_packed_layer_can_be_copied(how: str) -> None:
    """The blocked layout cannot be copied: the copy packs the dense weight again."""
    layer = make_layer(chunk_norm=True, bias=True).prepack()
    other = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert layer.fc.packed is not None and other.fc.packed is not None and other.fc.weight is None
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    assert torch.equal(layer(chunks), other(chunks))
    state = {name: value.clone() for name, value in other.state_dict().items()}
    layer.load_state_dict({name: value * 2 for name, value in state.items()})
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


@needs_packing
def test_the_out_of_a_packed_layer_is_checked() -> None:
    layer = make_layer(bias=True).prepack()
    chunks = torch.randn(T, K * H).bfloat16()
    for out, message in (
        (torch.zeros(1, D).bfloat16(), r"out has shape \(1, 40\), expected \(N, D\) = \(9, 40\)"),
        (torch.zeros(T, D), "out has dtype torch.float32, expected torch.bfloat16"),
        (chunks[:, :D], r"out overlaps chunks\[0\], expected disjoint memory"),
        (layer.fc.bias.expand(T, D), "out has strides .* expected rows that do not overlap each other"),
    ):
        before = out.clone()
        with pytest.raises((TypeError, ValueError), match=f"^norm_concat_linear: {message}"):
            layer(chunks, out=out)
        assert torch.equal(out, before)


@needs_packing
def test_the_out_of_a_packed_layer_may_be_an_inference_tensor() -> None:
    layer, chunks = make_layer().prepack(), torch.randn(T, K * H).bfloat16()
    with torch.inference_mode():
        out = torch.empty(T, D).bfloat16()
    assert torch.equal(layer(chunks, out=out), layer(chunks))


@pytest.mark.parametrize("named", ["chunks[1]", "residuals[0]", "sum_squares", "norm_weight"])
def test_an_out_over_what_the_first_of_two_norms_reads_is_refused(named: str) -> None:
    """The op that writes it reads the first norm's result alone, and wrote over the input."""
    layer = make_layer(chunk_norm=True, concat_norm=True)
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    residuals = [torch.randn(T, H).bfloat16() for _ in range(K)]
    sum_squares = torch.rand(T, D)
    given = {
        "chunks[1]": chunks[1],
        "residuals[0]": residuals[0],
        "sum_squares": sum_squares.view(torch.bfloat16),
        "norm_weight": layer.input_norm.weight.data,
    }[named]
    out = given.flatten()[: 5 * D].view(5, D) if named == "norm_weight" else given[:, :D]
    chunks, residuals = ([each[: len(out)] for each in tensors] for tensors in (chunks, residuals))
    before = out.clone()
    with pytest.raises(ValueError, match=rf"^norm_concat_linear: out overlaps {re.escape(named)}, expected disjoint"):
        layer(chunks, residuals=residuals, sum_squares=sum_squares[: len(out), :K], out=out)
    assert same_bits(out, before)


@needs_packing
def test_a_nan_row_stays_in_its_row_of_a_packed_layer() -> None:
    """K*H = 216 ends inside an AMX tile, and the next row follows directly in memory."""
    layer = make_layer(chunk_norm=True).prepack()
    assert layer.fc.packed.shape == (D, 224) and layer.state_dict()["fc.weight"].shape == (D, 216)
    chunks = [torch.randn(600, H).bfloat16() for _ in range(K)]
    chunks[0][4] = float("nan")
    assert layer(chunks).isnan().any(1).nonzero().flatten().tolist() == [4]


@needs_packing
def test_a_packed_layer_is_dense_where_fp32_is_assigned() -> None:
    """prepack refuses fp32 because of oneDNN's fp32 product; load_state_dict(assign=True) had packed it."""
    layer, other = make_layer(chunk_norm=True).prepack(), make_layer(torch.float32, chunk_norm=True)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert layer.fc.packed is None and torch.equal(layer.fc.weight, other.fc.weight)
    chunks = [torch.randn(T, H) for _ in range(K)]
    assert torch.equal(layer(chunks), other(chunks))


@needs_packing
def test_a_packed_layer_checks_its_chunks() -> None:
    """oneDNN pads x as it pads the weight: 214 columns instead of 216 gave a result. Its refusals had its own words."""
    layer = make_layer(bias=True)
    packed = copy.deepcopy(layer).prepack()
    chunks = torch.randn(T, K * H).bfloat16()
    for wrong in (chunks.float(), chunks.half(), chunks[:, : K * (H - 1)], chunks.to("meta"), chunks[0, :K]):
        messages = []
        for one in (layer, packed):
            with pytest.raises((TypeError, ValueError), match=r"^norm_concat_linear: weight .*, expected ") as raised:
                one(wrong)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
    packed.fc.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="an input requires grad"):
        packed(chunks)


@needs_packing
def test_a_packed_layer_takes_a_weight_that_is_assigned() -> None:
    """The old packed weight was still multiplied, and was still in the state_dict."""
    layer, chunks = make_layer().prepack(), torch.randn(T, K * H).bfloat16()
    before, weight = layer(chunks), torch.randn(D, K * H).bfloat16()
    dense = make_layer()
    dense.fc.weight.copy_(weight)
    assert torch.equal(torch.func.functional_call(layer, {"fc.weight": weight}, (chunks,)), dense(chunks))
    assert torch.equal(layer(chunks), before) and layer.fc.packed is not None
    layer.fc.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(layer(chunks), dense(chunks)) and torch.equal(layer.state_dict()["fc.weight"], weight)


@needs_packing
def test_a_packed_layer_stays_packed_where_a_move_fails() -> None:
    layer, chunks = make_layer(bias=True).prepack(), torch.randn(T, K * H).bfloat16()
    before = layer(chunks)

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        layer._apply(fail)
    assert layer.fc.packed is not None and layer.fc.weight is None and torch.equal(layer(chunks), before)


@needs_packing
def test_a_packed_layer_that_is_unpacked_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, which moves or reloads it: an assertion failed."""
    layer, chunks = make_layer(bias=True).prepack(), torch.randn(T, K * H).bfloat16()
    before, concatenate = layer(chunks), layers.concatenate

    def unpack(sources: Sources) -> torch.Tensor:
        normed = concatenate(sources)
        layer.fc.unpack()
        return normed

    with monkeypatch.context() as patched:
        patched.setattr(layers, "concatenate", unpack)
        assert torch.equal(layer(chunks), before)
    assert layer.fc.packed is None


@needs_packing
def test_a_layer_that_is_packed_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a move or a reload of a packed layer ends, in another thread: "weight is a NoneType"."""
    layer, chunks = make_layer(bias=True), torch.randn(T, K * H).bfloat16()
    before, project_onto = layer(chunks), layers.project_onto

    def pack(*arguments: object) -> torch.Tensor:
        layer.fc.pack()
        return project_onto(*arguments)

    monkeypatch.setattr(layers, "project_onto", pack)
    assert torch.equal(layer(chunks), before)
    assert layer.fc.weight is None


@needs_packing
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_packed_layer_compiles_into_one_graph(backend: str) -> None:
    """Inductor took oneDNN's op for one that it had made itself, and failed."""
    layer = make_layer(bias=True).prepack()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 2, 70):
        chunks, out = torch.randn(rows, K * H).bfloat16(), torch.empty(rows, D).bfloat16()
        assert torch.equal(compiled(chunks), layer(chunks))
        compiled(chunks, out=out)
        assert torch.equal(out, layer(chunks))


@needs_packing
def test_a_packed_layer_is_exported() -> None:
    layer, chunks = make_layer(chunk_norm=True, bias=True).prepack(), torch.randn(T, K * H).bfloat16()
    exported = torch.export.export(layer, (chunks,), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=99)},))
    for rows in (chunks, torch.randn(9, K * H).bfloat16()):
        assert torch.equal(exported.module()(rows), layer(rows))


@needs_packing
def test_packing_is_not_batch_invariant() -> None:
    """With a bias that cancels the product, 33 rows had other bits than 32."""
    layer = make_layer().prepack()
    with environment_of(EAGLE_KERNELS_BATCH_INVARIANT="1"):
        message = "prepack: EAGLE_KERNELS_BATCH_INVARIANT is 1, expected 0, because oneDNN picks the order of its sums"
        with pytest.raises(RuntimeError, match=message):
            make_layer().prepack()
        assert copy.deepcopy(layer).fc.packed is None


def test_packing_refuses_fp32() -> None:
    layer = make_layer(torch.float32)
    with pytest.raises(TypeError, match=r"prepack: fc.weight is torch.float32 on cpu, expected bf16 or fp16 on cpu"):
        layer.prepack()
    assert layer.fc.packed is None and layer.fc.weight is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packing_refuses_what_onednn_does_not_multiply(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a CPU without AVX-512 for bf16, and of one without AMX for fp16."""
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    monkeypatch.setattr(torch.ops.mkldnn, supported, lambda: False)
    layer, chunks = make_layer(dtype), torch.randn(T, K * H).to(dtype)
    message = f"prepack: fc.weight is {dtype} on cpu, expected .*, because oneDNN multiplies no {dtype} on this CPU"
    before = layer(chunks)
    with pytest.raises(TypeError, match=message):
        layer.prepack()
    assert layer.fc.packed is None and torch.equal(layer(chunks), before)


def test_projection_refuses_a_drafter_without_one() -> None:
    config = ek.Eagle3Config(num_chunks=1, target_hidden_size=H, hidden_size=H, projection=False)
    with pytest.raises(ValueError, match=r"Eagle3Projection: config.projection is False, expected True"):
        ek.Eagle3Projection(config)


def test_projection_selects_rows_through_indices() -> None:
    layer = make_layer(chunk_norm=True, concat_norm=True)
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    rows = torch.tensor([4, 4, 0, -1])
    selected = layer(chunks, indices=rows)
    assert torch.equal(selected[:3], layer(chunks)[rows[:3]])
    assert torch.equal(selected[3], torch.zeros(D).bfloat16())


def test_embedding_matches_the_full_table_and_loads_it() -> None:
    full = torch.randn(100, H).bfloat16()
    embedding = ek.VocabParallelEmbedding(100, H, dtype=torch.bfloat16)
    assert embedding.weight.shape == (128, H)
    embedding.load_state_dict({"weight": full})
    ids = torch.tensor([[0, 99, 5], [100, -1, 127]])
    expected = torch.cat([full[[0, 99, 5]], torch.zeros(3, H).bfloat16()]).view(2, 3, H)
    assert torch.equal(embedding(ids), expected)
    shared = ek.VocabParallelEmbedding.from_weight(full, embedding.shard)
    assert shared.weight.data_ptr() == full.data_ptr()
    assert torch.equal(shared(ids), expected)


def test_a_table_that_is_shared_without_its_padding_loads_again() -> None:
    """Its V rows were taken for those of a full table and padded, which did not fit."""
    shard = ek.VocabShard.build(100, tp_rank=0, tp_size=1)
    embedding = ek.VocabParallelEmbedding.from_weight(torch.zeros(100, H), shard)
    full = torch.randn(100, H)
    embedding.load_state_dict({"weight": full})
    assert torch.equal(embedding.weight, full)
    embedding.load_state_dict(embedding.state_dict())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("rows", [100, 128], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64], ids=["fp8", "int8", "int64"])
def test_embedding_refuses_codes(dtype: torch.dtype, rows: int, assign: bool) -> None:
    """It copied them as numbers, without their scale."""
    embedding = ek.VocabParallelEmbedding(100, H, dtype=torch.bfloat16)
    weight, codes = embedding.weight, torch.ones(rows, H).to(dtype)
    got = (
        f"weight has dtype {dtype}, expected a floating-point dtype of 16 bits or more, because codes need their scale"
    )
    with UnchangedTensors([weight]), pytest.raises(RuntimeError, match=f"load_state_dict: target.{got}"):
        torch.nn.ModuleDict({"target": embedding}).load_state_dict(
            {"target.weight": codes}, strict=False, assign=assign
        )
    assert embedding.weight is weight
    with pytest.raises(TypeError, match=f"^VocabParallelEmbedding.from_weight: {got}$"):
        ek.VocabParallelEmbedding.from_weight(codes, embedding.shard)


def test_embedding_scale_follows_each_convention() -> None:
    full, ids = torch.randn(64, H).bfloat16(), torch.arange(64)
    scale = 2560**0.5
    by_float = ek.VocabParallelEmbedding.from_weight(full, ek.VocabShard.build(64, tp_rank=0, tp_size=1), scale=scale)
    rounded = torch.tensor(scale, dtype=torch.bfloat16)
    by_tensor = ek.VocabParallelEmbedding.from_weight(full, by_float.shard, scale=rounded)
    assert torch.equal(by_float(ids), full * scale)
    assert torch.equal(by_tensor(ids), full * rounded)
    assert not torch.equal(by_float(ids), by_tensor(ids))


def test_weights_that_are_no_plain_parameters() -> None:
    """Parametrized, wrapped by a property, or tensors: the layer reads what `module.weight` returns."""
    chunks = [torch.randn(T, H).bfloat16() for _ in range(K)]
    layer, plain = make_layer(chunk_norm=True), make_layer(chunk_norm=True)
    plain.load_state_dict(layer.state_dict())
    plain.fc.weight.mul_(2)

    class Twice(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(layer.fc, "weight", Twice())
    assert torch.equal(layer(chunks), plain(chunks))

    class Wrapper(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base, self.bias = base, None

        @property
        def weight(self) -> torch.Tensor:
            return 3 * self.base.weight

    wrapped = make_layer(chunk_norm=True)
    wrapped.load_state_dict({name: value for name, value in plain.state_dict().items()})
    wrapped.fc = Wrapper(wrapped.fc)
    plain.fc.weight.mul_(3)
    assert torch.equal(wrapped(chunks), plain(chunks))


class OfUser(torch.nn.utils.prune.BasePruningMethod):
    """prune's way to add a method."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask * (t > 0)


HOOKED = {
    "prune-custom": lambda module: OfUser.apply(module, "weight"),
    "prune-bias": lambda module: torch.nn.utils.prune.random_unstructured(module, "bias", 0.5),
    "prune": lambda module: torch.nn.utils.prune.l1_unstructured(module, "weight", 0.5),
    "prune-twice": lambda module: HOOKED["prune"](HOOKED["prune"](module)),
    "weight_norm": lambda module: torch.nn.utils.weight_norm(module, dim=None),
    "spectral_norm": torch.nn.utils.spectral_norm,
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("call", ["layer", "quantize"])
@pytest.mark.parametrize("hook", HOOKED)
def test_a_weight_that_a_hook_computes_is_that_of_now(hook: str, call: str) -> None:
    """The hook runs in front of fc's own forward: fc had the weight from before load_state_dict."""
    layer, x = make_layer(torch.float32, bias=True).eval(), torch.randn(T, K * H)
    HOOKED[hook](layer.fc)
    state = layer.state_dict()
    layer.load_state_dict({name: torch.randn_like(value) for name, value in state.items() if "mask" not in name}, False)
    expected = copy.deepcopy(layer.fc)(x)
    if call == "quantize":
        assert (layer.quantize("int8_row")(x) - expected).norm() < 0.02 * expected.norm()
    else:
        torch.testing.assert_close(layer(x), expected)


def test_a_gain_that_is_pruned_is_that_of_now() -> None:
    layer, x = make_layer(torch.float32, chunk_norm=True), torch.randn(T, K * H)
    torch.nn.utils.prune.random_unstructured(layer.fc_norm[1], "weight", 0.5)
    layer.fc_norm[1].weight_orig.mul_(4)
    state = {name: value for name, value in layer.state_dict().items() if not name.startswith("fc_norm.1")}
    state["fc_norm.1.weight"] = layer.fc_norm[1].weight_orig * layer.fc_norm[1].weight_mask
    torch.testing.assert_close(layer(x).double(), truth(layer, state, [*x.chunk(K, -1)]), rtol=1e-4, atol=1e-5)


def test_a_scale_keeps_its_value_where_weights_lose_theirs() -> None:
    """No state_dict has the scale, and to_empty left whatever was in its new memory."""
    full, ids = torch.randn(64, H).bfloat16(), torch.arange(64)
    scale = torch.tensor(2560**0.5, dtype=torch.bfloat16)
    for device in ("meta", "cpu"):
        embedding = ek.VocabParallelEmbedding(64, H, scale=scale, dtype=torch.bfloat16, device=device)
        embedding.to_empty(device="cpu").load_state_dict({"weight": full})
        assert torch.equal(embedding(ids), full * scale)
    assert embedding.to("meta").to_empty(device="cpu").scale_tensor == scale
    embedding.scale_tensor.fill_(3)
    assert embedding.float().scale_tensor == 3
    scale.mul_(2)
    assert torch.equal(ek.VocabParallelEmbedding(64, H, scale=scale).float().scale_tensor, scale.float())


@pytest.mark.parametrize(
    ("scale", "kind", "message"),
    [
        (torch.tensor([2.0]), ValueError, "scale has shape (1,), expected a 0-d tensor or a float"),
        (torch.tensor(2), TypeError, "scale has dtype torch.int64, expected torch.bfloat16 or"),
        (torch.tensor(2.0).double(), TypeError, "scale has dtype torch.float64, expected torch.bfloat16 or"),
        (torch.tensor(2.0, device="meta"), ValueError, "scale is on meta, expected a tensor with a value"),
        ("2", TypeError, "scale is a str, expected a number or a 0-d tensor"),
    ],
    ids=["1-D", "int", "fp64", "meta", "str"],
)
def test_a_scale_that_is_no_floating_number_is_refused(scale: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(f'VocabParallelEmbedding: {message}')}"):
        ek.VocabParallelEmbedding(64, H, scale=scale)


class Adapted(torch.nn.Module):
    """As PEFT's lora.Linear: weight and bias are properties that read the layer inside."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


CONTEXT = {"num_chunks": K, "target_hidden_size": H, "hidden_size": D, "num_layers": 1, "num_kv_heads": 1}
ADAPTED = {
    "Eagle3Projection": ("fc", make_layer, lambda layer: layer(torch.randn(T, K * H).bfloat16())),
    "MTPProjection": (
        "eh_proj",
        lambda: ek.MTPProjection(ek.MTPConfig(H), dtype=torch.bfloat16),
        lambda layer: layer(torch.randn(T, H).bfloat16(), embeds=torch.randn(T, H).bfloat16()),
    ),
    "ContextKV": (
        "kv_proj",
        lambda: ek.ContextKV(ek.ContextKVConfig(**CONTEXT, head_dim=8, layer_norm=True), dtype=torch.bfloat16),
        lambda layer: layer.project(torch.randn(T, D).bfloat16()),
    ),
    "quantize": ("fc", make_layer, lambda layer: layer.quantize("fp8_row")),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "make", "call"), ADAPTED.values(), ids=ADAPTED)
def test_an_adapter_is_not_left_out(name: str, make: Callable, call: Callable) -> None:
    layer = make()
    setattr(layer, name, Adapted(getattr(layer, name)))
    with pytest.raises(RuntimeError, match=r"is that of a Adapted's base_layer, .* merge the adapter, because"):
        call(layer)


ADAPTED_NORMS = {
    "fc_norm.1": (lambda: make_layer(chunk_norm=True), ADAPTED["Eagle3Projection"][2]),
    "input_norm": (lambda: make_layer(concat_norm=True), ADAPTED["Eagle3Projection"][2]),
    "input_norm-first": (lambda: make_layer(chunk_norm=True, concat_norm=True), ADAPTED["Eagle3Projection"][2]),
    "enorm": ADAPTED["MTPProjection"][1:],
    "hnorm": (
        lambda: ek.MTPStreamsProjection(ek.MTPStreamsConfig(H, num_streams=2, hnorm_over="row"), dtype=torch.bfloat16),
        lambda layer: layer(torch.randn(T, 2 * H).bfloat16(), embeds=torch.randn(T, H).bfloat16()),
    ),
    "hidden_norm": ADAPTED["ContextKV"][1:],
    "layer_norm.0": ADAPTED["ContextKV"][1:],
    "aux_norm.2": (
        lambda: ek.ContextKV(ek.ContextKVConfig(**CONTEXT, head_dim=8, chunk_norm=True), dtype=torch.bfloat16),
        lambda layer: layer.combine(torch.randn(T, K * H).bfloat16()),
    ),
}


@pytest.mark.parametrize(
    ("name", "make", "call"), [(name, *case) for name, case in ADAPTED_NORMS.items()], ids=ADAPTED_NORMS
)
def test_an_adapter_around_a_norm_is_not_left_out(name: str, make: Callable, call: Callable) -> None:
    """PEFT's LNTuningLayer: its `weight` is the gain from before the tuning, and was read."""
    layer, name = make(), name.removesuffix("-first")
    layer.set_submodule(name, Adapted(layer.get_submodule(name)))
    message = "norm_concat: norm_weight is that of a Adapted's base_layer, expected a norm: merge the adapter, because"
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(layer)


@pytest.mark.parametrize("reader", ["embedding", "MTPProjection"])
def test_a_table_that_is_trained_is_refused(reader: str) -> None:
    """The rows had no gradient, and nothing said so."""
    table, ids = torch.nn.Parameter(torch.randn(64, H)), torch.arange(T)
    embedding = ek.VocabParallelEmbedding.from_weight(table, ek.VocabShard.build(64, tp_rank=0, tp_size=1))
    layer, hidden = ek.MTPProjection(ek.MTPConfig(H), dtype=torch.float32), torch.randn(T, H)

    def call() -> torch.Tensor:
        return embedding(ids) if reader == "embedding" else layer(hidden, ids, table=embedding)

    with pytest.raises(RuntimeError, match="an input requires grad, expected inputs without grad or a call under"):
        call()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            expected = table[ids] if reader == "embedding" else layer(hidden, embeds=table[ids])
            torch.testing.assert_close(call(), expected)


def test_autocast_does_not_round_the_product() -> None:
    layer = make_layer(torch.float32, chunk_norm=True, bias=True)
    chunks = [torch.randn(64, H) for _ in range(K)]
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer(chunks)
    assert torch.equal(under_autocast, layer(chunks))


@pytest.mark.parametrize(
    "changes", [{"bias": torch.randn(D)}, {"post_norm_weight": torch.ones(D).half()}, {"format": "fp8_row"}]
)
def test_a_low_fp32_precision_does_not_round_fp16(changes: dict) -> None:
    """oneDNN then rounds fp32 operands to bf16: calls that use the unrounded sums had 8 times eager's error."""
    x, weight = torch.randn(T, 256).half(), torch.randn(D, 256).half()
    if format := changes.get("format"):
        weight, changes = ek.quantize(weight, format), {}
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        expected = ek.norm_concat_linear([x], weight, **changes)
        try:
            torch.set_float32_matmul_precision("medium")
            found = ek.norm_concat_linear([x], weight, **changes)
        finally:
            torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(
        found, expected, rtol=2**-10, atol=1e-5
    )  # the last bit may differ where the fp32 sum is next to a tie


@pytest.mark.parametrize("format", [*FORMATS, "bf16_12bit"])
def test_autocast_does_not_round_a_dequantized_weight(format: str) -> None:
    """Where no kernel reads the codes, torch's fp32 product became a bf16 one: 0.2 % off instead of 1e-7."""
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=64, hidden_size=D, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16).quantize(format).float()
    chunks = [torch.randn(T, 64) for _ in range(K)]
    with environment_of(EAGLE_KERNELS_BACKEND="reference"):
        with torch.autocast("cpu", torch.bfloat16):
            under_autocast = layer(chunks)
        assert torch.equal(under_autocast, layer(chunks))


class _Doubled(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


@needs_packing
def test_a_parametrized_weight_is_not_packed() -> None:
    """Its setter raised, and left a layer without a weight."""
    layer, chunks = make_layer(bias=True), torch.randn(T, K * H).bfloat16()
    torch.nn.utils.parametrize.register_parametrization(layer.fc, "weight", _Doubled())
    before = layer(chunks)
    expected = "fc.weight is parametrized, expected a plain parameter, because a parametrization would have to compute"
    with pytest.raises(RuntimeError, match=expected):
        layer.prepack()
    assert torch.equal(layer(chunks), before)


def test_a_parametrized_bias_of_a_quantized_weight_is_read() -> None:
    layer, chunks = make_layer(bias=True).quantize("fp8_row"), torch.randn(T, K * H).bfloat16()
    without = layer(chunks)
    bias = layer.fc.bias.clone()
    torch.nn.utils.parametrize.register_parametrization(layer.fc, "bias", _Doubled())
    assert not torch.equal(layer(chunks), without)
    assert layer.half()(chunks.half()).dtype == torch.float16
    layer.bfloat16()
    torch.nn.utils.parametrize.remove_parametrizations(layer.fc, "bias")
    assert torch.equal(layer.fc.bias, 2 * bias)
