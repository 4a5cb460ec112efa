"""A target and its drafter as `doctor` has them: two configs and the headers of safetensors files, without weights.

Only tensors that say how a weight is packed are read: g_idx (the group of each column), zeros and weight_shape.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_kernels import checks
from eagle_kernels.checkpoint_files import MTP_FILE, Checkpoint, open_tensors, read_tensor
from eagle_kernels.quantization_config import config_of, is_inline, rotation_of
from eagle_kernels.quantized_checkpoint import tensors_inside

from . import lists

OP = "doctor"
SGLANG, VLLM_V1, VLLM_V2 = "SGLang 0.5.23", "vLLM 0.33, V1 runner", "vLLM 0.33, V2 runner"
ENGINES = {"sglang": (SGLANG,), "vllm": (VLLM_V1, VLLM_V2)}
ENGINE_OF = {name: engine for engine, names in ENGINES.items() for name in names}
DENSE = ("BF16", "F16", "F32")
# safetensors' names of the dtypes that a drafter's tensors have.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# Names of a layer's stacked experts, whose parameters follow an underscore, not a dot: experts.down_proj_blocks.
_STACK = re.compile(r"(?P<path>(?:.*\.)?experts\.\w+_proj)(?:_(?P<parameter>\w+))?")

# Tensors whose values a loader reads before it looks at codes, so that no stand-in will do; at most one number for each
# group of a row.
_READ = ("g_idx", "qzeros", "weight_g_idx", "weight_shape", "weight_zero_point")


class Finding(NamedTuple):
    trap: str  # a short name, stable, for scripts
    engines: tuple[str, ...]  # those that fall into it; empty: all
    text: str


class Header(NamedTuple):
    """The header of one tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # as the format spells it: BF16, F8_E4M3
    read: Callable[[], Tensor] | None = None  # only of a tensor in _READ

    def stand_in(self) -> Tensor:
        """The tensor itself if it is in `_READ`; else one of this shape and dtype in the memory of one row or less, for
        loaders that look at nothing else. Where they do look at values, these are valid: scales are 1.
        """
        if self.dtype not in DTYPES:
            raise checks.error(ValueError, OP, f"a tensor is {self.dtype}", f"one of {list(DTYPES)}")
        if self.read is not None:
            return self.read()
        dtype = DTYPES[self.dtype]
        fill = torch.zeros if dtype in (torch.int32, torch.int64) else torch.ones
        if 0 in self.shape or len(self.shape) < 2:  # sizes that no memory may have: [0, 2**62], a width of a config
            return fill((), dtype=dtype).expand(self.shape)
        if len(self.shape) == 2:
            return fill(self.shape[1], dtype=dtype).expand(self.shape)
        return fill(self.shape, dtype=dtype)


