"""Checkpoints by every name that engines and trainers write; what does not fit is named and nothing is copied."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from backends import needs_packing
from guards import UnchangedTensors, same_bits

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D = 3, 24, 16


def eagle3_layer(**norms: bool) -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, **norms)
    return ek.Eagle3Projection(config, dtype=torch.bfloat16)


def eagle3_weights() -> dict[str, Tensor]:
    """The input stage under our own names."""
    names = {"fc.weight": (D, K * H)} | {f"fc_norm.{k}.weight": (H,) for k in range(K)}
    return {name: torch.randn(shape).bfloat16() for name, shape in names.items()}


def rest_of_a_drafter() -> dict[str, Tensor]:
    """Other weights of the same file, among them norms of layers and ids that are no floats."""
    names = ["norm.weight", "lm_head.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight"]
    names += ["layers.0.hidden_norm.weight", "layers.0.mlp.down_proj.weight", "layers.0.self_attn.q_norm.weight"]
    rest = {name: torch.randn(3) for name in names}
    return rest | {"d2t": torch.arange(4), "t2d": torch.ones(4, dtype=torch.bool)}


def renamed(weights: dict[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    return {rename(name): tensor for name, tensor in weights.items()}


def legacy(name: str) -> str:
    for k, level in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{k}", f"aux_norm_{level}")
    return name.replace("layers.0.", "midlayer.")


FORMATS = {
    "plain": lambda name: name,
    "model.": lambda name: name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}",
    "midlayer-aux_norm": legacy,
    "model.aux_norm": lambda name: f"model.{legacy(name)}",
    "speculators": lambda name: name.replace("embed_tokens", "verifier_norm"),
}


@pytest.mark.parametrize("file", ["mapping", "file", "folder", "sharded"])
@pytest.mark.parametrize("form", FORMATS)
def test_eagle3_reads_every_naming(form: str, file: str, tmp_path: Path) -> None:
    layer, weights = eagle3_layer(chunk_norm=True), eagle3_weights()
    named = renamed(weights | rest_of_a_drafter(), FORMATS[form])
    assert layer.load_checkpoint(stored(named, file, tmp_path)) is layer
    state = layer.state_dict()
    assert set(state) == set(weights)
    for name, tensor in weights.items():
        assert same_bits(state[name], tensor)


def stored(weights: dict[str, Tensor], file: str, folder: Path) -> object:
    if file == "mapping":
        return weights
    if file == "sharded":
        names = sorted(weights)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for shard, part in shards.items():
            save_file({name: weights[name] for name in part}, folder / shard)
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"fc.weight": torch.zeros(1)}, folder / "consolidated.safetensors")  # not in the index: not read
        return folder
    save_file(weights, folder / "model.safetensors")
    return folder if file == "folder" else os.fspath(folder / "model.safetensors")


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)], ids=["dense", "packed"])
def test_eagle3_reads_concat_norm_and_bias(packed: bool) -> None:
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, concat_norm=True, bias=True)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    if packed:
        layer.prepack()
    shapes = {"fc.weight": (D, K * H), "fc.bias": (D,), "input_norm.weight": (K * H,)}
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    layer.load_checkpoint(renamed(weights, "model.{}".format))
    assert (layer.fc.packed is not None) == packed
    assert all(same_bits(layer.state_dict()[name], tensor) for name, tensor in weights.items())


def with_chunk_norm(change: Callable[[dict], object]) -> Callable[[], tuple]:
    def build() -> tuple[ek.Eagle3Projection, dict]:
        weights = renamed(eagle3_weights(), "model.{}".format)
        change(weights)
        return eagle3_layer(chunk_norm=True), weights

    return build


ALL = "['fc.weight', 'fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight']"
SAYS = "because the config says K = 3, chunk_norm True, concat_norm False, bias False"
EAGLE3_ERRORS = [
    pytest.param(
        with_chunk_norm(lambda w: w.pop("model.fc_norm.1.weight")),
        f"weights has no fc_norm.1.weight, expected all of {ALL}",
        id="missing-norm",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.pop("model.fc.weight")),
        f"weights has no fc.weight, expected all of {ALL}",
        id="missing-fc",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"model.fc_norm.3.weight": torch.ones(H)})),
        f"weights has model.fc_norm.3.weight, expected only {ALL}, {SAYS}",
        id="a-norm-of-another-K",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"input_norm.weight": torch.ones(K * H)})),
        f"weights has input_norm.weight, expected only {ALL}, {SAYS}",
        id="concat-norm-too",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"hidden_norm.weight": torch.ones(D)})),
        f"weights has hidden_norm.weight, expected only {ALL}, {SAYS}",
        id="post-norm-of-dflash",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"model.fc_norm.1.norm.weight": torch.ones(H)})),
        f"weights has model.fc_norm.1.norm.weight, expected only {ALL}, {SAYS}",
        id="a-module-inside-a-norm",
    ),
    pytest.param(
        lambda: (eagle3_layer(), {"fc.weight": torch.ones(D, K * H), "input_norm.m.weight": torch.ones(K * H)}),
        "weights has input_norm.m.weight, expected only ['fc.weight'], because the config says K = 3, "
        "chunk_norm False, concat_norm False, bias False",
        id="a-nested-norm-the-config-forgot",
    ),
    pytest.param(
        lambda: (eagle3_layer(), renamed(eagle3_weights(), legacy)),
        "weights has aux_norm_low.weight, expected only ['fc.weight'], because the config says K = 3, "
        "chunk_norm False, concat_norm False, bias False",
        id="norms-the-config-forgot",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"fc.bias": torch.ones(D)})),
        f"weights has fc.bias, expected only {ALL}, {SAYS}",
        id="bias",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"fc.weight": torch.ones(D, K * H)})),
        "weights has model.fc.weight and fc.weight, expected one of them, because both are fc.weight",
        id="two-fc",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"model.fc.weight": torch.ones(D, 2 * H)})),
        "model.fc.weight has shape (16, 48), expected (16, 72), because it is (D, K*H) with K = 3 and H = 24",
        id="another-K",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"model.fc_norm.2.weight": torch.ones(8)})),
        "model.fc_norm.2.weight has shape (8,), expected (24,)",
        id="another-width",
    ),
    pytest.param(
        with_chunk_norm(lambda w: w.update({"model.fc.weight": w["model.fc.weight"].to(torch.float8_e4m3fn)})),
        "weights has model.fc.weight in torch.float8_e4m3fn, expected its scale beside it: one of "
        "['weight_scale', 'weight_scale_inv', 'scale', 'qscale_weight']",
        id="codes-without-a-scale",
    ),
]


@pytest.mark.parametrize(("build", "message"), EAGLE3_ERRORS)
def test_eagle3_names_what_does_not_fit_and_copies_nothing(build: Callable, message: str) -> None:
    layer, weights = build()
    expected = f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises((ValueError, TypeError), match=expected):
        layer.load_checkpoint(weights)


def test_a_file_without_safetensors_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    expected = f"safetensors is not installed, expected it to read '{tmp_path}': pip install safetensors"
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"Eagle3Projection.load_checkpoint: {expected}")):
        eagle3_layer().load_checkpoint(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    message = f"Eagle3Projection.load_checkpoint: weights is '{tmp_path}', expected a folder with .safetensors files"
    with pytest.raises(ValueError, match=re.escape(message)):
        eagle3_layer().load_checkpoint(tmp_path)


NO_INDEX = '{folder}/model.safetensors.index.json\' is not an index, expected JSON with a "weight_map" from names'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, NO_INDEX) for text in ("{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"fc.weight": 5}}')),
        pytest.param("[" * 100_000, NO_INDEX, id="too-deep"),
        *(
            (
                json.dumps({"weight_map": {"fc.weight": file}}),
                f"the index has fc.weight in {file!r}, expected a file in its own folder",
            )
            for file in ("../outside.safetensors", "/outside.safetensors", "parts/../../outside.safetensors", "absent")
        ),
        (
            json.dumps({"weight_map": {"fc.weight": "damaged.safetensors"}}),
            "{folder}/damaged.safetensors' is damaged, expected a safetensors file, because ",
        ),
    ],
)
def test_a_bad_index_is_worded(text: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "damaged.safetensors").write_bytes(b"damaged")
    (folder / "model.safetensors.index.json").write_text(text)
    save_file(eagle3_weights(), tmp_path / "outside.safetensors")
    expected = "Eagle3Projection.load_checkpoint: " + message.replace("{folder}", f"'{folder}")
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        eagle3_layer().load_checkpoint(folder)


def save_twice(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of two files, fc.weight in both."""
    first, last = eagle3_weights(), {"fc.weight": torch.randn(D, K * H).bfloat16()}
    for name, weights in (("a", first), ("b", last)):
        save_file(weights, folder / f"{name}.safetensors")
    return first, last


