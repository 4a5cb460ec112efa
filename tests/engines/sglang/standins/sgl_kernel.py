"""Plain torch in place of SGLang's CPU kernels, which PyPI does not have: only what EAGLE decoding on a CPU calls.

A test tool, never installed. Each function follows the contract of the Triton kernel next to its call site in SGLang
0.5.23 (`sglang/kernels/ops/speculative`, `layers/attention/intel_amx_backend.py`); any other name raises when called.
"""

import ctypes

import torch
from torch import Tensor


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, logit_cap: float, sinks: Tensor | None
) -> Tensor:
    """[Tq, heads, d] from the keys and values of one request; visible is [Tq, Tk]; sinks [heads] is one more score."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : k.shape[0]], v)


def _in_window(q_positions: Tensor, k_positions: Tensor, window: int, is_causal: bool = True) -> Tensor:
    """A window above 0 includes the query's own position."""
    if not is_causal:
        return torch.ones(q_positions.shape[0], k_positions.shape[0], dtype=torch.bool)
    distance = q_positions.unsqueeze(1) - k_positions.unsqueeze(0)
    return (distance >= 0) & (distance < window) if window > 0 else distance >= 0


def _extend_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    assert not is_cross_attention
    for b, (length, new, start) in enumerate(
        zip(seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True)
    ):
        slots = req_to_token[req_pool_indices[b], :length].long()
        positions = torch.arange(length)
        visible = _in_window(positions[length - new :], positions, window, is_causal)
        if tree_mask is not None:
            # QLEN_ONLY: the mask says which new tokens each one descends from; the prefix is visible to all.
            visible[:, length - new :] = tree_mask.view(-1, new, new)[b]
        rows = slice(start, start + new)
        # Latent attention without a prefix gets keys and values of all heads, but the cache has one latent.
        of_heads = k is not None and new == length
        keys, values = (k[rows], v[rows]) if of_heads else (key_buffer[slots], value_buffer[slots])
        attended = _attend(q[rows], keys, values, visible, scale, logit_cap, sinks)
        out[rows] = attended.to(out.dtype)


