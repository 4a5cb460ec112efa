"""The resource gate of csrc/cuda: what nvcc's binaries need on every arch that a wheel holds."""

import functools
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("triton")  # whose package has the disassembler

from compile.offline import nvidia_tool

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
ARCHS = ("80", "89", "90a", "100a", "120")
# Registers of a thread, at most, by kernel file. An SM has 65536: two blocks of 512 threads need 64 or fewer, two of
# 256 threads 128 or fewer. vocab_parallel_embedding keeps to three blocks of 512: it has latency to hide, and no norm.
MAX_REGISTERS = {
    "add_rms_norm": 64,
    "capture_hidden": 64,
    "norm_concat": 64,
    "norm_concat_linear": 184,  # an SM has one block of 128 rows, and on sm_89 and sm_120 one of any size
    "norm_concat_linear_finalize": 64,
    "norm_concat_linear_wgmma": 184,  # an SM has one block of more than 128 columns; see below
    "vocab_parallel_embedding": 40,
}
# Template instances: 3 dtypes, aligned or not; capture_hidden has two kernels, norm_concat two more with half of the
# threads, in 2 dtypes. norm_concat_linear has 2 dtypes: fused, with residuals, or not for two or three blocks on an SM,
# in 4 forms of the weight, less one, in pairs in the 3 of codes, and in wide ones in 2 of these; split, in 5 tiles, 4
# more for e4m3, 4 for int8 and 2 for scales in blocks. In bf16 alone, nvfp4 and mxfp4 are fused in the same ways, and
# split, in 3 tiles; mxfp8 is fused in all of these but the one with residuals. wgmma has 2, 3 or 4 warpgroups, with
# residuals or not, or one, in 2 dtypes; in bf16 also 3 forms of codes with 2, 3 or 4, with residuals or not.
INSTANCES = dict.fromkeys(MAX_REGISTERS, 6) | {
    "capture_hidden": 12,
    "norm_concat": 8,
    "norm_concat_linear": 83,
    "norm_concat_linear_finalize": 3,
    "norm_concat_linear_wgmma": 32,
}

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")


@dataclass(frozen=True)
class Binary:
    """One template instance, as `-Xptxas -v` reports it."""

    name: str
    registers: int
    stack: int  # bytes
    spills: int  # bytes, stores and loads

    def faults(self, max_registers: int) -> list[str]:
        limits = {"registers": max_registers, "stack": 0, "spills": 0}
        return [f"{self.name}: {name} {getattr(self, name)}, limit {limit}"
                for name, limit in limits.items() if getattr(self, name) > limit]  # fmt: skip


def test_every_kernel_file_has_a_limit() -> None:
    assert sorted(path.stem for path in ROOT.glob("csrc/cuda/*.cu")) == sorted(MAX_REGISTERS)