@pytest.mark.parametrize("stated", ["a", "b"])
def test_a_name_in_two_files_is_that_of_the_index(stated: str, tmp_path: Path) -> None:
    """The tensor of the last file was taken, whatever the index said."""
    first, last = save_twice(tmp_path)
    weight_map = {name: "a.safetensors" for name in first} | {
        "fc.weight": f"{stated}.safetensors",
        "x": "b.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = (first if stated == "a" else last)["fc.weight"]
    assert torch.equal(eagle3_layer(chunk_norm=True).load_checkpoint(tmp_path).fc.weight, expected)


def test_a_name_in_two_files_without_an_index_is_an_error(tmp_path: Path) -> None:
    save_twice(tmp_path)
    files = f"'{tmp_path}/a.safetensors' and '{tmp_path}/b.safetensors'"
    message = f"weights has fc.weight in {files}, expected one of them, because no index says which"
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"):
        eagle3_layer(chunk_norm=True).load_checkpoint(tmp_path)


def test_a_name_that_its_file_does_not_have_is_an_error(tmp_path: Path) -> None:
    first, _ = save_twice(tmp_path)
    weight_map = {name: "b.safetensors" for name in first} | {"x": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = "the index has fc_norm.0.weight in 'b.safetensors', expected 'a.safetensors', because that file alone has"
    with pytest.raises(ValueError, match=re.escape(message)):
        eagle3_layer(chunk_norm=True).load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.safetensors", "a safetensors file"),
        ("model.safetensors.index.json", "the index of a sharded checkpoint"),
        ("config.json", "JSON"),
        ("hf_quant_config.json", "JSON"),
    ],
)
@pytest.mark.parametrize(
    ("put", "because"),
    [
        (lambda file: file.mkdir(), "it is a folder"),
        (lambda file: file.symlink_to("nowhere"), "it is a link to 'nowhere', which is not there"),
        (os.mkfifo, "it is neither a file nor a folder"),
    ],
    ids=["folder", "link", "pipe"],
)
def test_what_is_no_file_is_named(put: Callable, because: str, name: str, expected: str, tmp_path: Path) -> None:
    """Opening a pipe waited for its writer, and an unreadable index or config was taken for a missing one."""
    save_file(eagle3_weights(), tmp_path / "model.safetensors")
    put(tmp_path / name)
    message = f"'{tmp_path / name}' cannot be read, expected {expected}, because {because}"
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"):
        eagle3_layer(chunk_norm=True).load_checkpoint(tmp_path)


