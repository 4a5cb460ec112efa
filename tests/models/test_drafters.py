"""The table of served drafters against the plugins' hooks and the table of MTP families; no row is empty.

Against the engines' registries: tests/engines/vllm/test_vllm_drafters.py and tests/engines/sglang/test_drafters.py.
"""

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from eagle_kernels import ContextKVConfig
from eagle_kernels.engines import sglang, vllm
from eagle_kernels.models import families
from eagle_kernels.models.drafters import SGLANG, VLLM, Drafter

ROWS = [
    pytest.param(row, id=f"{engine}-{row.title}")
    for engine, rows in (("sglang", SGLANG), ("vllm", VLLM))
    for row in rows
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_runs_or_why_not(row: Drafter) -> None:
    assert row.title and (row.runs or row.stays)


def test_what_runs_in_sglang_is_what_is_hooked() -> None:
    parts = {part: import_module(f"{sglang.__name__}.{part}") for part in ("projection", "mtp", "context")}
    targets = [hook.target for part in parts.values() for hook in part.HOOKS]
    targets += [row.target for row in parts["mtp"].PREDICTORS]
    hooked = {target.where.removeprefix("sglang.srt.") for target in targets}
    of_drafters = {where for where in hooked if where.startswith("models.")}
    assert {target for row in SGLANG if row.runs for target in row.targets} == of_drafters
    assert not [row.title for row in SGLANG if bool(row.runs) != bool(row.targets)]
    several = [row for row in SGLANG if len(row.architectures) > 1]
    assert not [row.title for row in several if len(row.targets) not in (0, 1, len(row.architectures))]


def test_what_runs_in_vllm_is_what_is_hooked() -> None:
    parts = [import_module(f"{vllm.__name__}.{part}") for part in ("combine", "mtp", "context")]
    hooked = {name for part in parts for name in part.ARCHITECTURES}
    assert {name for row in VLLM if row.runs for name in row.architectures} == hooked


def test_keys_and_values_run_where_they_are_hooked() -> None:
    context = import_module(f"{vllm.__name__}.context")
    assert {name for row in VLLM if "keys and values" in row.runs for name in row.architectures} == {
        *context.ARCHITECTURES
    }


@pytest.mark.parametrize("row", [row for row in ROWS if "`ContextKV`" in row.values[0].stays])
def test_a_row_that_context_kv_computes_has_configs_that_it_reads(row: Drafter) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"head_dim": 64, "qk_rope_head_dim": 16, "kv_lora_rank": 32, "attention_k_eq_v": True}
    for name in row.architectures:
        config = sizes | {"architectures": [name], "target_layer_ids": [1, 2]}
        assert ContextKVConfig.from_hf(config, target_hidden_size=96).num_chunks == 2


_MTP = {
    (engine, name): (family.mtp, stage)
    for family in families().values()
    if family.mtp is not None and family.mtp.normed
    for engine, stage in family.mtp.engines.items()
    for name in stage.architectures
}


@pytest.mark.parametrize(("engine", "name"), _MTP, ids=map("-".join, _MTP))
def test_an_mtp_row_says_what_its_family_s_stage_has(engine: str, name: str) -> None:
    stage, served = _MTP[engine, name]
    (row,) = [row for row in {"sglang": SGLANG, "vllm": VLLM}[engine] if name in row.architectures]
    runs = "norms, cat and projection"
    if stage.streams:
        of_row = stage.hnorm_over == "row"
        runs = "norm and projection of the embedding" if of_row else "each norm with the projection behind it"
    assert runs in row.runs
    assert ("on one rank" in row.runs and "on more ranks" in row.stays) == (served.linear == "ColumnParallelLinear")
    assert ("a quantized projection, but for the layouts" in row.stays) == served.quantized
    assert ("norm of the embedding" in row.stays) == stage.embedding_prenormed


@pytest.mark.parametrize(("engine", "says"), [("sglang", "of {} families' MTP"), ("vllm", "of {} MTP families")])
def test_the_engines_pages_count_the_families_of_one_projection(engine: str, says: str) -> None:
    stages = [family.mtp for family in families().values() if family.mtp is not None and family.model_types]
    served = [stage for stage in stages if stage.normed and not stage.streams and engine in stage.engines]
    page = Path(__file__).parents[2] / f"docs/{engine}.md"
    assert says.format(len(served)) in page.read_text(encoding="utf-8")


def test_a_mask_runs_where_the_hook_has_it() -> None:
    mtp = import_module(f"{vllm.__name__}.mtp")
    ours = (mtp.fused_norms.embeds_and_hidden, mtp.fused_norms.of_deepseek_v32)
    masked = {name for layer in mtp.LAYERS if layer.fused_norms in ours for name in layer.architectures}
    assert {name for row in VLLM if row.runs.startswith("mask") for name in row.architectures} == masked


def test_a_projection_with_the_norm_behind_it_runs_where_it_is_hooked() -> None:
    combine = import_module(f"{vllm.__name__}.combine")
    rows = [row for row in VLLM if "the projection of the captured layers and the norm behind it" in row.runs]
    assert {name for row in rows for name in row.architectures} == set(combine.DSPARK)


def test_codes_are_those_that_are_read_of_the_engine() -> None:
    """INT8 codes come from compressed-tensors and from the methods named int8."""
    of_sglang = import_module(f"{sglang.__name__}.unsupported")._QUANTIZED
    of_vllm = import_module(f"{vllm.__name__}.combine").QUANTIZED
    for rows, methods in ((SGLANG, of_sglang), (VLLM, of_vllm)):
        read = any(word in method.lower() for method in methods for word in ("int8", "compressed_tensors"))
        assert {"INT8" in row.stays for row in rows if "layouts of FP8" in row.stays} == {read}


def test_layer_0_runs_where_it_is_hooked() -> None:
    layer0 = import_module(f"{sglang.__name__}.layer0")
    rows = [row for row in SGLANG if "layer 0" in row.runs]
    modules = {layer.partition(":")[0] for layer in layer0._PROJECTIONS}
    assert {f"sglang.srt.{row.targets[0].partition(':')[0]}" for row in rows} == modules
    layer0 = import_module(f"{vllm.__name__}.layer0")
    named = {name for row in VLLM if "layer 0" in row.runs for name in row.architectures}
    assert named == set(layer0.ARCHITECTURES)


@pytest.mark.parametrize(("engine", "rows"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_every_family_that_an_engine_serves_has_a_row_and_none_has_two(engine: str, rows: tuple[Drafter, ...]) -> None:
    named = Counter(name for row in rows for name in row.architectures)
    assert set(named.values()) == {1}
    stages = [family.mtp.engines.get(engine) for family in families().values() if family.mtp is not None]
    served = {name for stage in stages if stage is not None for name in stage.architectures}
    assert served <= set(named), served - set(named)
