"""Configs and checkpoints that nobody checked: whatever JSON and bytes they hold, a reader returns, or raises one
sentence of the form `op: field is got, expected ...`."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st
from safetensors.torch import save

import eagle_kernels as ek
from eagle_kernels.context_kv import SPECULATORS, VARIANTS
from eagle_kernels.drafter_config import LAYER_ID_RULES
from eagle_kernels.models import families

KIND = ("paths", ["configs and checkpoints"])  # in the table of docs/guarantees.md
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 64, 4096, 2**31, 2**63, 10**400, -0.0, 0.5, 1e-5, 1e308])
NAMES = sorted({name for family in families().values() for name in family.model_types} | {"llama", "speculators"})
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=5)
GARBAGE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
IDS = st.lists(st.integers(-1, 40), max_size=5) | st.lists(GARBAGE, max_size=3)
FLAGS = st.booleans() | GARBAGE
SIZES = NUMBERS | GARBAGE

EAGLE3_FIELDS = {
    "hidden_size": st.sampled_from([64, 2048]) | SIZES,
    "target_hidden_size": SIZES,
    "num_aux_hidden_states": st.sampled_from([1, 3]) | SIZES,
    "num_aux_layers": SIZES,
    "eagle_aux_hidden_state_layer_ids": IDS | GARBAGE,
    "layer_ids": IDS | GARBAGE,
    "rms_norm_eps": st.sampled_from([0.0, 1e-6]) | SIZES,
    "vocab_size": SIZES,
    "draft_vocab_size": SIZES,
    "model_type": st.sampled_from(NAMES) | GARBAGE,
    "speculators_model_type": st.sampled_from(["eagle3", "peagle"]) | GARBAGE,
    **dict.fromkeys(("fc_norm", "use_aux_norm", "norm_before_fc", "bias", "use_aux_hidden_state"), FLAGS),
    **dict.fromkeys(("norm_output", "norm_before_residual"), FLAGS),
}
MTP_FIELDS = {
    "model_type": st.sampled_from([*NAMES, *(n for f in families().values() if f.mtp for n in f.mtp.drafter_types)]),
    "hidden_size": st.sampled_from([64, 2048]) | SIZES,
    "backbone_hidden_size": SIZES,
    "rms_norm_eps": st.sampled_from([0.0, 1e-6]) | SIZES,
}
ROPE_FIELDS = {
    **dict.fromkeys(("rope_dim", "partial_rotary_factor"), st.sampled_from([0.5, 1.0, 8]) | SIZES),
    "rope_type": st.just("proportional") | GARBAGE,
}
LAYER_TYPES = st.sampled_from(["full_attention", "sliding_attention"])
CONTEXT_FIELDS = {
    "architectures": st.lists(st.sampled_from(sorted(VARIANTS)) | GARBAGE, max_size=2) | GARBAGE,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), SIZES),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_rope_head_dim", "n_mtp_layers", "rotary_dim"), SIZES),
    **dict.fromkeys(("partial_rotary_factor", "rms_norm_eps"), st.sampled_from([0.0, 0.5, 1.0]) | SIZES),
    **dict.fromkeys(("target_layer_ids", "dspark_target_layer_ids"), IDS | GARBAGE),
    **dict.fromkeys(("attention_bias", "attention_k_eq_v", "use_gemma_norm", "dflash_config"), FLAGS),
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style"), FLAGS),
    "layer_types": st.lists(LAYER_TYPES | GARBAGE, max_size=3) | GARBAGE,
    "aux_hidden_state_layer_ids": IDS | GARBAGE,
}
OVERRIDES = st.fixed_dictionaries({}, optional={"bits": st.sampled_from([4, 16]) | GARBAGE, "data_type": GARBAGE})
OVERRIDES |= GARBAGE
QUANTIZATION_FIELDS = {
    "quant_algo": st.sampled_from(["FP8", "fp8_pb_wo", "NVFP4", "MIXED_PRECISION"]) | GARBAGE,
    "quant_method": st.sampled_from(["fp8", "modelopt", "compressed-tensors", "quark", "bitsandbytes"])
    | st.just("auto-round")
    | GARBAGE,
    "global_quant_config": st.fixed_dictionaries({"weight": GARBAGE | st.fixed_dictionaries({"dtype": GARBAGE})})
    | GARBAGE,
    "extra_config": st.dictionaries(st.sampled_from(["fc", ".*fc", "((("]) | st.text(max_size=3), OVERRIDES) | GARBAGE,
    "block_name_to_quantize": st.lists(st.sampled_from(["fc", "model.layers"]) | GARBAGE, max_size=3) | GARBAGE,
    "data_type": st.sampled_from(["int", "fp", "mx_fp"]) | GARBAGE,
    "rotation_config": GARBAGE,
    "weight_block_size": st.lists(st.sampled_from([1, 32, 128]) | GARBAGE, max_size=3) | GARBAGE,
}


def some_of(fields: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict]:
    """Up to five of the fields."""
    one = st.sampled_from(sorted(fields)).flatmap(lambda name: st.tuples(st.just(name), fields[name]))
    return st.lists(one, max_size=5).map(dict)


def check_sentence(call: Callable[[], object], *names: str) -> bool:
    """Whether the call returned. If not, it must raise a TypeError or ValueError whose sentence begins with a name of
    `names`."""
    try:
        call()
    except (TypeError, ValueError) as error:
        assert type(error) in (TypeError, ValueError), f"{type(error).__name__}: {error}"
        assert re.match(rf"(?s)({'|'.join(map(re.escape, names))}): .+, expected .", str(error)), str(error)
        return False
    return True


def check_any(for_any: Callable, call: Callable, draw: Callable[[st.DataObject], object], *names: str) -> None:
    """Some of what is drawn must be read, and some refused."""
    ended = set()

    def check(data: st.DataObject) -> None:
        drawn = draw(data)
        note(drawn)
        ended.add(check_sentence(lambda: call(drawn), *names))

    for_any(check, few=100)
    assert ended == {True, False}


def test_any_eagle3_config(for_any: Callable, record_property: Callable) -> None:
    record_property(*KIND)

    def draw(data: st.DataObject) -> object:
        config = {"hidden_size": 64} | data.draw(some_of(EAGLE3_FIELDS))
        for place in ("eagle_config", "transformer_layer_config"):
            if data.draw(st.booleans()):
                config[place] = data.draw(some_of(EAGLE3_FIELDS) | GARBAGE)
        return data.draw(GARBAGE) if data.draw(st.integers(0, 20)) == 20 else config

    check_any(for_any, ek.Eagle3Config.from_hf, draw, "Eagle3Config.from_hf", "Eagle3Config")


def test_any_mtp_config(for_any: Callable, record_property: Callable) -> None:
    record_property(*KIND)

    def draw(data: st.DataObject) -> object:
        config = {"model_type": "gemma4_assistant", "hidden_size": 64} | data.draw(some_of(MTP_FIELDS))
        if data.draw(st.booleans()):
            config["text_config"] = data.draw(some_of(MTP_FIELDS) | GARBAGE)
        other = GARBAGE | st.fixed_dictionaries({"model_type": GARBAGE})
        return data.draw(other) if data.draw(st.integers(0, 20)) == 20 else config

    check_any(for_any, ek.MTPConfig.from_hf, draw, "MTPConfig.from_hf", "MTPConfig")


def test_any_context_config(for_any: Callable, record_property: Callable) -> None:
    """A head_dim that is text raised Python's own message, and JSON's Infinity an OverflowError."""
    record_property(*KIND)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

    def draw(data: st.DataObject) -> object:
        latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "head_dim": 16, "dspark_target_layer_ids": [1]}
        name = data.draw(st.sampled_from(sorted(VARIANTS)))
        config = {"architectures": [name], **sizes, **latent} | data.draw(some_of(CONTEXT_FIELDS))
        rope = some_of(ROPE_FIELDS)
        for place in ("rope_parameters", "swa_rope_parameters"):
            if data.draw(st.booleans()):
                config[place] = data.draw(rope | st.dictionaries(LAYER_TYPES, rope | GARBAGE) | GARBAGE)
        for place in ("text_config", "transformer_layer_config", "dflash_config"):
            if data.draw(st.booleans()):
                config[place] = data.draw(some_of(CONTEXT_FIELDS) | GARBAGE)
        kinds = st.none() | st.sampled_from([*SPECULATORS, "eagle3"])
        return config | {"speculators_model_type": data.draw(kinds | GARBAGE)}

    check_any(
        for_any,
        lambda drawn: ek.ContextKVConfig.from_hf(drawn, target_hidden_size=64),
        draw,
        "ContextKVConfig.from_hf",
        "ContextKVConfig",
    )


def test_any_layer_ids(for_any: Callable, record_property: Callable) -> None:
    record_property(*KIND)

    def draw(data: st.DataObject) -> dict:
        return {
            "model_type": data.draw(st.sampled_from(NAMES) | GARBAGE),
            "num_layers": data.draw(st.just(40) | SIZES),
            "layer_ids": data.draw(st.none() | IDS),
            "algorithm": data.draw(st.sampled_from(["eagle3", "eagle3", "dflash", "dspark"]) | GARBAGE),
            "layer_ids_mean": data.draw(st.sampled_from([None, *LAYER_ID_RULES]) | GARBAGE),
        }

    check_any(for_any, lambda drawn: ek.capture_layers(**drawn), draw, "capture_layers")


WEIGHTS = {"fc.weight": torch.ones(4, 6), "fc_norm.0.weight": torch.ones(2).half(), "midlayer.x": torch.ones(1)}
WEIGHTS |= {f"fc_norm.{k}.weight": torch.ones(2).bfloat16() for k in (1, 2)}


def eagle3_layer() -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=2, hidden_size=4, chunk_norm=True)
    return ek.Eagle3Projection(config, dtype=torch.float32)


def test_any_checkpoint(for_any: Callable, record_property: Callable, tmp_path: Path) -> None:
    """The index is any JSON or any text, the file a real one with another header or with some bytes changed."""
    record_property(*KIND)
    good, ended = save(WEIGHTS), set()
    length = int.from_bytes(good[:8], "little")
    header, index = json.loads(good[8 : 8 + length]), tmp_path / "model.safetensors.index.json"

    def check(data: st.DataObject) -> None:
        content = bytearray(good)
        if data.draw(st.booleans()):
            changed = data.draw(st.dictionaries(st.sampled_from(sorted(header)), header_entries(), max_size=2))
            text = json.dumps(header | changed).encode()
            content = bytearray(len(text).to_bytes(8, "little") + text + good[8 + length :])
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=2)):
            content[place] = data.draw(st.integers(0, 255))
        file = tmp_path / "model.safetensors"
        file.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
        index.unlink(missing_ok=True)
        if data.draw(st.booleans()):
            index.write_bytes(data.draw(indices()))
            note(index.read_bytes())
        layer = eagle3_layer()
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        returned = check_sentence(lambda: layer.load_checkpoint(tmp_path), "Eagle3Projection.load_checkpoint")
        ended.add(returned)
        if not returned:
            assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())

    for_any(check, few=100)
    assert ended == {True, False}


def test_any_quantization_config(for_any: Callable, record_property: Callable, tmp_path: Path) -> None:
    """Beside a quantized checkpoint, in either of the two files that may hold the config."""
    record_property(*KIND)
    ended: set[bool] = set()
    weight = ek.quantize(WEIGHTS["fc.weight"], "fp8_block128")
    codes = {"fc.weight": weight.codes, "fc.weight_scale_inv": weight.scales}
    (tmp_path / "model.safetensors").write_bytes(save(WEIGHTS | codes))

    def check(data: st.DataObject) -> None:
        for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
            sections = some_of(QUANTIZATION_FIELDS) | GARBAGE
            text = json.dumps(data.draw(sections.map(lambda section, key=key: {key: section}) | GARBAGE)).encode()
            (tmp_path / name).write_bytes(data.draw(st.just(text) | st.binary(max_size=20) | st.just(b"[" * 100_000)))
            note((tmp_path / name).read_bytes()[:200])
        ended.add(check_sentence(lambda: eagle3_layer().load_checkpoint(tmp_path), "Eagle3Projection.load_checkpoint"))

    for_any(check, few=100)
    assert ended == {True, False}


def header_entries() -> st.SearchStrategy:
    dtypes = st.sampled_from(["F32", "BF16", "F64", "I64", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "none"])
    shapes = st.lists(st.sampled_from([0, 1, 2, 4, 6, 2**40, -1]), max_size=3)
    offsets = st.lists(st.sampled_from([0, 4, 8, 96, 100, 2**63, -4]), min_size=1, max_size=3)
    return st.fixed_dictionaries({"dtype": dtypes, "shape": shapes, "data_offsets": offsets}) | GARBAGE


def indices() -> st.SearchStrategy[bytes]:
    files = st.sampled_from(["model.safetensors", "absent.safetensors", ".", "", "\0", "\ud800", "x" * 300]) | GARBAGE
    maps = st.dictionaries(st.text(max_size=5), files, max_size=3) | GARBAGE
    texts = (st.fixed_dictionaries({"weight_map": maps}) | GARBAGE).map(lambda value: json.dumps(value).encode())
    return texts | st.binary(max_size=20) | st.just(b"[" * 100_000)


@pytest.mark.parametrize(
    "error", [KeyError("hidden_size"), ValueError("no sentence"), UnicodeDecodeError("x", b"", 0, 1, "")]
)
def test_another_exception_is_seen(error: Exception) -> None:
    def call() -> None:
        raise error

    with pytest.raises((AssertionError, KeyError)):
        check_sentence(call, "op")