def test_a_file_that_may_not_be_read_is_no_missing_one() -> None:
    """safetensors raises a FileNotFoundError of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.safetensors")
        save_file(eagle3_weights(), file)
        os.chmod(folder, 0o755)
        file.chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read it
        try:
            with pytest.raises(PermissionError, match=re.escape(str(file))):
                eagle3_layer().load_checkpoint(folder)
        finally:
            os.seteuid(user)


def test_a_missing_path_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        eagle3_layer().load_checkpoint(tmp_path / "nowhere")


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    """safetensors' OSError names no file."""
    (tmp_path / "x.safetensors").symlink_to("/proc/self/mem")
    message = f"'{tmp_path}/x.safetensors' cannot be read, expected a safetensors file, because No such device"
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}"):
        eagle3_layer().load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", [2**63, 0]), ("F32", [0, 2**64 - 1]), ("F6_E2M3", [D, K * H])], ids=str
)
def test_a_tensor_that_torch_cannot_have_is_named(dtype: str, shape: list[int], tmp_path: Path) -> None:
    """torch's TypeError of an int64 that overflows, and the SafetensorError of a dtype."""
    size = shape[0] * shape[1] * 6 // 8
    header = json.dumps({"fc.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    (tmp_path / "x.safetensors").write_bytes(content)
    message = f"fc.weight is {dtype} of shape {shape}, expected a dtype and sizes that torch has"
    with pytest.raises(ValueError, match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"):
        eagle3_layer().load_checkpoint(tmp_path)


class OfBytes(os.PathLike):
    def __fspath__(self) -> bytes:
        return b"a"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (5, "weights is a int, expected a safetensors file or folder, or tensors by name"),
        ({5: torch.zeros(1)}, "weights has 5, expected tensors by name"),
        ("a\0b", "weights is 'a\\x00b', expected the name of a file or folder"),
        (OfBytes(), "weights is b'a', expected the name of a file or folder"),
    ],
)
def test_weights_of_another_type_are_worded(weights: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'Eagle3Projection.load_checkpoint: {message}')}$"):
        eagle3_layer().load_checkpoint(weights)


