"""A user's program as a type checker sees it: `make lint` checks it, nothing runs it.

Where a call is wrong, the comment beside it names the error, and mypy reports a comment that it did not need.
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import eagle_kernels as ek
from eagle_kernels.plan import Plan

chunks = [torch.randn(4, 64) for _ in range(3)]
weight, gains, out = torch.randn(32, 192), torch.randn(3, 64), torch.empty(4, 32)
ids = torch.tensor([1, 2, 3, 4])
shard = ek.VocabShard.build(1000, tp_rank=0, tp_size=2)

assert_type(ek.norm_concat_linear(chunks, weight, norm_weight=gains, eps=[1e-6, 1e-6, 1e-5], out=out), Tensor)
assert_type(ek.norm_concat(chunks[0], num_chunks=2, residuals=[None], indices=ids), Tensor)
assert_type(ek.capture_hidden(chunks[0], out=torch.empty(4, 64)), Tensor)
assert_type(ek.vocab_parallel_embedding(ids, torch.randn(shard.rows, 64), shard, scale=2.0), Tensor)
assert_type(ek.add_rms_norm(chunks[0], chunks[1], gains[0]), tuple[Tensor, Tensor])
assert_type(ek.explain("norm_concat_linear", chunks, weight), Plan)
assert_type(ek.capture_layers("llama", 32), list[int])

config = ek.Eagle3Config.from_hf({"hidden_size": 64})
assert_type(config.num_chunks, int)
projection = ek.Eagle3Projection(config, dtype=torch.bfloat16).load_checkpoint("drafter")
assert_type(projection.prepack(), ek.Eagle3Projection)
states = ek.AuxHiddenStates(16, 3, 64, dtype=torch.float32)
assert_type(states.capture(0, chunks[0]), Tensor)
ek.warmup(projection, states.packed(16), rows=range(1, 17))

ek.norm_concat_linear(chunks)  # type: ignore[call-arg]
ek.norm_concat_linear(chunks, weight, norms="chunk")  # type: ignore[call-arg]
ek.norm_concat(chunks, norm=1)  # type: ignore[arg-type]
ek.capture_hidden(chunks, out=out)  # type: ignore[arg-type]
ek.vocab_parallel_embedding(ids, weight, 2)  # type: ignore[arg-type]
ek.add_rms_norm(chunks[0], chunks[1], gains[0], eps="1e-6")  # type: ignore[arg-type]
ek.VocabShard.build(1000, tp_rank="0", tp_size=2)  # type: ignore[arg-type]
ek.Eagle3Projection({"hidden_size": 64})  # type: ignore[arg-type]
ek.norm_concat_lineal  # type: ignore[attr-defined]  # noqa: B018