@dataclass
class Pair:
    """A target and its drafter, as far as they could be read, and what was found about them."""

    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    headers: dict[str, Header]  # by the names of the drafter's files
    quantization: Mapping[str, Any] | None
    unindexed: frozenset[str] = frozenset()  # the names in mtp.safetensors, where the drafter's index lacks that file
    facts: dict[str, object] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def find(self, trap: str, text: str, *engines: str) -> None:
        self.findings.append(Finding(trap, engines, text))

    @property
    def text(self) -> Mapping[str, Any]:
        """The target's text part; Qwen3-Omni's is that of its thinker (transformers 5.23 `qwen3_omni_moe`)."""
        text = self.target
        for name in ("thinker_config", "text_config"):
            nested = text.get(name)
            text = nested if isinstance(nested, Mapping) else text
        return text

    @property
    def num_layers(self) -> object:
        """The target's decoder layers, as its config says; None where it does not. LongCat-Flash calls them num_layers
        (SGLang 0.5.23 `configs/longcat_flash`, vLLM 0.33 `longcat_flash`)."""
        stated = self.text.get("num_hidden_layers")
        return self.text.get("num_layers") if stated is None else stated

    @cached_property
    def read(self) -> dict[tuple[str, bool], Mapping[str, Any] | None]:
        """{(engine, whether the layer is of experts): the quantization config as far as the engine reads it}."""
        cases = [(engine, of_experts) for engine in ENGINES for of_experts in (False, True)]
        return {case: lists.read_by(self.quantization, *case, self.is_inline) for case in cases}

    @property
    def is_inline(self) -> bool:
        """Whether the quantization config is in the drafter's config.json, not in hf_quant_config.json alone."""
        return is_inline(self.drafter)

    @cached_property
    def layers(self) -> dict[str, dict[str, Header]]:
        """{path of a layer of the drafter: {parameter: header}}. A parameter is what follows the last dot of a name;
        for stacked experts, what follows the name of their projection, or `weight` where nothing does."""
        layers: dict[str, dict[str, Header]] = {}
        for name, header in self.headers.items():
            path, _, parameter = name.rpartition(".")
            if (stack := _STACK.fullmatch(name)) is not None:
                path, parameter = stack["path"], stack["parameter"] or "weight"
            if path:  # d2t belongs to no layer
                layers.setdefault(path, {})[parameter] = header
        return layers

    @cached_property
    def inside(self) -> dict[str, dict[str, str]]:
        """{path of a layer: the names of the tensors of modules inside it, by what follows the path}."""
        return tensors_inside(self.layers, self.headers)

    def name_of(self, path: str, parameter: str) -> str:
        """The name in the file of a tensor of `layers`."""
        name = f"{path}.{parameter}"
        if name in self.headers:
            return name
        return path if parameter == "weight" else f"{path}_{parameter}"

    @property
    def model_type(self) -> str:
        return str(self.target.get("model_type", self.text.get("model_type")))

    @property
    def architectures(self) -> tuple[str, ...]:
        """The drafter's."""
        stated = self.drafter.get("architectures")
        return tuple(name for name in stated if isinstance(name, str)) if isinstance(stated, list) else ()

    def readers(self, names: Iterable[str]) -> dict[str, Callable[[], Tensor]]:
        """The stand-ins of these tensors, for a loader."""
        return {name: self.headers[name].stand_in for name in names}

    def opened(self, names: Iterable[str]) -> Checkpoint:
        return Checkpoint(self.readers(names), self.quantization)

    def look_at_loading(self, load: Callable[[], object], *engines: str) -> None:
        """Report what the package's own loader refuses in the headers: it would refuse the tensors too."""
        try:
            load()
        except (TypeError, ValueError) as wrong:
            self.find("load", str(wrong), *engines)

    def look_at_target(self, hidden_size: int) -> None:
        """Report a target that is not as wide as the one that the drafter was made for."""
        if (width := self.text.get("hidden_size")) != hidden_size:
            text = f"the target's hidden_size is {width}, and the drafter's target_hidden_size {hidden_size}"
            self.find("hidden-size", text)

    def look_at_rotation(self) -> None:
        """State whether the target's hidden states, and the embedding and head that a drafter may take from it, are
        rotated. A drafter of the unrotated target is hardly ever accepted (vllm-ascend#12775), one that was trained on
        the rotated target is as usual: no file says which it is."""
        if (key := rotation_of(self.target)) is not None:
            self.facts["target"] = f"rotated ({key}): a drafter has to be trained on it, not on the unrotated model"

    def look_at_vocabulary(self, own: object) -> None:
        target = self.text.get("vocab_size")
        if own is not None and target is not None and own != target:
            self.find("vocabulary", f"the target has {target} token ids, and the drafter's table {own} rows")


def read(target: Path, drafter: Path) -> Pair:
    """Raises ValueError that names a file that is missing, damaged or unreadable, or the package that would read it."""
    try:
        return Pair(_config(target), _config(drafter), _headers(drafter), config_of(OP, drafter), _unindexed(drafter))
    except OSError as failure:
        got = f"{target} or {drafter} cannot be read"
        raise checks.error(ValueError, OP, got, "files that can", str(failure)) from None
    except ModuleNotFoundError as missing:
        raise ValueError(str(missing)) from None


def _headers(folder: Path) -> dict[str, Header]:
    headers = {}
    if not any(folder.glob("*.safetensors*")):
        if files := sorted(folder.glob("*.gguf")):
            reads = "SGLang alone reads it, and the plugins leave it to it"
            raise checks.error(ValueError, OP, f"{files[0]} is in GGUF", ".safetensors files", reads)
        raise checks.error(ValueError, OP, f"drafter is {str(folder)!r}", "a folder with .safetensors files")
    for name, file in open_tensors(OP, folder).items():
        tensor = file.get_slice(name)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if max(shape, default=0) >= 2**63:  # safetensors counts in uint64, and a size of 0 beside it makes it valid
            got = f"{name} is {dtype} of shape {list(shape)}"
            raise checks.error(ValueError, OP, got, "sizes that torch has")
        read = partial(read_tensor, OP, file, name) if name.rpartition(".")[2] in _READ else None
        headers[name] = Header(shape, dtype, read)
    return headers


def _unindexed(folder: Path) -> frozenset[str]:
    index, file = folder / "model.safetensors.index.json", folder / MTP_FILE
    if not index.is_file() or not file.is_file():
        return frozenset()
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]  # valid: `_headers` has read it
    return frozenset(open_tensors(OP, file)) - weight_map.keys() if MTP_FILE not in weight_map.values() else frozenset()


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    checks.check_file(OP, file, "a model's config")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise checks.error(ValueError, OP, f"{file} is missing", "a model's folder") from None
    except (ValueError, RecursionError) as failure:
        raise checks.error(ValueError, OP, f"{file} is damaged", "JSON", str(failure)) from None
    if not isinstance(content, dict):
        raise checks.error(ValueError, OP, f"{file} is a {type(content).__name__}", "an object")
    return content