def mtp_layer(**config: object) -> ek.MTPProjection:
    return ek.MTPProjection(ek.MTPConfig(H, D, **config), dtype=torch.bfloat16)


def mtp_weights() -> dict[str, Tensor]:
    shapes = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (D, 2 * H)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


NEXTN_REST = ["shared_head.norm.weight", "input_layernorm.weight", "self_attn.q_a_layernorm.weight", "mlp.fc.weight"]
QWEN3_NEXT = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}


def alias(names: dict[str, str], prefix: str) -> Callable[[str], str]:
    return lambda name: f"{prefix}{names.get(name.split('.')[0], name.split('.')[0])}.weight"


INKLING = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "input_proj"}
ERNIE = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"}
MINICPM = {"enorm": "input_norm1", "hnorm": "input_norm2", "eh_proj": "fc"}
LONGCAT = {name: f"model.mtp.layers.0.{name}{'.m' if 'norm' in name else ''}.weight" for name in ERNIE}
MTP_FORMATS = {
    "inkling": alias(INKLING, "model.mtp.layers.0."),
    "ernie": lambda name: f"model.{ERNIE[name.split('.')[0]]}.0.weight",
    "longcat": lambda name: LONGCAT[name.split(".")[0]],
    "minicpm": alias(MINICPM, ""),
    "plain": "{}".format,
    "model.layers.61": "model.layers.61.{}".format,
    "midlayer": "midlayer.{}".format,
    "qwen3-next": alias(QWEN3_NEXT, "mtp."),
    "mimo": alias(MIMO, "model.mtp_layers.0."),
}


@pytest.mark.parametrize("form", MTP_FORMATS)
def test_mtp_reads_every_naming(form: str, tmp_path: Path) -> None:
    layer, weights = mtp_layer(), mtp_weights()
    rest = {f"model.layers.61.{name}": torch.randn(3) for name in NEXTN_REST}
    layer.load_checkpoint(stored(renamed(weights, MTP_FORMATS[form]) | rest, "file", tmp_path))
    assert all(same_bits(layer.state_dict()[name], tensor) for name, tensor in weights.items())


