"""docs/models.md has every drafter of the real vLLM's registry, and is right about their classes."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import eagle_kernels as ek
from eagle_kernels.engines.gates import Target, body_hash, resolve
from eagle_kernels.engines.vllm import combine, context, mtp, speculator
from eagle_kernels.engines.vllm.registry import HookedModel
from eagle_kernels.models.drafters import VLLM
from eagle_kernels.models.family import MTPStage
from engines.built_projections import built, mtp_stages

registry = pytest.importorskip("vllm.model_executor.models.registry")

pytestmark = pytest.mark.usefixtures("models_of_gpus")
# In 0.32; 0.33 no longer serves them.
GONE = {"MedusaModel"}


def test_every_drafter_of_the_registry_has_a_row() -> None:
    served = set(registry._SPECULATIVE_DECODING_MODELS)
    served |= {name for name in registry.ModelRegistry.models if name.endswith("ForMTP")}
    rows = {name for row in VLLM for name in row.architectures}
    assert served - GONE <= rows, served - GONE - rows


def served_class(architecture: str) -> type[torch.nn.Module]:
    if architecture not in registry.ModelRegistry.models:
        pytest.skip(f"{architecture} is of vLLM 0.33")
    entry = registry.ModelRegistry.models[architecture]
    while isinstance(entry, HookedModel):  # another test has registered the plugin
        entry = entry.entry
    return entry.load_model_cls()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.where.rpartition(":")[2]) for row in mtp.LAYERS])
def test_an_mtp_architecture_is_built_of_the_layer_that_is_hooked(row: mtp.Layer) -> None:
    """The model's module defines the layer's class, and uses it to build its layers."""
    of_033 = [architecture for architecture in row.architectures if architecture not in registry.ModelRegistry.models]
    if of_033:
        pytest.skip(f"{', '.join(of_033)} is of vLLM 0.33")
    layer = resolve(row.where)[2]
    for architecture in row.architectures:
        model = served_class_of_a_gpu(architecture, layer.__module__)
        assert layer.__module__ in [base.__module__ for base in model.__mro__]
        assert inspect.getsource(sys.modules[layer.__module__]).count(f"{layer.__name__}(") > 1


def served_class_of_a_gpu(architecture: str, module: str) -> type[torch.nn.Module]:
    """On a CPU vLLM serves another class for DeepSeek V3.2, and none for V4."""
    _, name = registry._SPECULATIVE_DECODING_MODELS[architecture]
    return getattr(sys.modules[module], name, None) or served_class(architecture)


@pytest.mark.parametrize(("stage", "architecture"), mtp_stages("vllm"))
def test_a_projection_is_built_of_the_class_that_the_family_s_row_names(stage: MTPStage, architecture: str) -> None:
    """With a quantization config, and compiled, where the row says so. Reads the source: some have no class on CPU."""
    if importlib.import_module("vllm").__version__.startswith("0.32"):  # the CPU build's distribution has another name
        pytest.skip("the table is of vLLM 0.33")
    hooked = {name: row.where.partition(":")[0] for row in mtp.LAYERS for name in row.architectures}
    own = f"vllm.model_executor.models.{registry._SPECULATIVE_DECODING_MODELS[architecture][0]}"
    source = Path(importlib.util.find_spec(hooked.get(architecture, own)).origin).read_text(encoding="utf-8")
    for projection in stage.projections:
        assert built(source, projection) == {(stage.vllm.linear, stage.vllm.quantized)}
    assert ("@support_torch_compile" in source) == stage.vllm.compiled


@pytest.mark.parametrize("architecture", context.ARCHITECTURES)
def test_a_context_architecture_has_the_methods_that_are_hooked(architecture: str) -> None:
    """In its model's class, which the drafter names or inherits."""
    model = served_class(architecture)
    base = resolve(context.PROJECT.where.rpartition(".")[0])[2]
    of_module = [one for one in vars(sys.modules[model.__module__]).values() if isinstance(one, type)]
    inner = [one for one in of_module if issubclass(one, base) or hasattr(one, "_store_fused_context_kv")]
    inner = [one for one in inner if f"{one.__name__}(" in inspect.getsource(model)] or [model.model_cls]
    assert all(recorded(one, target) for one in inner for target in context.targets_of(one))


def recorded(model: type, target: Target) -> bool:
    method = getattr(model, target.where.rpartition(".")[2])
    target.check(method)
    return not target.bodies or body_hash(method) in target.bodies


@pytest.mark.parametrize("architecture", combine.ARCHITECTURES)
def test_a_combine_architecture_has_the_method_that_is_hooked(architecture: str) -> None:
    drafter = served_class(architecture)
    if ".cpu." in drafter.__module__:  # DeepSeek V4's, whose method only raises
        drafter = resolve(f"{drafter.__module__.replace('.cpu.', '.nvidia.')}:{drafter.__name__}")[2]
    method = drafter.combine_hidden_states
    method = getattr(method, "eagle_kernels_original", method)
    (known,) = [known for known in combine.METHODS if known.target.module == method.__module__]
    assert body_hash(method) in known.target.bodies and (architecture in combine.DSPARK) == (known.of_model is not None)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41"])
def test_the_ids_of_dspark_stages_mean_what_vllm_takes_them_for(model_type: str) -> None:
    utils = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
    ids = [2, 21, 40]
    config = SimpleNamespace(model_type=model_type, dspark_target_layer_ids=ids)
    drafter = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    boundaries = utils.get_eagle3_aux_layers_from_config(drafter)
    assert list(boundaries) == ek.capture_layers(model_type, 43, ids, algorithm="dspark")


@pytest.mark.parametrize("name", ["dflash2.DFlash2", "dspark.DSpark", "lilicorr.LiLiCorr", "xpress.XPress"])
def test_the_speculators_of_dflash_store_as_the_one_that_is_hooked(name: str) -> None:
    """vLLM 0.32 stores in `propose`, and has no XPress."""
    if getattr(resolve(speculator.DFLASH.where.rpartition(".")[0])[2], "_store_hidden_states", None) is None:
        pytest.skip("the zero-copy route of DFlash needs vLLM 0.33")
    module, _, prefix = name.partition(".")
    where = f"vllm.v1.worker.gpu.spec_decode.{module}.speculator:{prefix}Speculator._store_hidden_states"
    assert resolve(where)[2] is resolve(speculator.DFLASH.where)[2]
