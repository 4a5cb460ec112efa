"""What each rank of a gloo group computes: its share of the embeddings, the input stage of a drafter over them, and the
seconds that all ranks agree on."""

import torch
import torch.distributed as dist
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels.engines import decision

H = 24
# (ids, original ids among them). For none of them are slices of ceil(V / tp) rows the engines' layout.
VOCABULARIES = {
    "added": (133, 130),
    "unpadded": (1001, 1001),
    "one-added": (577, 577),
    "gemma-and-one": (262145, 262145),
    "smaller-than-a-rank": (65, 65),
}


def table(vocabulary: str) -> Tensor:
    V, _ = VOCABULARIES[vocabulary]
    return torch.randn(V, H, generator=torch.Generator().manual_seed(V)).bfloat16()


def token_ids(vocabulary: str) -> Tensor:
    """Both ends of every rank's range, and ids that no rank holds."""
    V, org = VOCABULARIES[vocabulary]
    inside = torch.linspace(0, V - 1, 97).long()
    return torch.cat([inside, torch.tensor([org - 1, org % V, V // 2 - 1, V // 2, V // 4, -1, V, 2**31])])


def hidden_states(vocabulary: str) -> Tensor:
    return torch.randn(len(token_ids(vocabulary)), H, generator=torch.Generator().manual_seed(1)).bfloat16()


def drafter(**config: object) -> ek.MTPProjection:
    torch.manual_seed(2)
    layer = ek.MTPProjection(ek.MTPConfig(H, 40, enorm_eps=1e-5, norm_offset=1.0, **config), dtype=torch.bfloat16)
    layer.enorm.weight.uniform_(-0.5, 0.5)
    layer.hnorm.weight.uniform_(-0.5, 0.5)
    return layer


def run(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group, results = dist.group.WORLD, {}
    for vocabulary, (V, org) in VOCABULARIES.items():
        full, ids = table(vocabulary), token_ids(vocabulary)
        own = ek.VocabParallelEmbedding(V, H, process_group=group, org_num_embeddings=org, dtype=full.dtype)
        own.load_state_dict({"weight": full})
        results[vocabulary, "lookup"] = own(ids)
        out = torch.full((len(ids), 3 * H), float("nan")).bfloat16()
        own(ids, out=out[:, H : 2 * H])
        results[vocabulary, "out"] = out
        # What a Gemma target in SGLang passes to the drafter: the whole table, on every rank.
        weight = ek.shard_vocab_weight(full, own.shard)
        shared = ek.VocabParallelEmbedding.from_weight(weight, own.shard, process_group=group)
        results[vocabulary, "shared"] = shared(ids)
        scaled = drafter(embedding_scale=H**0.5)
        results[vocabulary, "drafter"] = scaled(hidden_states(vocabulary), ids, table=shared)
    torch.save(results, f"{store}.{rank}")
    dist.destroy_process_group()


# Of two ranks: the engine's call and ours, each at two row counts.
SECONDS = ([[2.0, 5.0], [1.0, 4.0]], [[3.0, 4.0], [0.5, 6.0]])


def agree_on_seconds(rank: int, size: int, store: str) -> None:
    """With the default device of a loader that makes its model on `meta`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with torch.device("meta"):
        agreed = decision.agreed_seconds(lambda: SECONDS[rank], 2, 2, dist.group.WORLD)
    torch.save(agreed, f"{store}.{rank}")
    dist.destroy_process_group()