def test_mtp_takes_the_layer_that_is_asked_for() -> None:
    stages = {number: mtp_weights() for number in (45, 46, 47)}
    weights = {f"model.layers.{number}.{name}": t for number, stage in stages.items() for name, t in stage.items()}
    for number, stage in stages.items():
        layer = mtp_layer().load_checkpoint(weights, layer=number)
        assert all(same_bits(layer.state_dict()[name], tensor) for name, tensor in stage.items())
    places = "['model.layers.45.', 'model.layers.46.', 'model.layers.47.']"
    because = "because layer says which, its names say where"
    for number, message in (
        (None, f"weights has MTP layers at {places}, expected one, {because}"),
        (4, f"weights has no MTP layer, expected one with layers.4., {because}"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'MTPProjection.load_checkpoint: {message}')}$"):
            mtp_layer().load_checkpoint(weights, layer=number)


@pytest.mark.parametrize("name", ["pre_projection", "fc", "eagle_linear"])
def test_a_stage_without_norms_is_its_projection(name: str) -> None:
    """Gemma 4's assistant and EAGLE-1."""
    layer, weight = mtp_layer(normed=False), torch.randn(D, 2 * H).bfloat16()
    rest = {"model.norm.weight": torch.ones(D), "layers.0.hidden_norm.weight": torch.ones(H)}
    layer.load_checkpoint({f"{name}.weight": weight} | rest)
    assert same_bits(layer.eh_proj.weight, weight)


def test_an_eagle_s_bias_loads_with_its_projection() -> None:
    layer = mtp_layer(normed=False, bias=True)
    weights = {"fc.weight": torch.randn(D, 2 * H).bfloat16(), "fc.bias": torch.randn(D).bfloat16()}
    layer.load_checkpoint(weights)
    assert same_bits(layer.eh_proj.bias, weights["fc.bias"])


MTP_ERRORS = [
    pytest.param(
        {}, lambda w: w.pop("hnorm.weight"), "weights has no hnorm.weight, expected all of {all}", id="missing-norm"
    ),
    pytest.param(
        {}, lambda w: w.pop("eh_proj.weight"), "weights has no eh_proj.weight, expected all of {all}", id="missing-proj"
    ),
    pytest.param(
        {},
        lambda w: w.clear(),
        "weights has no MTP layer, expected one, because layer says which, its names say where",
        id="none",
    ),
    pytest.param(
        {"normed": False},
        lambda w: None,
        "weights has enorm.weight, expected only ['eh_proj.weight'], because normed is False",
        id="norms-the-config-forgot",
    ),
    pytest.param(
        {"normed": False},
        lambda w: [w.update({f"{name}.norm.weight": w.pop(f"{name}.weight")}) for name in ("enorm", "hnorm")],
        "weights has enorm.norm.weight, expected a norm to have its weight alone, because what the tensor makes of it "
        "would be lost",
        id="nested-norms-the-config-forgot",
    ),
    pytest.param(
        {},
        lambda w: w.update({"eh_proj.bias": torch.ones(D)}),
        "weights has eh_proj.bias, expected only {all}, because bias is False",
        id="bias-the-config-forgot",
    ),
    pytest.param(
        {},
        lambda w: w.update({"eh_proj.weight": torch.ones(D, H)}),
        "eh_proj.weight has shape (16, 24), expected (16, 48), because it is (D, 2H) with H = 24",
        id="another-width",
    ),
    pytest.param(
        {},
        lambda w: w.update({"token_layernorm.weight": torch.ones(H)}),
        "weights has enorm.weight and token_layernorm.weight, expected one of them, because both are enorm.weight",
        id="two-enorms",
    ),
]


@pytest.mark.parametrize(("config", "change", "message"), MTP_ERRORS)
def test_mtp_names_what_does_not_fit_and_copies_nothing(config: dict, change: Callable, message: str) -> None:
    layer, weights = mtp_layer(**config), mtp_weights()
    message = message.format(all=sorted(weights))
    change(weights)
    expected = f"^{re.escape(f'MTPProjection.load_checkpoint: {message}')}$"
    with UnchangedTensors(list(layer.state_dict().values())), pytest.raises(ValueError, match=expected):
        layer.load_checkpoint(weights)
