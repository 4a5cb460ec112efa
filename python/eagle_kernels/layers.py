"""The ops as inference modules whose state_dict is what checkpoints hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks, plan
from .dispatch import is_plain
from .drafter_config import Eagle3Config
from .ops import norm_concat_linear_quantized as quantized
from .ops import vocab_parallel_embedding
from .ops.call import copied
from .ops.norm_concat import concatenate
from .ops.norm_concat_linear import project
from .ops.projection import Projection
from .ops.sources import Sources
from .ops.vocab_parallel_embedding import check_scale, check_table
from .packable_linear import ORDER_BY_ROWS, PackableLinear, unsupported_reason
from .quantized_linear import (
    LOAD,
    LoadsProjections,
    QuantizedLinear,
    compute_in_hooks,
    load_projections,
    quantize_linear,
)
from .quantized_weight import columns_of
from .vocab_shard import VocabShard, shard_vocab_weight


def parameter_of(module: Any, name: str = "weight", *default: None) -> Any:
    """The module's parameter as it is now: nothing is cached that load_state_dict, .to() or a new Parameter would make
    stale. Read from the module's own dict, since an attribute of nn.Module takes 0.6 us and eight of them a third of a
    call; a parametrized weight, a wrapper's property and an engine's object in place of a module are only attributes.
    """
    parameters: Any = getattr(module, "_parameters", ())
    if name in parameters:
        return parameters[name]
    compute_in_hooks(module, name)
    return getattr(module, name, *default)


def child_of(module: Any, name: str) -> Any:
    """A module's child as it is now, read from its own dict like `parameter_of`; None if there is none of that name."""
    modules: Any = getattr(module, "_modules", ())
    return modules[name] if name in modules else getattr(module, name, None)


def gain_of(norm: Any) -> Any:
    """The weight of a norm as it is now, like `parameter_of`."""
    try:
        return norm._parameters["weight"]
    except (AttributeError, KeyError):
        checks.check_unwrapped("norm_concat", "norm_weight", norm, "a norm")
        return parameter_of(norm)


def weights_of(norms: Iterable[Any]) -> list[Any]:
    """`gain_of` each norm, without a Python call for each."""
    try:
        return [norm._parameters["weight"] for norm in norms]
    except (AttributeError, KeyError):
        return list(map(gain_of, norms))


def project_onto(linear: Any, sources: Sources, post_norm_eps: float, out: Tensor | None) -> Tensor:
    """sources @ weight^T + bias of a linear layer, quantized or dense."""
    if isinstance(linear, QuantizedLinear):
        return quantized.project(sources, linear.projection(post_norm_eps), out)
    # tuple.__new__ as in norm_concat_linear.
    return project(sources, tuple.__new__(Projection, (*weight_and_bias(linear), None, post_norm_eps)), out)


def product_with_columns(linear: Any, begin: int, end: int) -> Callable[..., Tensor] | None:
    """The product of sources with these columns of a linear layer's weight, which are read where they are; None where
    they share scales with other columns, the layer has a bias, or PyTorch has to see the call."""
    if isinstance(linear, QuantizedLinear):
        codes, bias, *_ = linear.projection()
        columns = columns_of(codes, begin, end) if bias is None and is_plain(*codes.tensors) else None
        if columns is None:
            return None
        return partial(quantized.project, projection=quantized.QuantizedProjection(columns, None, None, 0.0))
    weight, bias = weight_and_bias(linear)
    if bias is not None or not is_plain(weight):
        return None
    return partial(project, projection=Projection(weight[:, begin:end], None, None, 0.0))


def weight_and_bias(linear: Any) -> tuple[Any, Any]:
    """Those of a dense linear layer as they are now, like `parameter_of`."""
    try:
        parameters = linear._parameters
        weight, bias = parameters["weight"], parameters["bias"]
    except KeyError:
        checks.check_unwrapped("norm_concat_linear", "weight", linear)
        return parameter_of(linear), parameter_of(linear, "bias")
    # Another thread may have packed the layer since the call found it dense.
    if weight is None and (packed := getattr(linear, "packed", None)) is not None:
        weight = linear.dense(packed)
    return weight, bias


def unit_norm(width: int, eps: float, norm_offset: float, **factory: Any) -> nn.RMSNorm:
    """A norm whose gain, norm_offset + weight, is 1."""
    norm = nn.RMSNorm(width, eps, **factory).requires_grad_(False)
    norm.weight.fill_(1 - norm_offset)
    return norm


