"""Builds the hub package: dist/hub/build/<variant>, which `kernels` 0.17 loads from a folder or from the Hub.

    python hub/build.py cpu [cuda]

A variant is the wheel's package without the engines' plugins and the commands, with `hub/__init__.py` on top of it.
The library is compiled with a namespace of its own, as the Hub demands: `torch.ops.<id>`, with the primitives in
`torch.ops.<id>_C`. `<id>` ends in a digest of the sources, so that two versions can be loaded side by side.
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from kernels._rust import Digest, DigestAlgorithm

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "dist" / "hub" / "build"
# kernels 0.17 loads the build with the newest ABI that is not newer than the installed torch.
FRAMEWORK = "torch-stable-abi211"
LEFT_OUT = re.compile(r"eagle_kernels/(bench|byte_eagle3|engines/(vllm|sglang|transformers))\b")


def main(backends: list[str]) -> None:
    for backend in backends:
        print(build(backend).relative_to(ROOT))


def build(backend: str) -> Path:
    identifier = f"_eagle_kernels_{backend}_{sources_digest()[:7]}"
    toolkit = f"cu{''.join(cuda_version())}" if backend == "cuda" else backend
    variant = OUT / f"{FRAMEWORK}-{toolkit}-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    variant.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(build_wheel(backend, identifier, folder)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("eagle_kernels/") and not LEFT_OUT.match(name)]
        wheel.extractall(variant, names)
    shutil.copy2(ROOT / "hub/__init__.py", variant)
    write_metadata(variant, identifier, backend)
    return variant


def sources_digest() -> str:
    """Digest of the files that a build reads: the same sources have the same id, with or without git."""
    folders = ("cmake", "csrc", "hub", "python", "triton_kernels")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".so", ".pyc")]
    digest = hashlib.sha256()
    for path in sorted([*filter(Path.is_file, files), ROOT / "CMakeLists.txt", ROOT / "setup.py"]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def cuda_version() -> tuple[str, str]:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("hub/build.py: the cuda variant needs nvcc, and none was found (PATH, CUDACXX)")
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+)\.(\d+)", release).groups()


def build_wheel(backend: str, identifier: str, folder: str) -> Path:
    settings = {"EAGLE_KERNELS_BUILD": backend, "EAGLE_KERNELS_NAMESPACE": identifier}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*pip, str(ROOT)], env=os.environ | settings, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def write_metadata(variant: Path, identifier: str, backend: str) -> None:
    """The fields are those of kernels' docs/source/kernel-requirements.md."""
    library = build_info(variant / "eagle_kernels/libeagle_kernels.so")
    assert library["namespace"] == identifier, library
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata = {
        "name": "eagle-kernels",
        "id": identifier,
        # The Hub's version counts API changes, as the package's major version does; 0 is the Hub's word for beta.
        "version": int(library["version"].partition(".")[0]),
        "kernels-minver": "0.17.0",
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
    }
    if backend == "cuda":
        metadata["backend"]["archs"] = [hub_arch(arch) for arch in library["cuda_archs"].split()]
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def build_info(library: Path) -> dict[str, str]:
    """What the library says about itself; it finds libtorch through the torch that is imported here."""
    assert torch.__version__
    function = ctypes.CDLL(str(library)).eagle_kernels_build_info
    function.restype = ctypes.c_char_p
    return dict(line.split(": ", 1) for line in function().decode().splitlines())


def hub_arch(arch: str) -> str:
    """
    >>> hub_arch("90a"), hub_arch("120"), hub_arch("90+ptx")
    ('9.0a', '12.0', '9.0+PTX')
    """
    return re.sub(r"(\d)(a?)(\+ptx)?$", r".\1\2\3", arch).replace("ptx", "PTX")


if __name__ == "__main__":
    main(sys.argv[1:])
