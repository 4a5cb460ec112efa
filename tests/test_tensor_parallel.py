"""Embeddings over 2 and 4 gloo processes have the bits of one process, for vocabularies that ceil slices get wrong."""

from pathlib import Path

import pytest
import torch

import eagle_kernels as ek
import gloo_ranks as ranks
from guards import same_bits


@pytest.fixture(scope="module", params=[2, 4], ids="tp{}".format)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Of every rank, what it computed for every vocabulary."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    torch.multiprocessing.spawn(ranks.run, args=(request.param, str(store)), nprocs=request.param)
    return [torch.load(f"{store}.{rank}") for rank in range(request.param)]


def expected_rows(vocabulary: str) -> torch.Tensor:
    full, ids = ranks.table(vocabulary), ranks.token_ids(vocabulary)
    in_range = (ids >= 0) & (ids < len(full))
    return torch.where(in_range.unsqueeze(1), full[torch.where(in_range, ids, 0)], 0)


@pytest.mark.parametrize("vocabulary", ranks.VOCABULARIES)
def test_every_rank_has_the_lookup_of_one_process(results: list[dict], vocabulary: str) -> None:
    V, org = ranks.VOCABULARIES[vocabulary]
    shard = ek.VocabShard.build(V, tp_rank=0, tp_size=len(results), org_num_embeddings=org)
    assert shard.rows != -(-V // len(results)), "the case is there because slicing by ceil is wrong for it"
    expected = expected_rows(vocabulary)
    for result in results:
        assert same_bits(result[vocabulary, "lookup"], expected)
        assert same_bits(result[vocabulary, "shared"], expected)
        out = result[vocabulary, "out"]
        assert same_bits(out[:, ranks.H : 2 * ranks.H].contiguous(), expected)
        assert out[:, : ranks.H].isnan().all() and out[:, 2 * ranks.H :].isnan().all()


@pytest.mark.parametrize("vocabulary", ranks.VOCABULARIES)
def test_a_drafter_reads_the_target_s_table_alike_on_every_rank(results: list[dict], vocabulary: str) -> None:
    layer = ranks.drafter(embedding_scale=ranks.H**0.5)
    ids, hidden = ranks.token_ids(vocabulary), ranks.hidden_states(vocabulary)
    alone = layer(hidden, ids, table=ranks.table(vocabulary))
    for result in results:
        assert same_bits(result[vocabulary, "drafter"], alone)