class Eagle3Projection(LoadsProjections):
    """The `fc` block of an EAGLE-3 drafter: y = fc(fc_norm(input_norm(cat of K captured layers))).

    Args:
        config: `Eagle3Config`; chunk_norm and concat_norm say which norms there are, input_norm first if both are.
        dtype, device: of the parameters.

    state_dict: fc.weight [D, K*H], fc.bias [D] (config.bias), fc_norm.{k}.weight [H] (chunk_norm), input_norm.weight
    [K*H] (concat_norm). Parameters do not require grad: the layer is inference only.

    Source: SGLang 0.5.23 and vLLM 0.33 `llama_eagle3`.
    """

    def __init__(
        self, config: Eagle3Config, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        op = "Eagle3Projection"
        checks.check_type(op, "config", config, Eagle3Config, "an Eagle3Config: Eagle3Config.from_hf makes one")
        checks.check_factory(op, dtype, device)
        if not config.projection:
            raise checks.error(
                ValueError,
                op,
                "config.projection is False",
                "True",
                "a drafter without aux states has no fc",
            )
        self.config = config
        width = config.num_chunks * config.target_hidden_size
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.fc: PackableLinear | QuantizedLinear = self._dense_fc(**factory)
        of_norm = config.eps, config.norm_offset
        norms = [
            unit_norm(config.target_hidden_size, *of_norm, **factory)
            for _ in range(config.num_chunks if config.chunk_norm else 0)
        ]
        self.register_module("fc_norm", nn.ModuleList(norms) if config.chunk_norm else None)
        self.register_module("input_norm", unit_norm(width, *of_norm, **factory) if config.concat_norm else None)

    def _dense_fc(self, **factory: Any) -> PackableLinear:
        config = self.config
        width = config.num_chunks * config.target_hidden_size
        return PackableLinear(width, config.hidden_size, bias=config.bias, **factory).requires_grad_(False)

    def load_checkpoint(self, weights: str | os.PathLike | Mapping[str, Tensor]) -> Eagle3Projection:
        """Copy fc and the norms from a drafter's checkpoint: a safetensors file or folder, or tensors by name.

        Names may start with `model.`; aux_norm_low|mid|high are fc_norm.0|1|2 (the legacy name). Weights of the rest of
        the drafter (layers, midlayer, norm, lm_head, embed_tokens, d2t, t2d) are ignored.

        A quantized fc stays codes and scales (`QuantizedWeight`); integers in groups (compressed-tensors, GPTQ, AWQ)
        are dequantized to bf16, and the log says so.

        Raises ValueError that names the weight, before anything is copied: a missing one, a norm that the config does
        not have, a shape that does not fit, codes without their scale. FileNotFoundError where the path is missing.
        """
        from . import checkpoint  # an import of 6 ms, which only loading needs

        state, weight = checkpoint.eagle3_projection(weights, self)
        load_projections("Eagle3Projection.load_checkpoint", self, state, {"fc": (weight, self._dense_fc)})
        return self

    def quantize(self, format: str) -> Eagle3Projection:
        """Round fc.weight to a format of `QuantizedWeight`: each call then reads 1/4 to 3/4 of the bytes.

        "bf16_12bit" rounds nothing: it stores bf16 in three quarters of the bytes, and the result has the same bits. Of
        K = 3, H = D = 4096 a CPU with AMX is 1.26x as fast at one row, 1.31x at 8 and 1.25x at 16, one with
        AVX-512-BF16 1.23x, 1.16x and 1.05x (docs/results.md); a GPU dequantizes it in every call.

        The dense weight is dropped; state_dict has the codes as fc.weight, and fc.weight_scale. The error is logged.
        """
        self.fc = quantize_linear("Eagle3Projection.quantize", self.fc, format)
        return self

    def prepack(self) -> Eagle3Projection:
        """Put fc.weight into oneDNN's blocked layout, for CPUs without AMX; every T then runs norm_concat + oneDNN.

        The dense weight is dropped (`fc.weight` is None, state_dict and load_state_dict work as before). Call it once
        after loading, if T is mostly above the rows for which the fused kernel is faster (`explain` says): with
        AVX-512-BF16 it gains a little at T = 1 and from some 200 rows on, and loses as much at 64; with AMX the fused
        kernel on the dense weight is faster up to 512. Raises RuntimeError under EAGLE_KERNELS_BATCH_INVARIANT=1, where
        loading or copying a packed layer makes it dense.
        """
        op = "Eagle3Projection.prepack"
        if plan.SETTINGS.batch_invariant:
            raise checks.error(RuntimeError, op, "EAGLE_KERNELS_BATCH_INVARIANT is 1", "0", ORDER_BY_ROWS)
        if isinstance(self.fc, QuantizedLinear):
            got = f"fc.weight is {self.fc.format}"
            raise checks.error(TypeError, op, got, "bf16 or fp16 on cpu", "oneDNN keeps no codes in its layout")
        if "weight" not in self.fc._parameters:
            because = "a parametrization would have to compute the packed one"
            raise checks.error(RuntimeError, op, "fc.weight is parametrized", "a plain parameter", because)
        weight = self.fc.weight
        if weight is not None and (reason := unsupported_reason(weight)) is not None:
            got = f"fc.weight is {weight.dtype} on {weight.device}"
            kind = RuntimeError if weight.device.type != "cpu" else TypeError
            raise checks.error(kind, op, got, "bf16 or fp16 on cpu", reason)
        self.fc.pack()
        return self

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        *,
        residuals: Sequence[Tensor | None] | Tensor | None = None,
        indices: Sequence[Tensor | None] | Tensor | None = None,
        sum_squares: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[N, D] in the chunks' dtype, bf16, fp16 or fp32, from K tensors [T, H] or one packed [T, K*H].

        Args: those of `norm_concat_linear`.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        config = self.config
        modules: dict[str, Any] = self._modules
        K, eps, norm_offset = config.num_chunks, config.eps, config.norm_offset
        fc_norm, input_norm = modules["fc_norm"], modules["input_norm"]
        norm, gains = "none", []
        if fc_norm is not None:
            norm, gains = "chunk", weights_of(fc_norm._modules.values())
        elif input_norm is not None:
            norm, gains = "concat", [gain_of(input_norm)]
        if norm == "chunk" and input_norm is not None:
            # Two norms in a row: the first is written out, as the engines do, and the second one reads it.
            gain = [gain_of(input_norm)]
            first = (chunks, K, "concat", gain, [eps], norm_offset, residuals, indices, sum_squares)
            read = Sources.of_module("norm_concat", *first)
            normed = concatenate(read)  # which checks the sources
            if out is not None:
                _check_out(read, out, config.hidden_size)
            chunks, residuals, indices, sum_squares = normed, None, None, None
        statistics = None if norm == "none" else sum_squares
        fc = modules["fc"]
        sources = Sources.of_module(
            "norm_concat_linear", chunks, K, norm, gains, [eps], norm_offset, residuals, indices, statistics
        )
        if (packed := getattr(fc, "packed_weight", None)) is None:
            return project_onto(fc, sources, eps, out)
        normed = concatenate(sources)  # which checks the sources
        fc.check(sources, packed)
        projected = fc.product(normed, packed)
        if out is None:
            return projected
        _check_out(sources, out, fc.out_features, ("bias", fc.bias))
        return copied(projected, out)


def _check_out(sources: Sources, out: Tensor, columns: int, *more: tuple[str, Tensor | None]) -> None:
    """Raise where `out` does not fit or shares memory with what was read already: the op that writes it cannot tell."""
    sources.check_out("norm_concat_linear", out, columns, "D")
    if is_plain(sources.chunks[0], *sources.operands, *(tensor for _, tensor in more), out):  # a trace has no addresses
        sources.check_memory("norm_concat_linear", out, *more)


def _check_group(op: str, group: Any) -> None:
    # A rank that is not in a group gets an int for it from torch.distributed.new_group.
    if group is not None and not (hasattr(group, "rank") and hasattr(group, "size")):
        raise checks.error(TypeError, op, f"process_group is a {type(group).__name__}", "a ProcessGroup of this rank")


class VocabParallelEmbedding(nn.Module):
    """An embedding table split over the ranks of a group by `VocabShard`; each rank gathers its rows, then all-reduce.

    y = all_reduce(vocab_parallel_embedding(ids, weight, shard, scale=scale))

    Args:
        num_embeddings, embedding_dim: V and H.
        process_group: the ranks that share the table; None keeps the whole table here, without communication.
        org_num_embeddings, padding_size: as in `VocabShard.build`.
        scale: as in `vocab_parallel_embedding`: a float (SGLang's Gemma) or a 0-d tensor (Hugging Face, vLLM).
        dtype, device: of the table.

    state_dict: weight [shard.rows, H]; loading also takes the full [V, H] table and keeps this rank's rows, unless a
    shard has V rows itself (more padding than ids).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        scale: float | Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        op = "VocabParallelEmbedding"
        embedding_dim = checks.check_int(op, "embedding_dim", embedding_dim, at_least=1)
        checks.check_width(op, 1, embedding_dim)
        checks.check_factory(op, dtype, device)
        _check_group(op, process_group)
        shard = VocabShard.build(
            num_embeddings,
            tp_rank=0 if process_group is None else process_group.rank(),
            tp_size=1 if process_group is None else process_group.size(),
            org_num_embeddings=org_num_embeddings,
            padding_size=padding_size,
        )
        self._share(torch.zeros(shard.rows, embedding_dim, dtype=dtype, device=device), shard, scale, process_group)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        shard: VocabShard,
        *,
        scale: float | Tensor | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> VocabParallelEmbedding:
        """Share a table that exists, for example the target's, without a copy.

        Args:
            weight: this rank's rows, [shard.rows, H]; the zero rows at their end may be missing. bf16, fp16 or fp32.
            shard: which ids they are.
            scale, process_group: as above.

        Raises TypeError / ValueError for a table that does not fit the shard, or that is quantized.
        """
        op = "VocabParallelEmbedding.from_weight"
        check_table(op, weight, shard)
        if wrong := checks.codes_error(op, "weight", weight):
            raise wrong
        _check_group(op, process_group)
        embedding = cls.__new__(cls)
        nn.Module.__init__(embedding)
        embedding._share(weight, shard, scale, process_group)
        return embedding

    def _share(
        self, weight: Tensor, shard: VocabShard, scale: float | Tensor | None, process_group: dist.ProcessGroup | None
    ) -> None:
        self.shard = shard
        self.process_group = process_group
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        op = "VocabParallelEmbedding"
        if isinstance(scale, Tensor):
            check_scale(op, scale)
            if scale.is_meta:
                raise checks.error(ValueError, op, "scale is on meta", "a tensor with a value", "no file stores it")
            self._scale_number = scale.item()
        elif scale is not None:
            scale = checks.check_number(op, "scale", scale, "a number or a 0-d tensor")
        self.scale = None if isinstance(scale, Tensor) else scale
        self.scale_tensor: Tensor | None
        of_tensor = scale.to(weight.device) if isinstance(scale, Tensor) else None
        self.register_buffer("scale_tensor", of_tensor, persistent=False)

    def forward(self, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[*ids.shape, H] in the table's dtype, the rows of all ranks; ids outside the vocabulary give zero rows.

        Args:
            ids: int32 / int64, of any shape.
            out: [*ids.shape, H] in the table's dtype.

        Raises TypeError / ValueError for arguments that do not fit; nothing is written to `out`.
        """
        rows = vocab_parallel_embedding(ids, self.weight, self.shard, scale=self.own_scale, out=out)
        return self.reduce(rows)

    @property
    def own_scale(self) -> float | Tensor | None:
        """What multiplies the rows: a float, a 0-d tensor on the table's device, or None."""
        return self.scale if self.scale_tensor is None else self.scale_tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """With the scale's value, which `to_empty` would lose and no state_dict restores."""
        before = self._buffers["scale_tensor"]
        if type(before) is Tensor and not before.is_meta:
            self._scale_number = before.item()
        super()._apply(fn, recurse)
        after = self._buffers["scale_tensor"]
        if after is not None and after is not before and not after.is_meta:
            after.fill_(self._scale_number)
        return self

    def reduce(self, rows: Tensor) -> Tensor:
        """Sum this rank's rows with those of the others, in place: exact but for a -0 that becomes +0, since one
        rank has the row and the others have zeros."""
        if self.process_group is not None and self.shard.tp_size > 1:
            # gloo silently leaves a strided tensor unreduced, and NCCL refuses it.
            dense = rows.contiguous()
            dist.all_reduce(dense, group=self.process_group)
            if dense is not rows:
                rows.copy_(dense)
        return rows

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        name = prefix + "weight"
        loaded = state_dict.get(name)
        if wrong := checks.codes_error(LOAD, name, loaded):
            args[-1].append(str(wrong))
            return
        # A table that was shared without padding has V rows itself, and takes the full table as it is.
        if (
            isinstance(loaded, Tensor)
            and loaded.dim() == 2
            and loaded.shape[0] == self.shard.num_embeddings != self.shard.rows
            and loaded.shape != self.weight.shape
        ):
            state_dict = state_dict | {name: shard_vocab_weight(loaded, self.shard)}
        super()._load_from_state_dict(state_dict, prefix, *args)
