"""The device of a benchmark, and how a host time is taken on it."""

from collections.abc import Callable, Iterator

import pytest
import torch

from backends import environment_of

Measure = Callable[[Callable[[], object]], None]

_ROUNDS = 2000


@pytest.fixture(params=["cpu", *(["cuda", "triton"] if torch.cuda.is_available() else [])])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # handing a row to a second thread would be most of what is measured
    with environment_of(EAGLE_KERNELS_BACKEND="triton" if request.param == "triton" else "auto"):
        yield request.param
    torch.set_num_threads(threads)


@pytest.fixture
def device(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


@pytest.fixture
def measure(benchmark: Callable, device: str) -> Measure:
    """Times a call on the host: on CUDA with an idle stream, so that no call waits for the queue to have room."""

    def measured(call: Callable[[], object]) -> None:
        with torch.no_grad():
            if device == "cpu":
                benchmark(call)
                return
            call()  # compiles
            benchmark.pedantic(call, setup=torch.cuda.synchronize, rounds=_ROUNDS, warmup_rounds=_ROUNDS // 10)

    return measured
