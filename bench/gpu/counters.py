"""Calls of the projection and of the library's product for ncu, each between cudaProfilerStart and Stop.

`ncu --profile-from-start off ... python -m eagle_kernels.bench.gpu.counters`: after a warm-up, one call of each kernel
at each T of its list, in this order, so that a kernel is identified by its place in ncu's output.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

import eagle_kernels as ek

K, H, D = 3, 4096, 4096
ROWS = (1, 8, 16, 32, 48)
ROWS_OF_CODES = (1, 16, 64)


def main() -> None:
    chunks = [torch.randn(max(*ROWS, *ROWS_OF_CODES), H, device="cuda").bfloat16() for _ in range(K)]
    weight = torch.randn(D, K * H).mul_((K * H) ** -0.5).bfloat16()
    gain, concat = torch.rand(K, H, device="cuda").bfloat16(), torch.cat(chunks, -1)
    codes, weight = ek.quantize(weight, "fp8_row").to("cuda"), weight.cuda()
    for T in ROWS:
        rows = [chunk[:T] for chunk in chunks]
        profile(f"op T={T}", partial(ek.norm_concat_linear, rows, weight, norm_weight=gain))
        profile(f"linear T={T}", partial(F.linear, concat[:T], weight))
    for T in ROWS_OF_CODES:
        rows = [chunk[:T] for chunk in chunks]
        profile(f"op fp8_row T={T}", partial(ek.norm_concat_linear, rows, codes, norm_weight=gain))


def profile(name: str, call: Callable[[], object]) -> None:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    print(name, flush=True)
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
