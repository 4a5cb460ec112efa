"""`eagle-kernels doctor`: pairs that fit, and one pair for each trap, in the files of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eagle_kernels.bench import cli
from eagle_kernels.bench.doctor import pair

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D, V, DRAFTED, N = 3, 64, 48, 1000, 200, 12
IDS = "eagle_aux_hidden_state_layer_ids"
FP8 = torch.float8_e4m3fn


class Files:
    """The files of a target and its drafter."""

    target: dict
    drafter: dict
    weights: dict[str, torch.Tensor]

    def save(self, folder: Path) -> tuple[Path, Path]:
        for name, config in (("target", self.target), ("drafter", self.drafter)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        save_file(self.weights, folder / "drafter/model.safetensors")
        return folder / "target", folder / "drafter"


class Checkpoints(Files):
    """A Llama target and an EAGLE-3 drafter of it that both engines read as it means."""

    def __init__(self) -> None:
        self.target = {"model_type": "llama", "hidden_size": H, "num_hidden_layers": N, "vocab_size": V}
        self.drafter = {"hidden_size": D, "target_hidden_size": H, "vocab_size": V, "draft_vocab_size": DRAFTED}
        self.drafter["fc_norm"] = True
        self.weights = {f"fc_norm.{k}.weight": torch.ones(H) for k in range(K)}
        self.weights |= {"fc.weight": torch.ones(D, K * H).bfloat16(), "lm_head.weight": torch.ones(DRAFTED, D)}
        self.weights |= {"d2t": torch.zeros(DRAFTED, dtype=torch.int64), "norm.weight": torch.ones(D)}
        self.weights |= {"midlayer.hidden_norm.weight": torch.ones(D)}


# Of each kind a pair without a finding, and facts of it.
FITS: dict[str, tuple[Callable[[], Files], Callable, dict]] = {
    "EAGLE-3": (Checkpoints, lambda c: None, {"drafter": "EAGLE-3", "boundaries": [2, 6, 9], "fc": "BF16"}),
    "EAGLE-3 in FP8": (
        Checkpoints,
        lambda c: with_config(c, {"quant_method": "fp8"}),
        {"fc": "F8_E4M3 with weight_scale"},
    ),
    "EAGLE-3 in NVFP4": (Checkpoints, lambda c: in_nvfp4(c), {"fc": "U8 with weight_scale, weight_scale_2"}),
    "an fc that the config leaves out": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["model.fc"]}),
        {"fc": "BF16"},
    ),
    "an fc that a pattern leaves out": (
        Checkpoints,
        lambda c: c.drafter.update(quantization_config={"quant_algo": "FP8", "exclude_modules": ["lm_head", "*fc*"]}),
        {"fc": "BF16"},
    ),
    "an fc that is in no group": (
        Checkpoints,
        lambda c: c.drafter.update(
            quantization_config={
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"targets": ["re:.*mlp.*"]}},
            }
        ),
        {"fc": "BF16"},
    ),
}


@pytest.mark.parametrize("case", FITS)
def test_a_pair_that_fits_has_no_finding(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, change, facts = FITS[case]
    checkpoints = build()
    change(checkpoints)
    folders = list(map(str, checkpoints.save(tmp_path)))
    asked = ["--engine", "vllm"] if "FP4" in case or "FP8" in case else []  # SGLang has its trap there
    assert cli.main(["doctor", *folders, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found["facts"].get(name) for name in facts} == facts
    assert cli.main(["doctor", *folders, *asked]) == 0
    out = capsys.readouterr().out
    assert out.endswith("nothing found\n")
    assert max(map(len, out.splitlines())) <= 80


def renamed(checkpoints: Files, old: str, new: str) -> None:
    checkpoints.weights[new] = checkpoints.weights.pop(old)


def quantized(checkpoints: Files) -> None:
    checkpoints.weights["fc.weight"] = checkpoints.weights["fc.weight"].to(FP8)
    checkpoints.weights["fc.weight_scale"] = torch.ones(1)


def with_config(checkpoints: Files, quantization: dict) -> None:
    quantized(checkpoints)
    checkpoints.drafter["quantization_config"] = quantization


def in_nvfp4(checkpoints: Files) -> None:
    checkpoints.weights |= {"fc.weight": torch.zeros(D, K * H // 2, dtype=torch.uint8)}
    checkpoints.weights |= {"fc.weight_scale": torch.ones(D, K * H // 16).to(FP8), "fc.weight_scale_2": torch.ones(())}
    checkpoints.drafter["quantization_config"] = {"quant_algo": "NVFP4"}


def without_scale(checkpoints: Checkpoints) -> None:
    quantized(checkpoints)
    del checkpoints.weights["fc.weight_scale"]


def as_wide_as_the_drafter(checkpoints: Checkpoints) -> None:
    checkpoints.drafter["hidden_size"] = K * H
    checkpoints.weights["fc.weight"] = torch.ones(K * H, K * H)
    checkpoints.weights |= {name: torch.ones(K * H) for name in ("norm.weight", "midlayer.hidden_norm.weight")}


SGLANG, V1, V2 = pair.SGLANG, pair.VLLM_V1, pair.VLLM_V2
ALL: tuple[str, ...] = ()
IN_NUMBERS = ("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)")
KEPT = ("fc-quantized", (SGLANG,), "skips its qweight: the weight stays what it was made with (sglang#39087)")

EAGLE3_TRAPS: dict[str, tuple[Callable, list[tuple]]] = {
    "ids of outputs": (
        lambda c: c.drafter.update({"eagle_config": {IDS: [1, 5, 8]}}),
        [
            ("engine-layers", (V1,), "captures the boundaries [1, 5, 8], and the config means [2, 6, 9]"),
        ],
    ),
    "ids where vLLM's V2 runner does not look": (
        lambda c: c.drafter.update({"eagle_config": {IDS: [1, 4, 7]}}),
        [
            ("engine-layers", (V1,), "captures the boundaries [1, 4, 7], and the config means [2, 5, 8]"),
            ("engine-layers", (V2,), "captures the boundaries [2, 6, 9], and the config means [2, 5, 8]"),
        ],
    ),
    "ids at the top, four of them": (
        lambda c: (
            c.drafter.update({IDS: [1, 4, 7, 9]}),
            c.weights.update({"fc.weight": torch.ones(D, 4 * H), "fc_norm.3.weight": torch.ones(H)}),
        ),
        [
            ("engine-layers", (SGLANG,), "captures the boundaries [2, 6, 9], and the config means [2, 5, 8, 10]"),
            ("engine-chunks", (SGLANG,), "builds fc for K = 3, and the config means K = 4 (vllm#54526)"),
            ("engine-layers", (V1,), "captures the boundaries [1, 4, 7, 9], and the config means [2, 5, 8, 10]"),
            ("engine-chunks", (V1,), "builds fc for K = 3"),
            ("engine-layers", (V2,), "captures the boundaries [1, 4, 7, 9]"),
            ("engine-chunks", (V2,), "builds fc for K = 3"),
        ],
    ),
    "a model type without a rule": (
        lambda c: c.target.update({"model_type": "mamba9"}),
        [("layers", ALL, "capture_layers: model_type is 'mamba9', expected one of")],
    ),
    "a target without layers": (
        lambda c: c.target.pop("num_hidden_layers"),
        [("layers", ALL, "the target's config has no num_hidden_layers")],
    ),
    "two values of K": (
        lambda c: c.drafter.update({"num_aux_hidden_states": 4, "eagle_config": {IDS: [1, 5, 8]}}),
        [("config", ALL, "expected K = 4 chunks, because num_aux_hidden_states is 4")],
    ),
    "Gemma 3": (
        lambda c: c.target.update({"model_type": "gemma3_text"}),
        [("gemma3-residual", (SGLANG,), "without its residual (sglang#39286)")],
    ),
    "another target": (
        lambda c: c.target.update({"hidden_size": 2 * H}),
        [("hidden-size", ALL, "the target's hidden_size is 128, and the drafter's target_hidden_size 64")],
    ),
    "K*H is the drafter's width": (
        as_wide_as_the_drafter,
        [("fc-skipped", (SGLANG,), "K*H = 192 is the drafter's own")],
    ),
    "no fc": (lambda c: c.weights.pop("fc.weight"), [("fc", ALL, "the drafter has no fc.weight")]),
    "fc of another K": (
        lambda c: c.weights.update({"fc.weight": torch.ones(D, 2 * H)}),
        [("load", ALL, "fc.weight has shape (48, 128), expected (48, 192), because it is (D, K*H) with K = 3")],
    ),
    "a bias that the config does not have": (
        lambda c: c.weights.update({"fc.bias": torch.ones(D)}),
        [("fc-bias", ALL, "fc.bias is there, and the config's bias is False")],
    ),
    "a norm less": (lambda c: c.weights.pop("fc_norm.1.weight"), [("norms", ALL, "an engine that skips one loses")]),
    "norms that the config forgot": (
        lambda c: c.drafter.pop("fc_norm"),
        [("norms", ALL, "and the config means none: an engine that skips")],
    ),
    "a normed residual": (
        lambda c: c.drafter.update(norm_before_residual=True),
        [
            (
                "engine-flags",
                (SGLANG,),
                "takes norm_before_residual for False, and the drafter was trained with True: layer 0 adds another",
            )
        ],
    ),
    "one norm of the concat, in a latent drafter": (
        lambda c: (
            c.drafter.update(norm_before_fc=True, fc_norm=False, architectures=["Eagle3DeepseekV2ForCausalLM"]),
            [c.weights.pop(f"fc_norm.{k}.weight") for k in range(K)],
            c.weights.update({"input_norm.weight": torch.ones(K * H)}),
        ),
        [("engine-flags", (engine,), "takes concat_norm for False") for engine in (SGLANG, V1, V2)],
    ),
    "the old name of fc_norm": (
        lambda c: c.drafter.update(fc_norm=None, use_aux_norm=True),
        [("engine-flags", (engine,), "takes chunk_norm for False") for engine in (V1, V2)],
    ),
    "a bias": (
        lambda c: (c.drafter.update(bias=True), c.weights.update({"fc.bias": torch.ones(D)})),
        [("engine-flags", (engine,), "takes bias for False") for engine in (V1, V2)],
    ),
    "flags where no engine looks": (
        lambda c: c.drafter.update({"eagle_config": {"norm_output": True}}),
        [("engine-flags", (engine,), "takes norm_output for False") for engine in (SGLANG, V1, V2)],
    ),
    "speculators": (
        lambda c: c.drafter.update(speculators_model_type="eagle3", norm_output=True),
        [("format", (SGLANG,), "does not know the format of speculators")],
    ),
    "speculators' parallel drafter": (
        lambda c: c.drafter.update(speculators_model_type="peagle", norm_output=True),
        [
            ("format", (SGLANG,), ""),
            *(
                ("engine-flags", (engine,), f"takes {name} for False")
                for engine in (V1, V2)
                for name in ("chunk_norm", "norm_output")
            ),
        ],
    ),
    "another vocabulary": (
        lambda c: c.drafter.update(vocab_size=V + 8),
        [("vocabulary", ALL, "the target has 1000 token ids, and the drafter's table 1008 rows")],
    ),
    "no d2t": (
        lambda c: c.weights.pop("d2t"),
        [("d2t", ALL, "200 of 1000 ids are drafted, and the file has no d2t")],
    ),
    "d2t of another length": (
        lambda c: c.weights.update(d2t=torch.zeros(V, dtype=torch.int64)),
        [("d2t", ALL, "d2t has [1000] entries, and draft_vocab_size is 200")],
    ),
    "a head of another length": (
        lambda c: c.weights.update({"lm_head.weight": torch.ones(V, D)}),
        [("draft-head", ALL, "lm_head.weight has 1000 rows, and draft_vocab_size is 200")],
    ),
    "no head": (
        lambda c: c.weights.pop("lm_head.weight"),
        [("draft-head", ALL, "200 ids are drafted, and the file has no lm_head.weight")],
    ),
    "fp8 that no config mentions": (
        quantized,
        [
            ("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)"),
            ("fc-quantized", (V1, V2), "quantizes fc as the drafter's quantization_config says, and there is none"),
        ],
    ),
    "fp8 with its config": (
        lambda c: with_config(c, {"quant_method": "fp8"}),
        [("fc-quantized", (SGLANG,), "codes are taken for numbers (sglang#39087)")],
    ),
    "GPTQ": (
        lambda c: (
            with_config(c, {"quant_method": "gptq"}),
            c.weights.update({"fc.qweight": torch.zeros(K * H // 8, D, dtype=torch.int32)}),
            c.weights.update({"fc.scales": torch.ones(4, D), "fc.qzeros": torch.zeros(4, D // 8, dtype=torch.int32)}),
            [c.weights.pop(name) for name in ("fc.weight", "fc.weight_scale")],
        ),
        [KEPT],
    ),
    "fp8 without its scale": (
        without_scale,
        [
            ("load", ALL, "weights has fc.weight in torch.float8_e4m3fn, expected its scale beside it"),
            ("fc-quantized", (SGLANG,), ""),
            ("fc-quantized", (V1, V2), ""),
        ],
    ),
    "a scale without its codes' blocks": (
        lambda c: (
            with_config(c, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
            c.weights.update({"fc.weight_scale": torch.ones(7, 9)}),
        ),
        [("load", ALL, "fc.weight_scale is torch.float32 of shape (7, 9), expected"), IN_NUMBERS],
    ),
    "a config of another format": (
        lambda c: with_config(c, {"quant_algo": "NVFP4"}),
        [("load", ALL, "fc.weight is fp8_tensor, expected nvfp4, because the checkpoint says"), IN_NUMBERS],
    ),
    "a config of other blocks": (
        lambda c: with_config(c, {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        [("load", ALL, "because the checkpoint says weight_block_size [64, 64]"), IN_NUMBERS],
    ),
    "codes that the config leaves out": (
        lambda c: with_config(c, {"quant_method": "fp8", "modules_to_not_convert": ["fc"]}),
        [IN_NUMBERS, ("fc-quantized", (V1, V2), "and that leaves fc out: codes have no place there")],
    ),
    "codes that GPTQModel leaves out": (
        lambda c: with_config(c, {"quant_method": "fp8", "dynamic": {"-:.*fc": {}}}),
        [IN_NUMBERS, ("fc-quantized", (V1, V2), "and that leaves fc out")],
    ),
    "numbers that the config says are codes": (
        lambda c: c.drafter.update(quantization_config={"quant_method": "fp8"}),
        [("fc-quantized", (V1, V2), "builds fc quantized, as quantization_config says of it, and fc.weight is BF16")],
    ),
    "numbers in a group of codes": (
        lambda c: c.drafter.update(
            quantization_config={"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": ["Linear"]}}}
        ),
        [("fc-quantized", (V1, V2), "builds fc quantized")],
    ),
    "a scale beside numbers": (
        lambda c: c.weights.update({"fc.weight_scale": torch.ones(1)}),
        [("load", ALL, "fc.weight is torch.bfloat16, expected codes for fc.weight_scale, because a scale belongs")],
    ),
    "two scales": (
        lambda c: (
            with_config(c, {"quant_method": "fp8"}),
            c.weights.update({"fc.weight_scale_inv": torch.ones(1, 2)}),
        ),
        [("load", ALL, "weights has fc.weight_scale and fc.weight_scale_inv, expected one of them"), IN_NUMBERS],
    ),
    "NVFP4 without its second scale": (
        lambda c: (in_nvfp4(c), c.weights.pop("fc.weight_scale_2")),
        [("load", ALL, "expected one of weight_scale_2 and weight_global_scale beside it"), IN_NUMBERS],
    ),
    "NVFP4 with its second scale alone": (
        lambda c: (in_nvfp4(c), c.weights.pop("fc.weight_scale")),
        [("load", ALL, "weights has fc.weight in torch.uint8, expected its scale beside it"), IN_NUMBERS],
    ),
    "GPTQ without its scales": (
        lambda c: (
            c.drafter.update(quantization_config={"quant_method": "gptq"}),
            c.weights.update({"fc.qweight": torch.zeros(K * H // 8, D, dtype=torch.int32)}),
            c.weights.pop("fc.weight"),
        ),
        [("load", ALL, "weights has fc.qweight, expected scales beside it"), KEPT],
    ),
    "fc in float64": (
        lambda c: c.weights.update({"fc.weight": torch.ones(D, K * H, dtype=torch.float64)}),
        [("fc", ALL, "fc.weight is F64, expected BF16 or F16 or F32, or codes")],
    ),
    "fc that is a number": (
        lambda c: c.weights.update({"fc.weight": torch.ones(())}),
        [("load", ALL, "fc.weight has shape (), expected (48, 192)")],
    ),
    "fc twice": (
        lambda c: c.weights.update({"model.fc.weight": torch.ones(D, K * H)}),
        [("load", ALL, "expected one of them, because both are fc.weight")],
    ),
    "a head that is a number": (
        lambda c: c.weights.update({"lm_head.weight": torch.ones(())}),
        [("draft-head", ALL, "lm_head.weight is [], expected a matrix")],
    ),
    "a norm of another width": (
        lambda c: c.weights.update({"fc_norm.1.weight": torch.ones(H - 1)}),
        [("norms", ALL, "fc_norm.1.weight is [63] of F32, expected [64] of BF16 or F16 or F32")],
    ),
    "a norm of layer 0 of another width": (
        lambda c: c.weights.update({"midlayer.hidden_norm.weight": torch.ones(H)}),
        [("norms", ALL, "midlayer.hidden_norm.weight is [64] of F32, expected [48]")],
    ),
    "a norm in codes": (
        lambda c: c.weights.update({"fc_norm.1.weight": torch.ones(H).to(FP8)}),
        [("norms", ALL, "fc_norm.1.weight is [64] of F8_E4M3, expected [64] of BF16")],
    ),
    "a width that no tensor has": (
        lambda c: c.drafter.update(hidden_size=10**30),
        [("config", ALL, f"Eagle3Config: K=1 chunks of H={10**30} have {10**30} columns, expected at most 2147483647")],
    ),
    "architectures that are a number": (
        lambda c: c.drafter.update(architectures=5),
        [("config", ALL, "the drafter's architectures is 5, expected a list of names")],
    ),
    "ids beyond the target, in one engine": (
        lambda c: c.drafter.update({"speculators_model_type": "eagle3", "eagle_config": {IDS: [2, 6, 12]}}),
        [
            ("engine-layers", (SGLANG,), "layer_ids is [2, 6, 12], expected boundaries in [0, 12]"),
            ("engine-layers", (V2,), "captures the boundaries [2, 6, 9], and the config means [2, 6, 12]"),
            ("format", (SGLANG,), "does not know the format of speculators"),
        ],
    ),
}

TRAPS = {
    trap: (build, change, findings)
    for build, traps in ((Checkpoints, EAGLE3_TRAPS),)
    for trap, (change, findings) in traps.items()
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_is_found(trap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, change, expected = TRAPS[trap]
    checkpoints = build()
    change(checkpoints)
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["trap"], tuple(each["engines"])) for each in found] == [case[:2] for case in expected]
    for each, (_, _, text) in zip(found, expected, strict=True):
        assert text in each["text"]
    assert cli.main(["doctor", *folders]) == 1
    out = capsys.readouterr().out
    assert out.endswith(f"findings: {len(expected)}\n")
    assert max(map(len, out.splitlines())) <= 80


def test_an_engine_leaves_out_what_the_others_fall_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints()
    checkpoints.drafter["eagle_config"] = {IDS: [1, 5, 8]}
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders, "--engine", "sglang"]) == 0
    assert cli.main(["doctor", *folders, "--engine", "vllm"]) == 1
    assert "vLLM 0.33, V1 runner: captures the boundaries" in capsys.readouterr().out.replace("\n ", "")


def test_specforge_s_norm_output_is_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that the head has a norm; the state that SpecForge trains the next step on is the pre-norm one."""
    checkpoints = Checkpoints()
    checkpoints.drafter["norm_output"] = True
    folders = list(map(str, checkpoints.save(tmp_path)))
    assert cli.main(["doctor", *folders]) == 0
    assert "chunk_norm, norm_output" in capsys.readouterr().out
    assert cli.main(["doctor", *folders, "--trained-by", "specforge", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    text = (
        "takes norm_output for True, and the drafter was trained with False: from its second step on it reads another"
    )
    assert [(each["trap"], each["engines"]) for each in found] == [
        ("engine-flags", [each]) for each in (SGLANG, V1, V2)
    ]
    assert all(text in each["text"] for each in found)


def replaced_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_broken_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "target/config.json").unlink(), "config.json is missing, expected a model's folder"),
        (lambda folder: (folder / "drafter/config.json").write_text("{"), "config.json is damaged, expected JSON"),
        (lambda folder: (folder / "target/config.json").write_text("[]"), "config.json is a list, expected an object"),
        (lambda folder: (folder / "drafter/model.safetensors").write_bytes(b"x"), "is damaged, expected a safetensors"),
        (lambda folder: (folder / "drafter/model.safetensors").unlink(), "expected a folder with .safetensors files"),
        (
            lambda folder: replaced_by_folder(folder / "target/config.json"),
            "cannot be read, because [Errno 21] Is a di",
        ),
        (lambda folder: replaced_by_folder(folder / "drafter/model.safetensors"), "cannot be read, because "),
        (
            lambda folder: replaced_by_broken_link(folder / "drafter/model.safetensors"),
            "cannot be read, because No such",
        ),
    ],
)
def test_an_unreadable_folder_is_a_usage_error(
    damage: Callable[[Path], object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = list(map(str, Checkpoints().save(tmp_path)))
    damage(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *folders])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
