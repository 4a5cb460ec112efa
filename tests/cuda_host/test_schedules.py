"""One call per kernel and kind of main loop, with more stages than its ring has, in fixed and random orders of warps
and copies: these tests notice every synchronization call that is missing.

`make mutants` removes these calls one by one and runs this file with and without ThreadSanitizer. A call whose removal
no test here notices is redundant, or its test is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import eagle_kernels as ek
import test_add_rms_norm as add_rms_norm
import test_capture_hidden as capture_hidden
import test_norm_concat as norm_concat
from backends import environment_of
from cases import Case
from cuda_host import test_norm_concat_linear as dense
from cuda_host import test_norm_concat_linear_quantized as quantized
from cuda_host.conftest import SHARED_MEMORY, is_in_pairs, is_in_threes
from eagle_kernels import plan
from guards import same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "emulated")

SCHEDULES = {
    "ascending": {"descending_warps": False},
    "descending-and-late": {"descending_warps": True, "late_copies": True},
    "random-1": {"descending_warps": False, "random": 1},
    "random-2": {"descending_warps": False, "random": 2},
}


@dataclass(frozen=True)
class Product:
    case: Case
    kernel: str
    codes: str = ""
    has_wgmma: bool = True
    ranges: int = 2
    blocks: int = 2  # of the fused kernel on an SM; 1: in pairs
    columns: int = 64  # of the output in its blocks


# Each chunk is one range of more stages than a ring has; in most kernels its last stage lies where sums go next. Of
# three ranges the second has the end of a chunk and the beginning of the next.
WIDTHS, CODES_WIDTHS, BLOCKS_WIDTHS = (520, 520), (784, 784), (896, 896)
PRODUCTS = {
    "fused": Product(Case("bf16", WIDTHS, 11, D=70), "fused"),
    "fused-fp16": Product(Case("fp16", WIDTHS, 11, "concat", D=70, residuals="some"), "fused"),
    "fused-codes": Product(Case("bf16", CODES_WIDTHS, 11, D=70), "fused", "fp8_row"),
    "fused-blocks": Product(Case("bf16", BLOCKS_WIDTHS, 11, D=70), "fused", "fp8_block128"),
    "fused-across": Product(Case("bf16", WIDTHS, 11, D=70), "fused", ranges=3),
    "fused-codes-across": Product(Case("bf16", CODES_WIDTHS, 11, D=70), "fused", "fp8_row", ranges=3),
    "fused-blocks-across": Product(Case("bf16", BLOCKS_WIDTHS, 11, D=70), "fused", "fp8_block128", ranges=3),
    "threes-across": Product(Case("bf16", WIDTHS, 11, D=70), "fused", ranges=3, blocks=3),
    "threes-codes-across": Product(Case("bf16", CODES_WIDTHS, 11, D=70), "fused", "fp8_row", ranges=3, blocks=3),
    "threes-blocks-across": Product(Case("bf16", BLOCKS_WIDTHS, 11, D=70), "fused", "fp8_block128", ranges=3, blocks=3),
    "pairs-codes-across": Product(Case("bf16", CODES_WIDTHS * 2, 11, D=70), "fused", "fp8_row", ranges=6, blocks=1),
    "pairs-blocks": Product(Case("bf16", BLOCKS_WIDTHS * 2, 11, D=70), "fused", "fp8_block128", ranges=4, blocks=1),
    "wide-pairs": Product(
        Case("bf16", CODES_WIDTHS * 2, 11, D=100), "fused", "fp8_row", ranges=6, blocks=1, columns=96
    ),
    # A block that is alone in its range waits for no cluster.
    "fused-alone": Product(Case("bf16", WIDTHS[:1], 11, D=70), "fused", ranges=1),
    "wgmma-alone": Product(Case("bf16", WIDTHS[:1], 40, D=70), "fused wgmma", ranges=1),
    "split": Product(Case("bf16", WIDTHS, 19, D=70), "split", has_wgmma=False),
    "split-of-64": Product(Case("fp16", WIDTHS, 40, D=70, residuals="some"), "split", has_wgmma=False),
    "split-of-128": Product(Case("bf16", WIDTHS, 70, "concat", D=70), "split", has_wgmma=False),
    "split-in-two": Product(Case("bf16", WIDTHS, 19, D=150, post_norm="dtype"), "split", has_wgmma=False),
    "split-codes": Product(Case("fp16", CODES_WIDTHS, 19, D=70), "split", "int8_row", has_wgmma=False),
    "split-blocks": Product(Case("bf16", BLOCKS_WIDTHS, 19, D=70), "split", "fp8_block128", has_wgmma=False),
    "wgmma": Product(Case("bf16", WIDTHS, 40, D=70), "fused wgmma"),
    "wgmma-residuals": Product(Case("fp16", WIDTHS, 40, "concat", D=70, residuals="some"), "fused wgmma"),
    "wgmma-twice": Product(Case("bf16", WIDTHS, 70, D=70, norm_offset=1.0), "fused wgmma"),
    "wgmma-codes": Product(Case("bf16", CODES_WIDTHS, 40, D=70), "fused wgmma", "fp8_row"),
    "wgmma-blocks": Product(Case("bf16", BLOCKS_WIDTHS, 40, D=70, gain="fp32"), "fused wgmma", "fp8_block128"),
}


@pytest.fixture
def on_schedule(request: pytest.FixtureRequest, emulation: ModuleType, emulated: object) -> None:
    """On one SM, for which plans have the fewest ranges."""
    emulation.set_device(SHARED_MEMORY, **SCHEDULES[request.param], multiprocessors=1)


in_every_order = pytest.mark.parametrize("on_schedule", SCHEDULES, indirect=True)


@in_every_order
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(
    name: str,
    on_schedule: None,
    emulation: ModuleType,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = PRODUCTS[name]
    if not product.has_wgmma:
        request.getfixturevalue("no_wgmma")
    if "wgmma" in product.kernel:
        monkeypatch.setattr(plan, "_FEW_ROWS_OF_CODES", {False: 0, True: 0})
    emulation.take_launches()
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_RANGES", str(product.ranges))
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_BLOCKS", str(product.blocks))
    monkeypatch.setenv("EAGLE_KERNELS_FUSED_COLUMNS", str(product.columns))
    with environment_of(EAGLE_KERNELS_BACKEND="cuda"):
        if product.codes:
            quantized.check(product.case, product.codes, product.kernel)
        else:
            assert dense.explained(product.case).startswith(f"norm_concat_linear: cuda/{product.kernel}, because ")
            dense.check(product.case)
    launch = next(launch for launch in emulation.take_launches() if launch.threads)
    assert launch.grid[1] * launch.rows == product.ranges
    if product.kernel == "fused":
        assert (is_in_pairs(launch), is_in_threes(launch)) == (product.blocks == 1, product.blocks == 3)


def embed() -> None:
    table, ids = torch.randn(5, 520).bfloat16(), torch.tensor([4, 0, 3])
    out = ek.vocab_parallel_embedding(ids, table, ek.VocabShard.build(5, tp_rank=0, tp_size=1))
    assert same_bits(out, table[ids])


# Rows that take several warps.
OTHERS: dict[str, Callable[[], None]] = {
    "capture": lambda: capture_hidden.test_slots_of_a_buffer_and_their_statistics(torch.bfloat16, 3, 1032, "emulated"),
    "mean": lambda: capture_hidden.test_the_mean_of_strided_streams(torch.bfloat16, 3, 1032, 4, "emulated"),
    "add": lambda: add_rms_norm.test_float64_truth(torch.bfloat16, 3, 1032, "plain", "emulated"),
    "concat": lambda: norm_concat.test_float64_truth(
        Case("bf16", (1032, 520), 3, "concat", residuals="all"), "emulated"
    ),
    "embedding": embed,
}


@in_every_order
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, on_schedule: None) -> None:
    OTHERS[name]()
