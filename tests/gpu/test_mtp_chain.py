"""A whole MTP chain in one CUDA graph: masked position 0, table as a chunk, states handed on, token ids rotated."""

import pytest
import torch

import eagle_kernels as ek
from guards import same_bits

pytestmark = pytest.mark.usefixtures("gpu_backend")

H, V, T, MAX, LAYERS = 256, 1000, 24, 64, 3


class Chain:
    """Static inputs and buffers of three MTP layers over four requests of six rows."""

    def __init__(self, device: str = "cuda") -> None:
        config = ek.MTPConfig(H, norm_offset=1.0, mask_position_zero=True)
        factory = {"dtype": torch.bfloat16, "device": device}
        self.stages = [ek.MTPProjection(config, max_tokens=MAX, **factory) for _ in range(LAYERS)]
        self.gains = torch.rand(LAYERS, H, **factory) - 0.5
        self.table = torch.randn(V, H, **factory)
        self.states = ek.ChainedHiddenStates(MAX, H, **factory)
        self.target = torch.zeros(T, H, **factory)
        self.start_ids = torch.zeros(T, dtype=torch.int64, device=device)
        self.ids = torch.zeros_like(self.start_ids)
        self.positions = torch.arange(T, device=device) % 6
        self.last_rows = torch.arange(5, T, 6, device=device)
        self.drafted = torch.zeros(LAYERS, T // 6, dtype=torch.int64, device=device)

    def refill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target.copy_(torch.randn(T, H, generator=generator))
        self.start_ids.copy_(torch.randint(V, (T,), generator=generator))

    def run(self) -> None:
        self.ids.copy_(self.start_ids)
        self.states.load(self.target)
        for k, stage in enumerate(self.stages):
            x = stage(self.states.current(T), self.ids, table=self.table, positions=self.positions)
            normed = self.states.advance(x.tanh(), x, self.gains[k], norm_offset=1.0)
            self.drafted[k] = (normed[self.last_rows] @ self.table.t()).argmax(-1)
            ek.rotate_token_ids(self.ids, self.drafted[k], self.last_rows)

    def results(self) -> list[torch.Tensor]:
        return [rows.clone() for rows in (self.states.current(T), self.states.other[:T], self.drafted, self.ids)]

    def poison(self) -> None:
        for rows in (self.states.buffer, self.states.other):
            rows.fill_(float("nan"))
        self.drafted.fill_(-7)


def test_a_graph_of_the_chain_replays_with_new_contents() -> None:
    chain = Chain()
    chain.refill(0)
    chain.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for seed in range(1, 4):
        chain.refill(seed)
        chain.poison()
        graph.replay()
        replayed = chain.results()
        assert replayed[0].isfinite().all() and (replayed[2] >= 0).all()
        chain.poison()
        chain.run()
        assert all(same_bits(one, other) for one, other in zip(replayed, chain.results(), strict=True))
