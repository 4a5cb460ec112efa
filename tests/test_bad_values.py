"""Bad values for what is public and no op: the sentence that each gets (tests/test_errors.py has those of the ops)."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eagle_kernels as ek
from guards import same_bits

T, H, V = 4, 16, 20
OPS = str(ek.ops.__all__)
DTYPES = "expected torch.bfloat16 or torch.float16 or torch.float32"
ARGUMENTS = (
    "expected some of ['chunks', 'norm', 'norm_weight', 'eps', 'norm_offset', 'residuals', 'indices', 'sum_squares', "
    "'num_chunks', 'out']"
)
DEVICE = "a torch.device or the name of one"


def rows(*shape: int) -> Tensor:
    return torch.randn(shape or (T, H))


def context(**config: object) -> ek.ContextKV:
    return ek.ContextKV(ek.ContextKVConfig(1, H, H, 2, 1, 4, **config))


def store(*caches: object, **config: object) -> None:
    """The caches of two layers."""
    stage = context(**config)
    kv, ids = rows(T, 2 * stage.config.kv_width), torch.arange(T)
    stage.store(kv, positions=ids, slots=ids, cos_sin=torch.rand(9, 4), caches=caches)


def cache() -> tuple[Tensor, Tensor]:
    return torch.zeros(9, 1, 4), torch.zeros(9, 1, 4)


MODULES = {
    "Eagle3Projection": ("an Eagle3Config", lambda: ek.Eagle3Config(2, H, H)),
    "MTPProjection": ("an MTPConfig", lambda: ek.MTPConfig(H)),
    "MTPStreamsProjection": ("an MTPStreamsConfig", lambda: ek.MTPStreamsConfig(H)),
    "Eagle3QKVProjection": ("an Eagle3QKVConfig", lambda: ek.Eagle3QKVConfig(H)),
    "ContextKV": ("a ContextKVConfig", lambda: ek.ContextKVConfig(1, H, H, 2, 1, 4)),
}
# What allocates: name, and a call that takes a dtype and a device.
FACTORIES: dict[str, Callable] = {
    **{name: lambda name=name, **factory: getattr(ek, name)(MODULES[name][1](), **factory) for name in MODULES},
    "VocabParallelEmbedding": lambda **factory: ek.VocabParallelEmbedding(V, H, **factory),
    "AuxHiddenStates": lambda **factory: ek.AuxHiddenStates(8, 2, H, **factory),
    "ChainedHiddenStates": lambda **factory: ek.ChainedHiddenStates(8, H, **factory),
}

# (call, exception, message).
ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    # explain
    (lambda: ek.explain(5, [rows()]), ValueError, f"explain: op is 5, expected one of {OPS}"),
    (
        lambda: ek.explain("norm_concat"),
        TypeError,
        "norm_concat: chunks is missing, expected chunks, because the plan depends on it",
    ),
    (
        lambda: ek.explain("norm_concat", [rows()], norm="none", eps=-1.0),
        ValueError,
        "norm_concat: eps is -1.0, expected a finite fp32 number of at least 0",
    ),
    (
        lambda: ek.explain("norm_concat_linear", [rows()], norm="none"),
        TypeError,
        "norm_concat_linear: weight is missing, expected chunks and weight, because the plan depends on it",
    ),
    (
        lambda: ek.explain("norm_concat", [rows()], rows()),
        TypeError,
        f"norm_concat: too many positional arguments, {ARGUMENTS}",
    ),
    *(
        (lambda op=op: ek.explain(op, [rows()]), TypeError, f"{op}: {name} is a list, expected a torch.Tensor")
        for op, name in (("capture_hidden", "hidden"), ("add_rms_norm", "hidden"), ("vocab_parallel_embedding", "ids"))
    ),
    (
        lambda: ek.explain("norm_concat_linear", [rows()], None),
        TypeError,
        "norm_concat_linear: weight is a NoneType, expected a torch.Tensor",
    ),
    (
        lambda: ek.explain("norm_concat_linear", [rows()], rows().to_sparse()),
        TypeError,
        "norm_concat_linear: weight has layout torch.sparse_coo, expected torch.strided",
    ),
    (
        lambda: ek.explain("norm_concat_linear", [rows()], ek.quantize(rows(8, 2 * H), "fp8_row")),
        ValueError,
        "norm_concat_linear: weight is fp8_row of shape (8, 32), expected (D, K*H) = (*, 16) for K=1 chunks of H=16",
    ),
    (
        lambda: ek.norm_concat_linear([rows()], ek.quantize(rows(8, H), "fp8_row").to("meta")),
        ValueError,
        "norm_concat_linear: weight.codes is on meta, expected cpu, because chunks[0] is there",
    ),
    # warmup
    (lambda: ek.warmup(5), ValueError, f"warmup: op is 5, expected a module or one of {OPS}"),
    (
        lambda: ek.warmup("norm_concat"),
        TypeError,
        f"norm_concat: missing a required argument: 'chunks', {ARGUMENTS}",
    ),
    (
        lambda: ek.warmup("norm_concat", [rows()], norn="none", epsilon=1e-6),
        TypeError,
        f"norm_concat: norn, epsilon is no argument, {ARGUMENTS}",
    ),
    *(
        (lambda op=op, bad=bad: ek.warmup(op, bad), TypeError, f"{name}: {message}")
        for op, name in (
            ("norm_concat", "norm_concat"),
            (ek.Eagle3Projection(ek.Eagle3Config(1, H, H)), "Eagle3Projection"),
        )
        for bad, message in (
            (5, "chunks is a int, expected a tensor or a sequence of tensors or None"),
            ([[1.0]], "chunks[0] is a list, expected a torch.Tensor"),
            ([rows().to_sparse()], "chunks[0] has layout torch.sparse_coo, expected torch.strided"),
            ([], "there are no chunks, hidden or ids, expected a tensor whose rows are counted"),
        )
    ),
    (
        lambda: ek.warmup("norm_concat", [rows()], out=3),
        TypeError,
        "norm_concat: out is a int, expected a tensor or a sequence of tensors or None",
    ),
    (
        lambda: ek.warmup("norm_concat", [rows()], out=torch.tensor(3.0)),
        ValueError,
        "norm_concat: out has shape (), expected (N, K*H) = (4, 16)",
    ),
    (
        lambda: ek.warmup("norm_concat", [rows()], indices=torch.tensor(3)),
        ValueError,
        "norm_concat: indices[0] has shape (), expected (N,)",
    ),
    (
        lambda: ek.warmup(nn.Identity(), rows()),
        TypeError,
        "Identity: there are no chunks, hidden or ids, expected a tensor whose rows are counted",
    ),
    (
        lambda: ek.warmup("norm_concat", [rows()], rows=3),
        TypeError,
        "warmup: rows is a int, expected row counts, for example range(1, 129)",
    ),
    (lambda: ek.warmup("norm_concat", [rows()], rows=[1.0]), TypeError, "warmup: rows[0] is a float, expected an int"),
    (
        lambda: ek.warmup("norm_concat", [rows()], rows=[2, -1]),
        ValueError,
        "warmup: rows[1] is -1, expected at least 0",
    ),
    # modules
    *(
        (
            lambda name=name: getattr(ek, name)({"hidden_size": H}),
            TypeError,
            f"{name}: config is a dict, expected {kind}: {kind.split()[1]}.from_hf makes one",
        )
        for name, (kind, _) in MODULES.items()
    ),
    *(
        (lambda make=make, bad=bad: make(dtype=bad), TypeError, f"{name}: dtype is {bad!r}, {DTYPES}")
        for name, make in FACTORIES.items()
        for bad in ("bfloat16", torch.float64, int)
    ),
    *(
        (lambda make=make: make(device=[0]), TypeError, f"{name}: device is [0], expected {DEVICE}")
        for name, make in FACTORIES.items()
    ),
    *(
        (
            lambda name=name, bad=bad: getattr(ek, name)(MODULES[name][1](), max_tokens=bad),
            kind,
            f"{name}: max_tokens is {message}",
        )
        for name in ("MTPProjection", "MTPStreamsProjection", "Eagle3QKVProjection")
        for bad, kind, message in (
            ("many", TypeError, "a str, expected an int"),
            (0, ValueError, "0, expected at least 1"),
            (2**63, ValueError, "beyond 64 bits, expected an int of 64 bits"),
        )
    ),
    (
        lambda: ek.MTPStreamsProjection(ek.MTPStreamsConfig(H))(
            rows(T, 4 * H), torch.arange(T, device="meta"), table=rows(V, H)
        ),
        ValueError,
        "MTPStreamsProjection: ids is on meta, expected cpu, because hidden is there",
    ),
    (
        lambda: ek.MTPStreamsProjection(ek.MTPStreamsConfig(H))(
            rows(T, 4 * H), embeds=rows(), indices=torch.arange(T, device="meta")
        ),
        ValueError,
        "MTPStreamsProjection: indices is on meta, expected cpu, because hidden is there",
    ),
    (
        lambda: ek.MTPProjection(ek.MTPConfig(H, mask_position_zero=True))(
            rows(), torch.arange(T, device="meta"), table=rows(V, H), positions=torch.arange(T)
        ),
        ValueError,
        "MTPProjection: ids is on meta, expected cpu, because positions is there",
    ),
    # ContextKV
    (lambda: store(cache(), 3), TypeError, "ContextKV: caches[1] is a int, expected a pair (K, V)"),
    (lambda: store(cache(), cache()[:1]), TypeError, "ContextKV: caches[1] is a tuple, expected a pair (K, V)"),
    (
        lambda: store(cache(), torch.zeros(3, 9, 1, 4)),
        TypeError,
        "ContextKV: caches[1] is a Tensor, expected a pair (K, V)",
    ),
    (
        lambda: store((None, cache()[0]), cache()),
        TypeError,
        "store_context_kv: k_cache is a NoneType, expected a torch.Tensor",
    ),
    # VocabParallelEmbedding, VocabShard
    (
        lambda: ek.VocabParallelEmbedding(V, H, process_group=-100),
        TypeError,
        "VocabParallelEmbedding: process_group is a int, expected a ProcessGroup of this rank",
    ),
    (
        lambda: ek.VocabParallelEmbedding(V, 16.0),
        TypeError,
        "VocabParallelEmbedding: embedding_dim is a float, expected an int",
    ),
    (
        lambda: ek.VocabParallelEmbedding(V, -1),
        ValueError,
        "VocabParallelEmbedding: embedding_dim is -1, expected at least 1",
    ),
    (
        lambda: ek.VocabParallelEmbedding(V, 2**31),
        ValueError,
        "VocabParallelEmbedding: K=1 chunks of H=2147483648 have 2147483648 columns, expected at most 2147479552, "
        "because int32 counts them",
    ),
    (
        lambda: ek.VocabParallelEmbedding(2**63, H),
        ValueError,
        "VocabShard.build: num_embeddings is beyond 64 bits, expected an int of 64 bits",
    ),
    (
        lambda: ek.VocabParallelEmbedding(V, H, scale="sqrt"),
        TypeError,
        "VocabParallelEmbedding: scale is a str, expected a number or a 0-d tensor",
    ),
    (
        lambda: ek.VocabParallelEmbedding.from_weight(None, None),
        TypeError,
        "VocabParallelEmbedding.from_weight: weight is a NoneType, expected a torch.Tensor",
    ),
    (
        lambda: ek.VocabParallelEmbedding.from_weight(rows(), V),
        TypeError,
        "VocabParallelEmbedding.from_weight: shard is a int, expected a VocabShard",
    ),
    (
        lambda: ek.VocabParallelEmbedding.from_weight(rows(), ek.VocabShard.build(V, tp_rank=0, tp_size=1)),
        ValueError,
        "VocabParallelEmbedding.from_weight: weight has shape (4, 16), expected (rows, H) = (64, *), because rank 0 of "
        "1 holds 20 ids' rows",
    ),
    *(
        (
            lambda bad=bad: ek.VocabShard.build(V, tp_rank=0, tp_size=1, org_num_embeddings=bad),
            TypeError,
            f"VocabShard.build: org_num_embeddings is a {kind}, expected an int",
        )
        for bad, kind in ((False, "bool"), ("", "str"), ([], "list"), (torch.tensor(3, device="meta"), "Tensor"))
    ),
    # buffers
    (
        lambda: ek.AuxHiddenStates(2**63, 2, H),
        ValueError,
        "AuxHiddenStates: max_tokens is beyond 64 bits, expected an int of 64 bits",
    ),
    (
        lambda: ek.ChainedHiddenStates(8, H, norm_output="no"),
        TypeError,
        "ChainedHiddenStates: norm_output is 'no', expected True or False",
    ),
    (
        lambda: ek.rotate_token_ids(torch.arange(1).expand(3), torch.tensor([1]), torch.tensor([0])),
        ValueError,
        "rotate_token_ids: ids has strides (0,), expected entries of its own, because ids is written",
    ),
    (
        lambda: ek.rotate_token_ids(torch.arange(3), torch.tensor([1]), torch.tensor([3])),
        ValueError,
        "rotate_token_ids: last_rows has a row outside of ids, expected rows in [0, 3)",
    ),
    # quantized weights
    (
        lambda: ek.quantize(rows().to("meta"), "fp8_row"),
        ValueError,
        "quantize: weight is on meta, expected a device where it has values",
    ),
    (
        lambda: ek.quantize(rows(), "fp8_row").to(torch.bfloat16),
        TypeError,
        f"QuantizedWeight.to: device is torch.bfloat16, expected {DEVICE}",
    ),
    (
        lambda: ek.QuantizedWeight(torch.zeros(T, H, dtype=torch.int8), torch.ones(T), "int8_row", float("nan")),
        ValueError,
        "QuantizedWeight: global_scale is nan, expected a number that is finite in torch.float32",
    ),
    # bools, strings and complex numbers of numpy's and torch's, which float() takes
    *(
        (
            lambda bad=bad: ek.norm_concat([rows()], eps=bad),
            TypeError,
            f"norm_concat: eps is a {type(bad).__name__}, expected a number or a sequence of numbers",
        )
        for bad in (np.bool_(True), np.complex64(1j), np.array("1e-6"), torch.tensor(True), torch.tensor(1 + 0j))
    ),
    (
        lambda: ek.norm_concat([rows()], norm_offset=torch.tensor(True)),
        TypeError,
        "norm_concat: norm_offset is a Tensor, expected a number",
    ),
    (
        lambda: ek.norm_concat([rows()], norm_offset=bytearray(b"1")),
        TypeError,
        "norm_concat: norm_offset is a bytearray, expected a number",
    ),
    (
        lambda: ek.AuxHiddenStates(torch.tensor(True), 2, H),
        TypeError,
        "AuxHiddenStates: max_tokens is a Tensor, expected an int",
    ),
    # configs
    (lambda: ek.Eagle3QKVConfig(H, latent=8), TypeError, "Eagle3QKVConfig: latent is a int, expected two ints"),
    (
        lambda: ek.Eagle3QKVConfig(H, latent=()),
        ValueError,
        "Eagle3QKVConfig: latent has 0 entries, expected 2, of q_a_proj and kv_a_proj",
    ),
    (
        lambda: ek.Eagle3QKVConfig(H, 2**31),
        ValueError,
        "Eagle3QKVConfig: K=1 chunks of H=2147483650 have 2147483650 columns, expected at most 2147479552, because "
        "int32 counts them",
    ),
    (
        lambda: ek.MTPConfig(H, 2**31),
        ValueError,
        "MTPConfig: K=1 chunks of H=2147483648 have 2147483648 columns, expected at most 2147479552, because int32 "
        "counts them",
    ),
    # numpy's integers, whose products and sums wrap
    (
        lambda: ek.Eagle3Config(np.int32(2**16), np.int32(2**16), H),
        ValueError,
        "Eagle3Config: K=65536 chunks of H=65536 have 4294967296 columns, expected at most 2147479552, because int32 "
        "counts them",
    ),
    (
        lambda: ek.AuxHiddenStates(8, 2, H).step(np.int64(2**63 - 1), row=1),
        ValueError,
        f"AuxHiddenStates.step: the rows end at {2**63}, expected at most max_tokens = 8, because static buffers never "
        "grow",
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and sparse tensors in beta
@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message[:72] for *_, message in ERRORS])
def test_error(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$") as raised, torch.no_grad():
        call()
    assert type(raised.value) is kind


@pytest.mark.parametrize("name", FACTORIES)
def test_a_device_that_torch_does_not_know(name: str) -> None:
    message = f"^{name}: device is 'gpu', expected {DEVICE}, because torch says: .*gpu"
    with pytest.raises(ValueError, match=message):
        FACTORIES[name](device="gpu")


@pytest.mark.parametrize("bad", [3, (None, None)], ids=["no pair", "no V"])
def test_no_layer_is_stored_where_a_later_one_has_no_pair(bad: object) -> None:
    first = cache()
    with pytest.raises((TypeError, ValueError)):
        store(first, bad)
    assert all(same_bits(tensor, torch.zeros_like(tensor)) for tensor in first)


def test_what_a_generator_raises_comes_out() -> None:
    """Its TypeError read as if chunks were no sequence."""
    with pytest.raises(TypeError, match=r"^its own$"):
        ek.norm_concat(_ for _ in iter(_raise, None))


def _raise() -> None:
    raise TypeError("its own")


def test_the_numbers_of_a_config_are_pythons() -> None:
    ints, floats = np.int64(4), torch.tensor(0.5)
    configs = [
        ek.Eagle3Config(ints, ints, ints, vocab_size=ints),
        ek.Eagle3QKVConfig(ints, ints, ints, ints, latent=[ints, ints], eps=floats),
        ek.MTPConfig(ints, ints, embedding_scale=floats),
        ek.MTPStreamsConfig(ints, num_streams=ints),
        ek.ContextKVConfig(*[ints] * 6, eps=floats, norm_offset=floats),
    ]
    plain = (int, float, bool, str, tuple, type(None))
    for config in configs:
        assert all(type(value) in plain for value in vars(config).values()), config


def test_a_weight_that_requires_grad_is_explained() -> None:
    assert ek.explain("norm_concat_linear", [rows()], nn.Linear(H, 8).weight).op == "norm_concat_linear"


def test_warmup_reads_a_generator_once_and_takes_none_for_ids() -> None:
    ek.warmup("norm_concat", (chunk for chunk in [rows(), rows()]), rows=range(3))
    ek.warmup(ek.MTPProjection(ek.MTPConfig(H)), rows(), None, embeds=rows(), rows=np.arange(1, 3))