@functools.cache
def compiled(kernel: str, arch: str) -> tuple[list[Binary], Path]:
    """The instances of a kernel file, and the cubin; kept in build/ for the other workers and the next run."""
    source = ROOT / f"csrc/cuda/{kernel}.cu"
    command = [NVCC, "-std=c++20", "-O3", "-cubin", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xptxas", "-v"]
    digest = hashlib.sha256(nvcc_version() + " ".join(command).encode())
    for path in (source, *sorted(ROOT.glob("csrc/**/*.*h"))):
        digest.update(path.name.encode() + path.read_bytes())
    cubin = ROOT / "build" / "compile" / f"{kernel}.{arch}-{digest.hexdigest()[:16]}.cubin"
    cubin.parent.mkdir(parents=True, exist_ok=True)
    report = cubin.with_suffix(".txt")  # written last: where it is, the cubin is whole
    with FileLock(cubin.with_suffix(".lock")):
        if not report.exists():
            run = subprocess.run([*command, source, "-o", cubin], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            report.write_text(run.stderr)
    assert "warning" not in report.read_text(), report.read_text()
    pattern = (
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
        r"ptxas info\s+: Used (\d+) registers"
    )
    found = re.findall(pattern, report.read_text())
    return [Binary(name, int(used), int(stack), int(a) + int(b)) for name, stack, a, b, used in found], cubin


@functools.cache
def nvcc_version() -> bytes:
    return subprocess.run([NVCC, "--version"], capture_output=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", MAX_REGISTERS)
def test_no_spills_and_no_more_registers_than_its_blocks_may_have(kernel: str, arch: str) -> None:
    binaries, _ = compiled(kernel, arch)
    assert len(binaries) == INSTANCES[kernel]
    assert not [fault for binary in binaries for fault in binary.faults(MAX_REGISTERS[kernel])]
    if kernel == "norm_concat_linear" and arch in ("80", "90a", "100a"):
        # or one in pairs, of as many threads as two
        two_on_an_sm = [binary for binary in binaries if "Li128E" not in binary.name]
        assert len(two_on_an_sm) == 81 and max(binary.registers for binary in two_on_an_sm) <= 128
        three_on_an_sm = [binary for binary in binaries if "3EndE2E" in binary.name]
        assert len(three_on_an_sm) == 10 and max(binary.registers for binary in three_on_an_sm) <= 80


@pytest.mark.slow
def test_warpgroups_have_their_registers_and_wait_for_one_another_nowhere() -> None:
    """A thread has at most 128 where an SM has a block of 512 threads, or two of 256. On other GPUs the kernel ends at
    once. Where ptxas cannot let wgmma run asynchronously it serializes the instructions, and says so."""
    binaries, cubin = compiled("norm_concat_linear_wgmma", "90a")
    assert max(binary.registers for binary in binaries if "ELi4ELb" in binary.name) <= 128
    dense = [binary for binary in binaries if "FormE0" in binary.name and "ELi2ELb" in binary.name]
    assert len(dense) == 4 and max(binary.registers for binary in dense) <= 128
    assert "serialized" not in cubin.with_suffix(".txt").read_text()
    assert all(binary.registers < 16 for binary in compiled("norm_concat_linear_wgmma", "100a")[0])


@functools.cache
def instructions(cubin: Path) -> tuple[tuple[str, str], ...]:
    """(function, its machine code)."""
    parts = re.split(r"^\.text\.(\S+):", nvidia_tool("nvdisasm", "-c", str(cubin)), flags=re.M)
    return tuple(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_the_weight_passes_through_shared_memory_16_bytes_at_a_time(arch: str) -> None:
    functions = dict(instructions(compiled("norm_concat_linear", arch)[1]))
    partial = {name: code for name, code in functions.items() if "partial_kernel" in name}
    assert len(partial) == 83
    for name, code in partial.items():
        fused, dense, in_pairs = "Li16E" in name, "FormE0E" in name, bool(re.search("EndE[34]E", name))
        if in_pairs and arch != "90a":
            assert "HMMA" not in code  # other GPUs have no room for them
            continue
        assert re.search(r"\bHMMA\.16816\.F32", code)
        # Scales that multiply codes are copied in fours.
        in_fours = {"LDGSTS.E"} if re.search("FormE[456]E", name) else set()
        assert set(re.findall(r"\bLDGSTS[\w.]*", code)) == {"LDGSTS.E.BYPASS.128"} | in_fours
        assert len(re.findall(r"\bLDS\.128", code)) >= 12
        # Loaded into registers are only a row's index, scales of codes and, in the fused kernel, the bias.
        loads = {"LDG.E", "LDG.E.64"} | ({"LDG.E.U16"} if fused else set()) | (set() if dense else {"LDG.E.U8"})
        assert set(re.findall(r"\bLDG\.[\w.]*", code)) <= loads
        # Blocks of a cluster wait for no memory: a barrier when all have begun, squares and sums sent, an mbarrier.
        sends = fused and arch != "80"
        assert len(re.findall(r"\bUCGABAR_ARV|\bUCGABAR_WAIT", code)) == 2 * sends, name
        stores = 3 if "EndE4E" in name else 2  # of wide pairs a warp sends two shares
        assert len(re.findall(r"\bSTAS(?:\.128)?\b", code)) == stores * sends and "MEMBAR.ALL.GPU" not in code, name
        assert bool(re.search(r"\bSYNCS\.PHASECHK", code)) == sends, name
        assert not re.search(r"\b(LDL|STL|ATOM\w*|RED)\b", code)
        # The two blocks of a pair have a barrier each, by a number in a register and for 256 threads; ptxas adds one
        # of all for a launch without a cluster.
        barriers = re.findall(r"\bBAR\.SYNC\S* (\S+?)(?:, (\S+))? ;", code)
        own = {("0x0", "")}
        if in_pairs:
            assert barriers.count(("0x0", "")) == 1
            own = {barrier for barrier in barriers if re.fullmatch(r"R\d+", barrier[0]) and barrier[1] == "0x100"}
            own.add(("0x0", ""))
        assert set(barriers) == own and len(barriers) >= 2, name


def test_warpgroups_multiply_from_registers_and_shared_memory() -> None:
    functions = dict(instructions(compiled("norm_concat_linear_wgmma", "90a")[1]))
    assert len(functions) == INSTANCES["norm_concat_linear_wgmma"]
    for name, code in functions.items():
        is_codes, blocks = "FormE0" not in name, "FormE2" in name
        loops = 2 if "Float16" in name and "BFloat16" not in name else 3  # one for each way to apply the gain
        kind = "BF16" if "BFloat16" in name else "F32"
        products = re.findall(r"HGMMA\.64x64x16\.F32(?:\.BF16)? R\d+, R\d+, gdesc", code)
        assert len(products) == loops * (8 if is_codes else 4), name
        assert (kind != "BF16") == ("F32.BF16" not in code), name
        assert set(re.findall(r"\bLDGSTS[\w.]*", code)) == {"LDGSTS.E.BYPASS.128"}
        # Of the weight, as fragments; of x a thread reads what it copied itself.
        assert set(re.findall(r"\bLDSM[\w.]*", code)) == {"LDSM.16.M88.4"}
        assert code.count("FENCE.VIEW.ASYNC") == loops and code.count("WARPGROUP.ARRIVE") == loops, name
        # At the first barrier one warp releases what the block has written; the others arrive relaxed.
        assert {"UCGABAR_ARV", "UCGABAR_WAIT"} <= set(re.findall(r"\bUCGABAR_\w+", code)), name
        assert code.count("MEMBAR.ALL.GPU") == 1, name
        assert not re.search(r"\b(LDL|STL|ATOM\w*|RED)\b", code)
        # With scales in blocks, the sums of stages are scaled after a wait of their own.
        assert code.count("WARPGROUP.DEPBAR") == loops * (3 if blocks else 2), name


# The uniform register that an instruction writes: the first after its name and predicates.
_WRITES = re.compile(r"^\s*/\*\w+\*/\s+(?:@\S+\s+)?(\S+)\s+(?:U?P\w+,\s*)*UR(\d+)", re.M)


@pytest.mark.parametrize("arch", ["90a", "100a", "120"])
@pytest.mark.parametrize("kernel", MAX_REGISTERS)
def test_what_is_read_of_uniform_registers_has_been_written(kernel: str, arch: str) -> None:
    """ptxas 12.8 and 13.0 encoded a cp.async with a cache policy as [R + UR0], desc[UR1], registers that nothing had
    written: every kernel of the projection ended with an illegal instruction on its first GPU."""
    for name, code in instructions(compiled(kernel, arch)[1]):
        # wgmma names four uniform registers; those of operand a, which is in other registers, it does not read.
        read = set(map(int, re.findall(r"\bUR(\d+)\b", re.sub(r"gdesc\[UR\d+\]", "", code))))
        written = set()
        for instruction, register in _WRITES.findall(code):
            bits = int((re.findall(r"\.(64|128|256)\b", instruction) or [64 if "WIDE" in instruction else 32])[0])
            written |= set(range(int(register), int(register) + bits // 32))
        assert read <= written, (name, sorted(read - written))


# In SASS: a prefetch into L2, an asynchronous copy, griddepcontrol.wait, griddepcontrol.launch_dependents, a load.
_ORDERED = re.compile(r"\b(CCTL\.E\.PF2|LDGSTS|ACQBULK|PREEXIT|LDG)\b")
# What comes before the wait: prefetches and copies of the weight.
_EARLY = {
    "norm_concat_linear_partial_kernel": ["CCTL.E.PF2", "LDGSTS"],
    "norm_concat_linear_wgmma_kernel": ["CCTL.E.PF2"],
}


@pytest.mark.parametrize("kernel", MAX_REGISTERS)
def test_a_kernel_prefetches_waits_lets_the_next_start_and_only_then_loads(kernel: str) -> None:
    """A load before the wait reads what the previous kernel may still write; a trigger before the wait would let the
    next kernel read what the one before this has not written; a prefetch behind the wait hides nothing."""
    for name, code in instructions(compiled(kernel, "90a")[1]):
        order = list(dict.fromkeys(_ORDERED.findall(code)))
        early = next((early for part, early in _EARLY.items() if part in name), [])
        late = ["LDGSTS"] if "wgmma" in name else []  # before the wait its weight is only prefetched
        assert order == [*early, "ACQBULK", "PREEXIT", "LDG", *late], name
        assert code.count("ACQBULK") == code.count("PREEXIT") == 1, name
        assert code.rfind("CCTL.E.PF2") < code.index("ACQBULK"), name
        assert not re.search(r"\b(STG|RED|ATOM)\w*\b", code[: code.index("ACQBULK")]), name
    for name, code in instructions(compiled(kernel, "80")[1]):
        assert "ACQBULK" not in code and "PREEXIT" not in code, name