def _decode_attention(
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    assert not is_cross_attention
    if k is not None:
        key_buffer[cache_loc] = k.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[cache_loc] = v.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for b, length in enumerate(seq_lens.tolist()):
        slots = req_to_token[req_pool_indices[b], :length].long()
        positions = torch.arange(length)
        visible = _in_window(positions[-1:], positions, window)
        rows = slice(b, b + 1)
        attended = _attend(q[rows], key_buffer[slots], value_buffer[slots], visible, scale, logit_cap, sinks)
        out[rows] = attended.to(out.dtype)


def _dequantized_gptq(codes: Tensor, zeros: Tensor, scales: Tensor, algorithm: int) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's packs GPTQ's and AWQ's 4-bit codes anew; here the weight, [D, W] in fp32, takes the place of GPTQ's."""
    assert algorithm == 1, "GPTQ"
    shifts = torch.arange(0, 32, 4)
    numbers = (codes.unsqueeze(1) >> shifts.view(-1, 1) & 15).flatten(0, 1)
    zeros_of_groups = (zeros.unsqueeze(-1) >> shifts & 15).flatten(1) + 1
    columns = codes.shape[0] * 8 // scales.shape[0]
    weight = (numbers - zeros_of_groups.repeat_interleave(columns, 0)) * scales.float().repeat_interleave(columns, 0)
    return weight.t(), zeros, scales


def _multiply_gptq(x: Tensor, weight: Tensor, zeros: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)


torch.ops.sgl_kernel.convert_weight_packed_scale_zp = _dequantized_gptq
torch.ops.sgl_kernel.int4_scaled_mm_cpu = _multiply_gptq

# A drafter with latent attention synchronizes with a GPU after it got the target's embedding.
torch.cuda.synchronize = lambda device=None: None

# The modules of Qwen 3.5 and 4 look these up at import.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))

# Under torch.compile each is a graph break, since it reads the values of its arguments.
torch.ops.sgl_kernel.extend_attention_cpu = torch.compiler.disable(_extend_attention)
torch.ops.sgl_kernel.decode_attention_cpu = torch.compiler.disable(_decode_attention)

# SGLang's CPU graph runner registers fake kernels for 55 ops, used or not: each has to be defined.
_fragment = torch.library.Library("sgl_kernel", "FRAGMENT")
_register_fake = torch.library.register_fake


def _define_and_register_fake(name: str, *args: object, **kwargs: object) -> object:
    namespace, _, op = name.partition("::")
    if namespace == "sgl_kernel":
        function = vars(torch.ops.sgl_kernel).pop(op, None)
        _fragment.define(f"{op}() -> ()")
        if function is not None:
            setattr(torch.ops.sgl_kernel, op, function)
    return _register_fake(name, *args, **kwargs)


torch.library.register_fake = _define_and_register_fake


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """A row of slots per candidate: the prefix, then the candidate's own draft slots."""
    expanded = req_to_token[req_pool_indices].repeat_interleave(topk, 0)
    for b, length in enumerate(seq_lens.tolist()):
        for candidate in range(topk):
            begin = length + candidate * num_steps
            drafted = req_to_token[req_pool_indices[b], begin : begin + num_steps]
            expanded[b * topk + candidate, length : length + num_steps] = drafted
    return expanded


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    rows = out_cache_loc.view(-1, topk * num_steps)
    for b, length in enumerate(seq_lens.tolist()):
        rows[b] = req_to_token[req_pool_indices[b], length : length + topk * num_steps]


def _spans(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, slice, slice]]:
    """(request, its slots, their place in the flat list) per request."""
    spans, offset = [], 0
    for request, begin, stop in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        spans.append((request, slice(begin, stop), slice(offset, offset + stop - begin)))
        offset += stop - begin
    return spans


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    for request, slots, flat in _spans(req_pool_indices, start, end):
        out_cache_loc[flat] = req_to_token[request, slots].to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    for request, slots, flat in _spans(req_pool_indices, start, end):
        req_to_token[request, slots] = out_cache_loc[flat].to(req_to_token.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    rows = torch.arange(accept_lens.numel())
    bonus_tokens.copy_(accept_tokens.view(-1)[rows * stride + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    accepted = accept_index.view(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: Tensor, start_loc: Tensor, seq_lens: Tensor, topk_index: Tensor, select_index: Tensor | None
) -> None:
    for b, (start, length) in enumerate(zip(start_loc.tolist(), seq_lens.tolist(), strict=True)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            last = start + length - 1 if select_index is None else int(select_index[b])
            input_ids[last] = topk_index.view(-1)[b]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move rows of every layer's cache; strides are the bytes of a row."""
    for base, row in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * row, row) for source in src_loc.tolist()]
        for target, data in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(base + target * row, data, row)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    tree_mask_mode: int,
) -> None:
    assert int(tree_mask_mode) == 1, "QLEN_ONLY"
    masks = tree_mask.view(-1, num_tokens, num_tokens)
    positions = positions.view(-1, num_tokens)
    for b, length in enumerate(seq_lens.tolist()):
        selected = selected_index[b].tolist()

        def parent(token: int, selected: list[int] = selected, b: int = b) -> int | None:
            """The parent of node `token` in the tree; node 0 is the root. None where it was not chosen, as can happen
            among equal scores, below a candidate of probability 0. SGLang's kernel ignores such a token."""
            group = selected[token - 1] // topk
            if group == 0:
                return 0
            above = int(parent_list[b, group])
            return 1 + selected.index(above) if above in selected else None

        masks[b] = False
        for token in range(num_tokens):
            retrieve_index[b, token] = b * num_tokens + token
            path = [token]
            while path[-1] != 0 and (above := parent(path[-1])) is not None:
                path.append(above)
            masks[b, token, path] = True
            positions[b, token] = length + len(path) - 1
        for token in range(num_tokens - 1, 0, -1):
            if (above := parent(token)) is None:
                continue
            retrieve_next_sibling[b, token] = retrieve_next_token[b, above]
            retrieve_next_token[b, above] = token


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    target_predict = target_predict.view(-1)
    for b in range(candidates.shape[0]):
        last, node, accepted = int(retrive_index[b, 0]), 0, 0
        accept_index[b, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            wanted, node = int(target_predict[last]), int(retrive_next_token[b, node])
            while node != -1 and int(candidates[b, node]) != wanted:
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = wanted
            accepted += 1
            last = int(retrive_index[b, node])
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target_predict[last]
