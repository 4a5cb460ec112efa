"""Builds the stub of CUDA for a torch with CUDA: one library, preloaded, that answers as driver, runtime and cuBLAS."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# torch's libraries that call CUDA, and the names that the stub answers; cuSPARSE, cuFFT and others are never called.
_CALLERS = ("libc10_cuda", "libtorch_cuda", "libtorch_cuda_linalg", "libtorch_python", "libcaffe2_nvrtc")
_ANSWERED = re.compile(r"\b(?:__cuda|cuda[A-Z]|cublas|cu[A-Z])\w+")


def build(folder: Path) -> Path:
    """libcuda.so.1 in `folder`, for LD_PRELOAD and Triton's TRITON_LIBCUDA_PATH."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch_libraries = [Path(torch.__file__).parent / "lib" / f"{name}.so" for name in _CALLERS]
    sources = [HERE / "driver.c"]
    if torch.version.cuda is not None:
        sources.append(HERE / "runtime.c")
    asked = {name for library in torch_libraries if library.exists() for name in _symbols("--undefined-only", library)}
    written = {name for source in sources for name in _ANSWERED.findall(source.read_text())}
    rest = folder / "rest.c"
    missing = sorted(name for name in asked - written if not name.startswith("cuFile"))
    rest.write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in missing) + "\n")
    library = folder / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wl,-soname,libcuda.so.1", *_include_flags()]
    command = [shutil.which("gcc") or "cc", *flags, *map(str, [*sources, rest]), "-ldl", "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def _symbols(which: str, library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], check=True, capture_output=True, text=True).stdout
    return set(_ANSWERED.findall(listed))


def _include_flags() -> list[str]:
    """For the CUDA headers in torch's wheels; crt/ comes from Triton's."""
    found = [sorted(Path(path).glob(name)) for name in ("nvidia/cu1*/include", "triton/backends/nvidia/include")
             for path in sys.path]  # fmt: skip
    return [f"-I{folder}" for folders in found for folder in folders]


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
