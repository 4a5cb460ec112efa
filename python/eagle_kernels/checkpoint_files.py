"""A checkpoint's tensors: safetensors files, with their index or without, or tensors by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from . import checks
from .quantization_config import config_of
from .quantized_checkpoint import tensors_inside
from .stored_projection import StoredProjection


class Checkpoint(NamedTuple):
    """An open checkpoint. `doctor` makes one from headers, whose tensors have no numbers."""

    readers: Mapping[str, Callable[[], Tensor]]  # by the tensor's name
    quantization: Mapping[str, Any] | None  # as `config_of` returns it
    op: str = ""  # which errors name

    def read(self, name: str) -> Tensor:
        return self.readers[name]()

    def projection(self, names: Mapping[str, str], shape: tuple[int, int], meaning: str) -> StoredProjection:
        return StoredProjection(self.op, names, self.read, shape, meaning, self.quantization or {})

    def with_inside(self, parameters: Mapping[str, str]) -> dict[str, str]:
        """The file's names of a projection's parameters, and of those of modules inside it."""
        inside = tensors_inside({name.rpartition(".")[0] for name in parameters.values()}, self.readers)
        return {**parameters, **{rest: name for found in inside.values() for rest, name in found.items()}}


# Read beside an index that does not name it (SGLang 0.5.23 `maybe_add_mtp_safetensors`: checkpoints of GLM-4.7).
MTP_FILE = "mtp.safetensors"
Weights = str | os.PathLike | Mapping[str, Tensor] | Checkpoint


def open_checkpoint(op: str, weights: Weights) -> Checkpoint:
    """Raises TypeError or ValueError, which name `op`, for what is no checkpoint, and OSError for a missing file."""
    if isinstance(weights, Checkpoint):
        return weights._replace(op=op)
    if isinstance(weights, Mapping):
        if unnamed := [name for name in weights if not isinstance(name, str)]:
            raise checks.error(TypeError, op, f"weights has {unnamed[0]!r}", "tensors by name")
        return Checkpoint({name: partial(_given, op, weights, name) for name in weights}, None, op)
    if not isinstance(weights, (str, os.PathLike)):
        got = f"weights is a {type(weights).__name__}"
        raise checks.error(TypeError, op, got, "a safetensors file or folder, or tensors by name")
    name = os.fspath(weights)
    if not isinstance(name, str) or "\0" in name:
        kind = ValueError if isinstance(name, str) else TypeError
        raise checks.error(kind, op, f"weights is {name!r}", "the name of a file or folder")
    path = Path(name)
    readers = {name: partial(read_tensor, op, handle, name) for name, handle in open_tensors(op, path).items()}
    return Checkpoint(readers, config_of(op, path if path.is_dir() else path.parent), op)


def _given(op: str, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor that has numbers: the copy of one on meta would fail when others are copied."""
    if getattr(tensor := weights[name], "is_meta", False):
        raise checks.error(ValueError, op, f"{name} is on meta", "a tensor with numbers")
    return tensor


def read_tensor(op: str, file: Any, name: str) -> Tensor:
    """A tensor of an opened safetensors file, whose dtype and sizes may be ones that torch does not have."""
    from safetensors import SafetensorError

    try:
        return file.get_tensor(name)
    except (SafetensorError, TypeError):  # F6_E2M3; a size beyond int64, beside one of 0
        header = file.get_slice(name)
        got = f"{name} is {header.get_dtype()} of shape {header.get_shape()}"
        raise checks.error(ValueError, op, got, "a dtype and sizes that torch has") from None


def open_tensors(op: str, path: Path) -> dict[str, Any]:
    """The opened safetensors file of each tensor, by the tensor's name.

    Where two files have a name, the index decides, as it does in engines; without an index this is an error.
    """
    index = path / "model.safetensors.index.json"
    checks.check_file(op, index, "the index of a sharded checkpoint")
    file_of = _files_of_index(op, index) if index.is_file() else {}
    files = set(file_of.values())
    if files and (of_mtp := path / MTP_FILE).is_file():
        files.add(of_mtp)
    handles: dict[str, tuple[Path, Any]] = {}
    elsewhere: dict[str, Path] = {}
    for file, handle in _open_files(op, path, files):
        names = handle.keys()
        for name in names:
            if file_of.get(name, file) != file:
                elsewhere[name] = file
                continue
            if name in handles:
                got = f"weights has {name} in {str(handles[name][0])!r} and {str(file)!r}"
                raise checks.error(ValueError, op, got, "one of them", "no index says which")
            handles[name] = file, handle
    for name, file in elsewhere.items():
        if name not in handles:
            got = f"the index has {name} in {file_of[name].name!r}"
            raise checks.error(ValueError, op, got, repr(file.name), "that file alone has it")
    return {name: handle for name, (_, handle) in handles.items()}


def _open_files(op: str, path: Path, files: set[Path]) -> Iterator[tuple[Path, Any]]:
    """The opened safetensors files of a checkpoint: for a folder those in its index, or all if it has none."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:  # not a dependency: an engine that loads a model has it
        expected = f"it to read {str(path)!r}: pip install safetensors"
        raise checks.error(ModuleNotFoundError, op, "safetensors is not installed", expected) from None
    if not files:
        files = set(path.glob("*.safetensors")) if path.is_dir() else {path}
    if not files:
        raise checks.error(ValueError, op, f"weights is {str(path)!r}", "a folder with .safetensors files")
    for file in sorted(files):
        checks.check_file(op, file, "a safetensors file")
        file.open("rb").close()  # safetensors says of a file that may not be read that there is none
        try:
            yield file, safe_open(file, framework="pt")
        except SafetensorError as failure:
            raise checks.error(
                ValueError, op, f"{str(file)!r} is damaged", "a safetensors file", str(failure)
            ) from None
        except OSError as failure:  # mmap's on a file system without it, which names no file
            raise checks.error(
                ValueError, op, f"{str(file)!r} cannot be read", "a safetensors file", str(failure)
            ) from None


def _files_of_index(op: str, index: Path) -> dict[str, Path]:
    """The file of each tensor of a sharded checkpoint, which has to be in the folder of the index or below."""
    got, expected = f"{str(index)!r} is not an index", 'JSON with a "weight_map" from names to files'
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:  # invalid UTF-8 too
        raise checks.error(ValueError, op, got, expected, str(failure)) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise checks.error(ValueError, op, got, expected)
    for name, file in weight_map.items():
        # Only the name is checked, links are not followed: in Hugging Face's cache they lead out of the folder.
        inside = not Path(file).is_absolute() and ".." not in Path(file).parts
        if not inside or not os.path.isfile(index.parent / file):
            raise checks.error(ValueError, op, f"the index has {name} in {file!r}", "a file in its own folder")
    return {name: index.parent / file for name, file in weight_map.items()}
