"""Integers packed into int32, as three libraries write them. The packers here are loops over the documented bits."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels import int4_checkpoint
from eagle_kernels.stored_projection import StoredProjection
from guards import UnchangedTensors

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D, GROUP = 2, 64, 40, 32
W = K * H
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def int32(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def pack(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, n] -> [R, ceil(n * bits / 32)] words, number i of a word shifted by i * bits."""
    each = 32 // bits
    order = order or tuple(range(each))
    rows = []
    for row in numbers.tolist():
        row += [0] * (-len(row) % each)
        words = [row[begin : begin + each] for begin in range(0, len(row), each)]
        rows.append([int32(sum(word[order[i]] << i * bits for i in range(each))) for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def numbers(bits: int, act_order: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q [D, W], zeros [D, groups], scales [D, groups], the group of each column, the weight in float64)."""
    torch.manual_seed(bits)
    q = torch.randint(0, 1 << bits, (D, W))
    zeros = torch.randint(1, 1 << bits, (D, W // GROUP))
    scales = (torch.rand(D, W // GROUP) + 0.1).half()
    group = torch.arange(W) // GROUP
    if act_order:
        group = group[torch.randperm(W)]
    truth = (q - zeros[:, group]).double() * scales[:, group].double()
    return q, zeros, scales, group, truth


def compressed(bits: int = 4, symmetric: bool = False, act_order: bool = False) -> tuple[dict, dict, Tensor]:
    q, zeros, scales, group, truth = numbers(bits, act_order)
    tensors = {"weight_packed": pack(q, bits), "weight_scale": scales, "weight_shape": torch.tensor([D, W])}
    if symmetric:
        truth = (q - (1 << bits - 1)).double() * scales[:, group].double()
    else:
        tensors["weight_zero_point"] = pack(zeros.t(), bits).t()
    if act_order:
        tensors["weight_g_idx"] = group.int()
    return tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, truth


def gptq(bits: int = 4, version: str | None = None, act_order: bool = False) -> tuple[dict, dict, Tensor]:
    q, zeros, scales, group, truth = numbers(bits, act_order)
    stored = zeros if version == "gptq_v2" else zeros - 1
    tensors = {
        "qweight": pack(q, bits).t(),
        "qzeros": pack(stored.t(), bits),
        "scales": scales.t(),
        "g_idx": group.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP}
    return tensors, config if version is None else config | {"checkpoint_format": version}, truth


def awq() -> tuple[dict, dict, Tensor]:
    q, zeros, scales, _, truth = numbers(4)
    tensors = {
        "qweight": pack(q.t(), 4, AWQ_ORDER),
        "qzeros": pack(zeros.t(), 4, AWQ_ORDER),
        "scales": scales.t(),
    }
    return tensors, {"quant_method": "awq", "version": "gemm", "bits": 4}, truth


def says_transformers(config: str, **arguments: object) -> dict:
    """The config that transformers writes, with the keys of every release and tool that it serves."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, config)(bits=4, group_size=GROUP, **arguments).to_dict()


def auto_round(packing: str | None, written: tuple[dict, dict, Tensor]) -> tuple[dict, dict, Tensor]:
    """auto-round's config for tensors of GPTQ or AWQ; it writes a g_idx for gptqmodel only."""
    tensors, _, truth = written
    if packing != "auto_round:gptqmodel":
        tensors.pop("g_idx", None)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "autoround_version": "0.9.7"}
    return tensors, config if packing is None else config | {"packing_format": packing}, truth


def with_config(written: tuple[dict, dict, Tensor], config: dict) -> tuple[dict, dict, Tensor]:
    return written[0], config, written[2]


# auto-round's names for GPTQ's tensors, and checkpoint_format of those with the same zeros.
AUTO_ROUND = {
    None: "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
LAYOUTS: dict[str, tuple[str, Callable[[], tuple[dict, dict, Tensor]]]] = {
    "pack-symmetric": ("pack-quantized int4", lambda: compressed(symmetric=True)),
    "pack-zeros": ("pack-quantized int4", compressed),
    "pack-act-order": ("pack-quantized int4", lambda: compressed(act_order=True)),
    "pack-int8": ("pack-quantized int8", lambda: compressed(8, symmetric=True)),
    "gptq": ("gptq int4", gptq),
    "gptq-named": ("gptq int4", lambda: gptq(version="gptq")),
    "gptq-v2": ("gptq int4", lambda: gptq(version="gptq_v2")),
    "gptq-act-order": ("gptq int4", lambda: gptq(act_order=True)),
    "gptq-int8": ("gptq int8", lambda: gptq(8)),
    "awq": ("awq int4", awq),
    "gptq-transformers": ("gptq int4", lambda: with_config(gptq(), says_transformers("GPTQConfig", sym=False))),
    "gptq-v2-transformers": (
        "gptq int4",
        lambda: with_config(gptq(version="gptq_v2"), says_transformers("GPTQConfig", format="gptq_v2", sym=False)),
    ),
    "gptq-v2-by-format": (
        "gptq int4",
        lambda: with_config(gptq(version="gptq_v2"), {"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}),
    ),
    "awq-transformers": ("awq int4", lambda: with_config(awq(), says_transformers("AwqConfig"))),
    "awq-gptqmodel": (
        "awq int4",
        lambda: with_config(awq(), {"quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm"}),
    ),
    **{
        f"auto-round-{packing}": (
            "gptq int4",
            lambda packing=packing, same=same: auto_round(packing, gptq(version=same)),
        )
        for packing, same in AUTO_ROUND.items()
    },
    "auto-round-auto_round:auto_awq": ("awq int4", lambda: auto_round("auto_round:auto_awq", awq())),
    "auto-round-auto_round:awq": ("awq int4", lambda: auto_round("auto_round:awq", awq())),
}


def layer() -> ek.Eagle3Projection:
    return ek.Eagle3Projection(ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D), dtype=torch.bfloat16)


def save(folder: Path, tensors: dict[str, Tensor], config: dict | None) -> None:
    save_file({f"fc.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_loads_as_numbers(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kind, build = LAYOUTS[layout]
    tensors, config, truth = build()
    save(tmp_path, tensors, config)
    loaded = layer().load_checkpoint(tmp_path)
    assert torch.equal(loaded.fc.weight, truth.float().bfloat16())
    name = "fc.weight_packed" if kind.startswith("pack") else "fc.qweight"
    assert f"{name} is {kind}, dequantized to torch.bfloat16: no kernel reads {kind}" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_device_is_not_the_checkpoints(layout: str, tmp_path: Path) -> None:
    """Without a g_idx, scales and zeros were gathered by an index on meta: a weight of whatever memory contained."""
    tensors, config, truth = LAYOUTS[layout][1]()
    save(tmp_path, tensors, config)
    projection = layer()
    with torch.device("meta"):
        projection.load_checkpoint(tmp_path)
    assert torch.equal(projection.fc.weight, truth.float().bfloat16())


def test_columns_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 M values are dequantized at a time; this weight has more."""
    rows = 1 << 19
    q = torch.randint(0, 16, (8, 24))
    words = pack(q, 4).repeat(rows // 8, 1)
    names = {"weight_packed": "w", "weight_scale": "s"}
    read = {"w": words, "s": torch.ones(rows, 3)}.__getitem__
    columns = []
    unpack = int4_checkpoint._unpack
    monkeypatch.setattr(int4_checkpoint, "_unpack", lambda w, bits: columns.append(w.shape[1]) or unpack(w, bits))
    stored = StoredProjection("op", names, read, (rows, 24), "", {})
    weight = int4_checkpoint.packed_of(stored).dequantize("op", "w")
    assert columns == [1, 1, 1]
    assert torch.equal(weight[:8], (q - 8).bfloat16()) and torch.equal(weight[-8:], (q - 8).bfloat16())


def change(layout: str, edit: Callable[[dict, dict], object], config: bool = True) -> Callable:
    def build() -> tuple[dict, dict | None]:
        tensors, says, _ = LAYOUTS[layout][1]()
        edit(tensors, says)
        return tensors, says if config else None

    return build


def in_group(**weights: object) -> dict:
    """compressed-tensors' config_groups."""
    group = {"num_bits": 4, "group_size": GROUP, "type": "int", "strategy": "group", **weights}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": group}}}


def without(name: str, **says: object) -> Callable:
    return lambda tensors, config: (tensors.pop(name, None), config.update(says))


NAN = float("nan")
BROKEN = {
    "order-without-groups": (
        change("gptq-act-order", without("g_idx", desc_act=True)),
        "weights has fc.qweight, expected the group of each column beside it, because the checkpoint says desc_act "
        "True",
    ),
    "order-without-groups-packed": (
        change("pack-act-order", without("weight_g_idx", **in_group(symmetric=False, actorder="group"))),
        "weights has fc.weight_packed, expected the group of each column beside it, because the checkpoint says "
        "config_groups.group_0.weights.actorder 'group'",
    ),
    "asymmetric-without-zeros": (
        change("pack-zeros", without("weight_zero_point", **in_group(symmetric=False))),
        "weights has fc.weight_packed, expected weight_zero_point beside it, because the checkpoint says "
        "config_groups.group_0.weights.symmetric False",
    ),
    "another-group-size": (
        change("gptq", lambda t, c: c.update(group_size=64)),
        "fc.qweight has 4 groups in 128 columns, expected 2, because the checkpoint says group_size 64",
    ),
    "one-group": (
        change("awq", lambda t, c: c.update(group_size=-1)),
        "fc.qweight has 4 groups in 128 columns, expected 1, because the checkpoint says group_size -1",
    ),
    "another-order": (
        change(
            "gptq-act-order",
            lambda t, c: (
                t["g_idx"].copy_(torch.arange(W) // GROUP),
                t["g_idx"][40:41].fill_(3),
                c.update(desc_act=False),
            ),
        ),
        "fc.g_idx[40] is 3, expected 1, because the checkpoint says desc_act False",
    ),
    "another-group-size-of-awq": (
        change("awq", lambda t, c: c.update(q_group_size=64)),
        "fc.qweight has 4 groups in 128 columns, expected 2, because the checkpoint says q_group_size 64",
    ),
    "another-width-of-awq": (
        change("awq", lambda t, c: c.update(w_bit=8)),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says w_bit 8",
    ),
    "another-group-size-packed": (
        change("pack-zeros", lambda t, c: c.update(in_group(group_size=16))),
        "fc.weight_packed has 4 groups in 128 columns, expected 8, because the checkpoint says "
        "config_groups.group_0.weights.group_size 16",
    ),
    "another-width-packed": (
        change("pack-zeros", lambda t, c: c.update(in_group(num_bits=8))),
        "fc.weight_packed has 4 bits a code, expected 8, because the checkpoint says "
        "config_groups.group_0.weights.num_bits 8",
    ),
    "another-width-of-this-layer": (
        change("gptq", lambda t, c: c.update(dynamic={"+:.*fc": {"bits": 8}})),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says dynamic.+:.*fc.bits 8",
    ),
    "another-width-of-this-layer-of-auto-round": (
        change("auto-round-auto_round", lambda t, c: c.update(extra_config={"model.fc": {"bits": 8}})),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says extra_config.model.fc.bits 8",
    ),
    "another-group-size-of-the-others": (
        change(
            "auto-round-auto_round", lambda t, c: c.update(group_size=64, extra_config={"fc": {"group_size": None}})
        ),
        "fc.qweight has 4 groups in 128 columns, expected 2, because the checkpoint says group_size 64",
    ),
    "in-a-block-of-auto-round": (
        change("auto-round-auto_round", lambda t, c: c.update(bits=8, block_name_to_quantize=[["model.f"], 3])),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says bits 8",
    ),
    "blocks-of-another-tool": (
        change("gptq", lambda t, c: c.update(bits=8, block_name_to_quantize="model.layers")),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says bits 8",
    ),
    "integers-as-nvfp4": (
        change("auto-round-auto_round", lambda t, c: c.update(extra_config={".*fc": {"data_type": "nv_fp"}})),
        "fc.qweight is gptq, expected nvfp4, because the checkpoint says extra_config..*fc.data_type nv_fp, bits 4",
    ),
    "rotated": (
        change("auto-round-auto_round", lambda t, c: c.update(rotation_config={"hadamard_type": "hadamard"})),
        "fc.qweight is of a layer with a transform, expected one without, because the checkpoint says rotation_config",
    ),
    "rotated-by-itself": (
        change("auto-round-auto_round", lambda t, c: c.update(extra_config={"fc": {"rotation_config": {"a": 1}}})),
        "fc.qweight is of a layer with a transform, expected one without, because the checkpoint says "
        "extra_config.fc.rotation_config",
    ),
    "packed-as-nvfp4": (
        change("pack-zeros", lambda t, c: c.update(format="nvfp4-pack-quantized")),
        "fc.weight_packed is pack-quantized, expected nvfp4, because the checkpoint says format nvfp4-pack-quantized",
    ),
    "packed-as-floats": (
        change("pack-zeros", lambda t, c: c.update(in_group(type="float"))),
        "fc.weight_packed is pack-quantized, expected mxfp4, because the checkpoint says config_groups.group_0.weights "
        "type float, num_bits 4, strategy group, group_size 32",
    ),
    "another-shape": (
        change("pack-zeros", lambda t, c: t.update(weight_shape=torch.tensor([D, W - 1]))),
        "fc.weight_shape is [40, 127], expected [40, 128], because W is (D, K*H) with K = 2 and H = 64",
    ),
    "no-scales": (
        change("awq", lambda t, c: t.pop("scales")),
        "weights has fc.qweight, expected scales beside it",
    ),
    "no-zeros": (
        change("gptq", lambda t, c: t.pop("qzeros")),
        "weights has fc.qweight, expected qzeros beside it",
    ),
    "nan-scale": (
        change("gptq", lambda t, c: t["scales"][1, 5].fill_(NAN)),
        "fc.scales is NaN at [1, 5], expected numbers, because what it scales would be lost",
    ),
    "nan-scale-packed": (
        change("pack-zeros", lambda t, c: t["weight_scale"][5, 1].fill_(NAN)),
        "fc.weight_scale is NaN at [5, 1], expected numbers, because what it scales would be lost",
    ),
    "three-bits": (
        change("gptq", lambda t, c: t.update(qweight=torch.zeros(12, D, dtype=torch.int32))),
        "fc.qweight has shape (12, 40), expected (16, 40) of gptq int4 or (32, 40) of gptq int8 or (128, 5) of awq "
        "int4, because W is (40, 128), (D, K*H) with K = 2 and H = 64; other packings are not read",
    ),
    "six-bits": (
        change("pack-zeros", lambda t, c: t.update(weight_packed=torch.zeros(D, 24, dtype=torch.int32))),
        "fc.weight_packed has shape (40, 24), expected (40, 16) of pack-quantized int4 or (40, 32) of pack-quantized "
        "int8, because W is (40, 128), (D, K*H) with K = 2 and H = 64; other packings are not read",
    ),
    "gemv": (
        change("awq", lambda t, c: c.update(version="gemv")),
        "the checkpoint says version 'gemv', expected 'gemm', because fc.qweight is awq, of which nothing else is read",
    ),
    "gemv-of-gptqmodel": (
        change("awq", lambda t, c: c.update(version=None, format="gemv", checkpoint_format="gemv")),
        "the checkpoint says format 'gemv', expected 'gemm', because fc.qweight is awq, of which nothing else is read",
    ),
    "marlin": (
        change("gptq", lambda t, c: c.update(checkpoint_format="marlin")),
        "the checkpoint says checkpoint_format 'marlin', expected 'gptq' or 'gptq_v2', because fc.qweight is gptq, of "
        "which nothing else is read",
    ),
    "bitblas-by-format": (
        change("gptq", lambda t, c: c.update(format="bitblas")),
        "the checkpoint says format 'bitblas', expected 'gptq' or 'gptq_v2', because fc.qweight is gptq, of which "
        "nothing else is read",
    ),
    "zeros-of-64-bits": (
        change("gptq", lambda t, c: t.update(qzeros=t["qzeros"].long())),
        "fc.qzeros has dtype torch.int64, expected torch.int32",
    ),
    "two-versions": (
        change("gptq-named", lambda t, c: c.update(format="gptq_v2")),
        "the checkpoint says checkpoint_format 'gptq' and format 'gptq_v2', expected the same of both, because one "
        "stores zeros less 1, the other as they are",
    ),
    "format-without-a-method": (
        change("gptq", lambda t, c: (c.pop("quant_method"), c.update(format="gptq"))),
        "fc.qweight is gptq, expected a format that is read here, because the checkpoint says format gptq",
    ),
    "another-packing-of-auto-round": (
        change("auto-round-auto_round", lambda t, c: c.update(packing_format="auto_round:fp8_static")),
        "the checkpoint says packing_format 'auto_round:fp8_static', expected 'auto_round:auto_gptq' or "
        "'auto_round:gptq' or 'auto_round' or 'auto_round:exllamav2' or 'auto_round:gptqmodel', because fc.qweight is "
        "gptq, of which nothing else is read",
    ),
    "awq-that-auto-round-calls-gptq": (
        change("auto-round-auto_round:auto_awq", lambda t, c: c.update(packing_format="auto_round:auto_gptq")),
        "the checkpoint says packing_format 'auto_round:auto_gptq', expected 'auto_round:auto_awq' or "
        "'auto_round:awq', because fc.qweight is awq, of which nothing else is read",
    ),
    "a-packing-that-is-no-string": (
        change("auto-round-auto_round", lambda t, c: c.update(packing_format=["auto_round"])),
        "the checkpoint says packing_format ['auto_round'], expected 'auto_round:auto_gptq' or 'auto_round:gptq' or "
        "'auto_round' or 'auto_round:exllamav2' or 'auto_round:gptqmodel', because fc.qweight is gptq, of which "
        "nothing else is read",
    ),
    "gptqmodel-of-auto-round-0.5": (
        change("auto-round-auto_round:gptqmodel", lambda t, c: c.update(autoround_version="0.5.1")),
        "the checkpoint says packing_format 'auto_round:gptqmodel' of auto-round 0.5.1, expected one of 0.6 or later, "
        "because 0.5 stored its zeros less 1",
    ),
    "gptq-without-a-config": (
        change("gptq", lambda t, c: None, config=False),
        "fc.qweight is gptq, expected a config.json beside it whose quantization_config is GPTQ's, because its "
        "checkpoint_format says whether zeros are stored less 1",
    ),
    "another-method": (
        change("awq", lambda t, c: c.update(quant_method="gptq")),
        "fc.qweight is awq, expected gptq, because the checkpoint says quant_method gptq",
    ),
    "another-width": (
        change("gptq", lambda t, c: c.update(bits=8)),
        "fc.qweight has 4 bits a code, expected 8, because the checkpoint says bits 8",
    ),
    "five-groups": (
        change("awq", lambda t, c: t.update(scales=torch.ones(5, D), qzeros=torch.zeros(5, 5, dtype=torch.int32))),
        "fc.scales has 5 groups, expected a divisor of 128, the columns of the weight",
    ),
    "group-too-large": (
        change("gptq", lambda t, c: t["g_idx"][3].fill_(4)),
        "fc.g_idx has groups 0 to 4, expected 0 to 3, because fc.scales has 4",
    ),
    "groups-of-other-columns": (
        change("gptq", lambda t, c: t.update(g_idx=torch.zeros(7, dtype=torch.int32))),
        "fc.g_idx has shape (7,), expected (128,)",
    ),
    "scales-of-other-rows": (
        change("pack-zeros", lambda t, c: t.update(weight_scale=torch.ones(D + 1, 4))),
        "fc.weight_scale has shape (41, 4), expected (40, groups), because fc.weight_packed is pack-quantized",
    ),
    "zeros-of-other-rows": (
        change("gptq", lambda t, c: t.update(qzeros=torch.zeros(4, 4, dtype=torch.int32))),
        "fc.qzeros has shape (4, 4), expected (4, 5)",
    ),
    "int64-codes": (
        change("awq", lambda t, c: t.update(qweight=t["qweight"].long())),
        "fc.qweight has dtype torch.int64, expected torch.int32",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_and_copies_nothing(case: str, tmp_path: Path) -> None:
    build, message = BROKEN[case]
    save(tmp_path, *build())
    own = layer()
    expected = f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"
    with UnchangedTensors(list(own.state_dict().values())), pytest.raises((ValueError, TypeError), match=expected):
        own.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        pytest.param("gptq-act-order", {"desc_act": True}, id="order-with-groups"),
        pytest.param(
            "gptq", {"bits": 8, "group_size": 16, "dynamic": {"+:fc": {"bits": 4, "group_size": 32}}}, id="own"
        ),
        pytest.param("gptq", {"desc_act": False}, id="in-order"),
        pytest.param(
            "auto-round-auto_round:auto_gptq",
            {"bits": 8, "group_size": 16, "extra_config": {"fc": {"bits": 4, "group_size": 32, "act_bits": None}}},
            id="own-of-auto-round",
        ),
        pytest.param(
            "auto-round-auto_round",
            {"bits": 8, "extra_config": {"model.layers": {"bits": 2}, ".*fc.*": {"bits": 4}, "f": {"bits": 3}, "x": 4}},
            id="own-by-a-pattern-of-auto-round",
        ),
        pytest.param(
            "auto-round-auto_round",
            {"extra_config": {".*fc.*": {"bits": 8}, "model.fc": {"bits": 4}}},
            id="own-name-before-a-pattern",
        ),
        pytest.param(
            "auto-round-auto_round:auto_awq",
            {"bits": 8, "data_type": "nv_fp", "extra_config": {"fc": {"bits": 16, "data_type": "float"}}},
            id="left-out-by-auto-round",
        ),
        pytest.param(
            "auto-round-auto_round:gptqmodel",
            {"bits": 8, "data_type": "mx_fp", "block_name_to_quantize": "model.layers,mtp.layers"},
            id="in-no-block-of-auto-round",
        ),
        pytest.param(
            "auto-round-auto_round",
            {"bits": 8, "to_quant_block_names": ["layers"], "extra_config": {"fc": {"bits": 4, "data_type": "int"}}},
            id="in-no-block-and-named",
        ),
        pytest.param("auto-round-auto_round:auto_gptq", {"autoround_version": "0.5.1"}, id="gptq-of-auto-round-0.5"),
        pytest.param("auto-round-auto_round:gptqmodel", {"autoround_version": "0.6.0"}, id="gptqmodel-since-0.6"),
        pytest.param("awq", {"w_bit": 4, "q_group_size": GROUP}, id="awq"),
        pytest.param("gptq", {"dynamic": {"-:fc": {}, "+:lm_head": {"bits": 8}}}, id="of-other-layers"),
        pytest.param("pack-symmetric", in_group(symmetric=True, actorder="weight"), id="group"),
        pytest.param("pack-zeros", in_group(symmetric=False), id="zeros"),
        pytest.param(
            "pack-zeros",
            {"config_groups": in_group()["config_groups"] | {"b": {"targets": ["re:x"], "weights": {"num_bits": 8}}}},
            id="one-of-two-groups",
        ),
        pytest.param("pack-zeros", in_group(num_bits=8) | {"ignore": ["fc"]}, id="left-out"),
    ],
)
def test_a_config_that_agrees(layout: str, says: dict, tmp_path: Path) -> None:
    tensors, config, truth = LAYOUTS[layout][1]()
    save(tmp_path, tensors, config | says)
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())


@pytest.mark.parametrize("layout", ["pack-zeros", "gptq", "awq"])
def test_the_last_group_of_a_row_has_fewer_columns(layout: str, tmp_path: Path) -> None:
    """Groups of 96 in 128 columns were once read as two of 64."""
    size, groups = 96, 2
    q, group = torch.randint(0, 16, (D, W)), torch.arange(W) // size
    zeros, scales = torch.randint(1, 16, (D, groups)), (torch.rand(D, groups) + 0.1).half()
    tensors, config, _ = LAYOUTS[layout][1]()
    tensors.pop("g_idx", None)
    if layout == "pack-zeros":
        tensors |= {"weight_packed": pack(q, 4), "weight_scale": scales, "weight_zero_point": pack(zeros.t(), 4).t()}
        config |= in_group(group_size=size)
    elif layout == "gptq":
        tensors |= {"qweight": pack(q, 4).t(), "scales": scales.t(), "qzeros": pack(zeros.t() - 1, 4)}
        config["group_size"] = size
    else:
        tensors |= {"qweight": pack(q.t(), 4, AWQ_ORDER), "scales": scales.t()}
        tensors["qzeros"] = pack(zeros.t(), 4, AWQ_ORDER)
        config["group_size"] = size
    save(tmp_path, tensors, config)
    truth = (q - zeros[:, group]).double() * scales[:, group].double()
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("of_layer", [False, True], ids=["config", "dynamic"])
def test_symmetric_gptq_has_the_zeros_that_engines_take(stored: str, of_layer: bool, tmp_path: Path) -> None:
    """They skip qzeros and take 8: with other zeros the numbers here were others than in both engines."""
    tensors, config, _ = gptq(version=stored)
    config |= {"dynamic": {"+:.*fc": {"sym": True}}} if of_layer else {"sym": True}
    place = "dynamic.+:.*fc." if of_layer else ""
    save(tmp_path, tensors, config)
    message = rf"fc.qzeros has a zero of \d+ for row \d+, group \d, expected 8, because .* {re.escape(place)}sym True$"
    with pytest.raises(ValueError, match=message):
        layer().load_checkpoint(tmp_path)
    q, _, scales, group, _ = numbers(4)
    middle = torch.full((W // GROUP, D), 7 if stored == "gptq" else 8)
    save(tmp_path, tensors | {"qzeros": pack(middle, 4)}, config)
    truth = (q - 8).double() * scales[:, group].double()
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())


def test_a_parent_in_ignore_leaves_no_layer_out(tmp_path: Path) -> None:
    """llm-compressor lists parents of layers in codes; groups of 96 in 128 columns were read as two of 64."""
    tensors, _, _ = LAYOUTS["pack-symmetric"][1]()
    config = in_group(group_size=96) | {"ignore": ["model"]}
    q, scales = torch.randint(0, 16, (D, W)), (torch.rand(D, 2) + 0.1).half()
    tensors |= {"weight_packed": pack(q, 4), "weight_scale": scales}
    save(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized", **config})
    truth = (q - 8).double() * scales.double()[:, torch.arange(W) // 96]
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())


@pytest.mark.parametrize("desc_act", [None, False, True])
def test_a_g_idx_of_zeros_is_no_order(desc_act: bool | None, tmp_path: Path) -> None:
    """A quantizer without act order leaves zeros there; obeyed, they gave all columns the scales of the first group."""
    tensors, config, truth = gptq()
    tensors["g_idx"].zero_()
    save(tmp_path, tensors, config if desc_act is None else config | {"desc_act": desc_act})
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["fc"]},
        {"quant_method": "fp8", "version": "0.9", "modules_to_not_convert": ["fc"]},
        {"quant_method": "gptq", "bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2", "dynamic": {"-:fc": {}}},
    ],
    ids=lambda config: config["quant_method"],
)
@pytest.mark.parametrize("layout", ["pack-symmetric", "pack-zeros", "awq", "gptq-v2"])
def test_a_layer_that_the_config_leaves_out_is_what_its_tensors_are(layout: str, config: dict, tmp_path: Path) -> None:
    """GPTQ's do not say how zeros are stored: they were taken for stored less 1."""
    tensors, _, truth = LAYOUTS[layout][1]()
    save(tmp_path, tensors, config)
    if layout == "gptq-v2" and config["quant_method"] != "gptq":
        expected = (
            "fc.qweight is gptq, expected a config.json beside it whose quantization_config is GPTQ's, because its "
        )
        with pytest.raises(ValueError, match=f"{expected}checkpoint_format says whether zeros are stored less 1"):
            layer().load_checkpoint(tmp_path)
        return
    assert torch.equal(layer().load_checkpoint(tmp_path).fc.weight, truth.float().bfloat16())
