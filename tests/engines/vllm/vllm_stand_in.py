"""The part of vLLM that the plugin touches, in plain torch: names, signatures and arithmetic of vLLM 0.32 and 0.33.

`modules()` defines everything anew, so that a test may change any of it; `bodies` hashes the functions here.
"""

import types
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_kernels.engines import gates

K, H, D = 3, 16, 24
MODELS = "vllm.model_executor.models"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(width))
        self.variance_epsilon, self.variance_size_override, self.has_weight = eps, None, True

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


class GemmaRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.variance_epsilon)


class UnquantizedLinearMethod:
    """On a CPU vLLM packs a weight after loading, here as its transpose, unless asked not to."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = F.linear
        if not getattr(layer, "_cpu_skip_gemm_dispatch", False):
            packed = layer.weight.data.t().contiguous()
            layer.cpu_linear = lambda x, weight, bias: F.linear(x, packed.t(), bias)
            layer.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)


class Fp8LinearMethod(UnquantizedLinearMethod): ...


class ReplicatedLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.input_size, self.output_size, self.params_dtype = inputs, outputs, torch.get_default_dtype()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = None
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "cpu_linear", F.linear)(x, self.weight, self.bias)


class Loaded(nn.Module):
    """A model that loads its weights from a checkpoint."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, names = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if (parameter := parameters.get(f"model.{name}")) is not None:
                parameter.data.copy_(tensor)
                names.add(name)
        return names


class Entry:
    """A lazy entry of the model registry."""

    def __init__(self, model_class: type[nn.Module]) -> None:
        self.model_class = model_class

    def inspect_model_cls(self) -> str:
        return f"info of {self.model_class.__name__}"

    def load_model_cls(self) -> type[nn.Module]:
        return self.model_class


def _eagle3() -> type[nn.Module]:
    class Eagle3LlamaForCausalLM(Loaded):
        """norm: "none", "chunk", "concat" or "both", in place of a whole config."""

        def __init__(self, *, vllm_config: types.SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            self.config = vllm_config.speculative_config.draft_model_config.hf_config
            norm = self.config.norm
            model = self.model = nn.Module()
            model.use_aux_hidden_state, model.num_aux_hidden_states = True, K
            model.fc = ReplicatedLinear(K * H, D)
            model.norm_before_fc = norm in ("concat", "both")
            model.input_norm = RMSNorm(K * H) if model.norm_before_fc else None
            chunk = norm in ("chunk", "both")
            model.fc_norm = nn.ModuleList(RMSNorm(H, 10.0 ** (k - 6)) for k in range(K)) if chunk else None

        def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
            model = self.model
            if not model.use_aux_hidden_state:
                return hidden_states
            if model.norm_before_fc:
                hidden_states = model.input_norm(hidden_states)
            if model.fc_norm is not None:
                chunks = hidden_states.chunk(K, -1)
                hidden_states = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], -1)
            return model.fc(hidden_states)

    return Eagle3LlamaForCausalLM


def _laguna() -> type[nn.Module]:
    class DFlashLagunaForCausalLM(Loaded):
        def __init__(self, *, vllm_config: types.SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.fc = ReplicatedLinear(K * H, D)
            self.model.aux_hidden_norms = nn.ModuleList(RMSNorm(H, 10.0 ** (k - 6)) for k in range(K))
            self.model.hidden_norm = RMSNorm(D, 1e-2)

        def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
            model, chunks = self.model, hidden_states.chunk(K, -1)
            normed = [norm(chunk) for norm, chunk in zip(model.aux_hidden_norms, chunks, strict=True)]
            return model.hidden_norm(model.fc(torch.cat(normed, -1)))

    return DFlashLagunaForCausalLM


class Cache:
    """An attention layer with its backend and a cache, whose layout is neither K's nor V's. `impl` writes both."""

    def __init__(self) -> None:
        self.impl, self.kv_cache = self, torch.zeros(2, 4, 8, 2)

    def do_kv_cache_update(self, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        kv_cache[:, :, slots] = torch.stack([key, value]).permute(0, 3, 1, 2)


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """vLLM's on a GPU: each of L blocks of x has its own row of a weight [L, d]."""
    gains = weight if weight.dim() == 1 else weight.view(len(weight), *[1] * (x.dim() - 2), -1)
    out.copy_(F.rms_norm(x, x.shape[-1:], None, eps) * gains)


custom_ops = types.SimpleNamespace(rms_norm=_rms_norm)


def _dflash() -> tuple[type[nn.Module], ...]:
    class DFlashQwen3Model(nn.Module):
        """Two layers with two heads of K and V of four columns, and a cache of eight slots for each."""

        def __init__(self) -> None:
            super().__init__()
            self.use_aux_hidden_state = True
            self.fc = ReplicatedLinear(K * H, D)
            self.hidden_norm = RMSNorm(D)
            self._num_attn_layers, self._num_kv_heads, self._head_dim, self._kv_size = 2, 2, 4, 8
            self._rms_norm_eps, self._rope_head_size, self._rope_is_neox = 1e-2, 4, True
            self._rope_cos_sin_cache = torch.randn(32, 4)
            self._attn_layers = [Cache() for _ in range(2)]
            self.layers = [types.SimpleNamespace(self_attn=types.SimpleNamespace(v_scale=None))] * 2
            self._build_context_kv_buffers([], True)

        def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
            self._hidden_norm_weight = self.hidden_norm.weight.data
            self._fused_kv_weight = torch.randn(2 * 2 * 2 * 4, D)
            self._fused_kv_bias = torch.randn(2 * 2 * 2 * 4) if has_bias else None
            self._k_norm_weights = torch.randn(2, 4)

        def _project_context_kv(
            self, context_states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
        ) -> tuple[Tensor, Tensor]:
            normed = F.rms_norm(context_states, (D,), self._hidden_norm_weight, self._rms_norm_eps)
            flat = F.linear(normed, self._fused_kv_weight, self._fused_kv_bias)
            all_kv = flat.view(num_ctx, num_layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4).contiguous()
            return all_kv[0], all_kv[1]

        def _normalize_context_k(self, all_k: Tensor) -> Tensor:
            normed = torch.empty_like(all_k)
            custom_ops.rms_norm(normed, all_k, self._k_norm_weights, self._rms_norm_eps)
            return normed

        def precompute_and_store_context_kv(
            self,
            context_states: Tensor,
            context_positions: Tensor,
            context_slot_mapping: Tensor | list[Tensor | None] | None = None,
        ) -> None:
            N, L, n, d = context_states.shape[0], self._num_attn_layers, self._num_kv_heads, self._head_dim
            all_k, all_v = self._project_context_kv(context_states, N, L, n, d)
            cos, sin = self._rope_cos_sin_cache.to(all_k.dtype)[context_positions][:, None].chunk(2, -1)
            first, second = self._normalize_context_k(all_k).chunk(2, -1)
            all_k = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
            if context_slot_mapping is None:
                return
            v_scale = self.layers[0].self_attn.v_scale
            if v_scale is not None:
                all_v.mul_(v_scale)
            for i, attn in enumerate(self._attn_layers):
                per_layer = isinstance(context_slot_mapping, list)
                slots = context_slot_mapping[i] if per_layer else context_slot_mapping
                if slots is not None:
                    attn.impl.do_kv_cache_update(attn, all_k[i], all_v[i], attn.kv_cache, slots)

    class DFlashQwen3ForCausalLM(Loaded):
        def __init__(self, *, vllm_config: types.SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            self.model = DFlashQwen3Model()

        def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
            return self.model.fc(hidden_states)

    return DFlashQwen3ForCausalLM, DFlashQwen3Model


def _mtp(name: str, layer_name: str, norm: type[nn.Module]) -> tuple[type[nn.Module], type[nn.Module]]:
    class MultiTokenPredictorLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enorm, self.hnorm = norm(H, 1e-6), norm(H, 1e-2)
            self.eh_proj = nn.Linear(2 * H, H, bias=False)

        def forward(
            self,
            input_ids: Tensor | None,
            positions: Tensor,
            previous_hidden_states: Tensor,
            inputs_embeds: Tensor,
            spec_step_index: int = 0,
        ) -> Tensor:
            embeds = torch.where(positions.unsqueeze(-1) == 0, 0, inputs_embeds)
            return self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(previous_hidden_states)], -1))

    class MTP(Loaded):
        def __init__(self, *, vllm_config: types.SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleDict({"61": MultiTokenPredictorLayer()})

    MTP.__name__ = name
    MultiTokenPredictorLayer.__name__ = layer_name
    return MTP, MultiTokenPredictorLayer


class QKVParallelLinear(ReplicatedLinear):
    """The rows of this rank's heads, half of all; forward also returns the bias that it did not add."""

    return_bias = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.output_size, self.output_size_per_partition = 2 * outputs, outputs

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


def _layer0() -> tuple[type[nn.Module], ...]:
    class Qwen3Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = QKVParallelLinear(2 * H, 3 * H)

        def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([H, H, H], dim=-1)
            return torch.sigmoid(q * k) * v

    class Qwen3Eagle3DecoderLayer(nn.Module):
        def __init__(self, norm_before_residual: bool) -> None:
            super().__init__()
            self.self_attn = Qwen3Attention()
            self.input_layernorm, self.hidden_norm = RMSNorm(H), RMSNorm(H, 1e-2)
            norms = self._norm_before_residual, self._norm_after_residual
            self._residual_norm = norms[0] if norm_before_residual else norms[1]

        def _norm_before_residual(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            hidden_states = self.hidden_norm(hidden_states)
            residual = hidden_states
            return hidden_states, residual

        def _norm_after_residual(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            residual = hidden_states
            hidden_states = self.hidden_norm(hidden_states)
            return hidden_states, residual

        def forward(
            self, positions: Tensor, embeds: Tensor, hidden_states: Tensor, residual: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            embeds = self.input_layernorm(embeds)
            hidden_states, residual = self._residual_norm(hidden_states=hidden_states)
            hidden_states = torch.cat([embeds, hidden_states], dim=-1)
            return self.self_attn(positions=positions, hidden_states=hidden_states), residual

    class Eagle3Qwen3ForCausalLM(Loaded):
        def __init__(self, *, vllm_config: types.SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            self.config = vllm_config.speculative_config.draft_model_config.hf_config
            self.model = nn.Module()
            self.model.use_aux_hidden_state = False
            norm_before_residual = getattr(self.config, "norm_before_residual", False)
            self.model.layers = nn.ModuleList([Qwen3Eagle3DecoderLayer(norm_before_residual)])

        def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    return Eagle3Qwen3ForCausalLM, Qwen3Eagle3DecoderLayer, Qwen3Attention


def _speculators() -> tuple[type, type]:
    class EagleSpeculator:
        """What `propose` does with the target's hidden states. PCP is prefill context parallelism."""

        def __init__(self, model: nn.Module, rows: int) -> None:
            self.model, self.hidden_states, self.pcp_manager = model, torch.full((rows, D), float("nan")), None
            self.received: Tensor | None = None

        def propose(
            self,
            input_batch: types.SimpleNamespace,
            attn_metadata: object,
            slot_mappings: object,
            last_hidden_states: Tensor,
            aux_hidden_states: list[Tensor] | None,
            num_sampled: object = None,
            dummy_run: bool = False,
        ) -> tuple:
            self.received = last_hidden_states
            if aux_hidden_states:
                hidden_states = self.model.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
            else:
                hidden_states = last_hidden_states
            self.hidden_states[: input_batch.num_tokens_after_padding].copy_(hidden_states)
            return attn_metadata, slot_mappings, num_sampled, dummy_run

    class DFlashSpeculator(EagleSpeculator):
        staged = None

        def _store_hidden_states(
            self,
            num_tokens: int,
            last_hidden_states: Tensor,
            aux_hidden_states: list[Tensor] | None,
            num_graph_tokens: int = 0,
        ) -> None:
            self.staged = num_graph_tokens
            aux = torch.cat([h[:num_tokens] for h in aux_hidden_states], dim=-1)
            self.hidden_states[:num_tokens].copy_(self.model.combine_hidden_states(aux))

    return EagleSpeculator, DFlashSpeculator


def _compile_factors() -> tuple[dict[str, Callable[[], str]], Callable[[], dict[str, str]]]:
    """vLLM's environment variables, and the function that gives the key of its compile caches."""
    variables: dict[str, Callable[[], str]] = {}

    def compile_factors() -> dict[str, str]:
        return {name: value() for name, value in variables.items()}

    return variables, compile_factors


def modules() -> dict[str, dict[str, object]]:
    """Module name -> members; each class has the name of its module as `__module__`."""
    eagle, dflash = _speculators()
    qwen3, qwen3_layer, qwen3_attention = _layer0()
    homes = {
        f"{MODELS}.llama_eagle3": [_eagle3()],
        f"{MODELS}.laguna_dflash": [_laguna()],
        f"{MODELS}.qwen3_dflash": _dflash(),
        f"{MODELS}.deepseek_mtp": _mtp("DeepSeekMTP", "DeepSeekMultiTokenPredictorLayer", RMSNorm),
        f"{MODELS}.step3p5_mtp": _mtp("Step3p5MTP", "Step3p5AMultiTokenPredictorLayer", GemmaRMSNorm),
        f"{MODELS}.qwen3_eagle3": [qwen3, qwen3_layer],
        f"{MODELS}.qwen3": [qwen3_attention],
        f"{SPECULATORS}.eagle.speculator": [eagle],
        f"{SPECULATORS}.dflash.speculator": [dflash],
    }
    for home, classes in homes.items():
        for defined in classes:
            defined.__module__, defined.__qualname__ = home, defined.__name__
            for member in vars(defined).values():
                if isinstance(member, types.FunctionType):
                    member.__module__ = home
    names = ("LlamaForCausalLMEagle3", "DFlashLagunaForCausalLM", "DFlashDraftModel", "DeepSeekMTPModel", "Step3p5MTP")
    names += ("Eagle3Qwen3ForCausalLM",)
    models = [classes[0] for classes in homes.values()]
    architectures = {name: Entry(defined) for name, defined in zip(names, models, strict=False)}
    variables, compile_factors = _compile_factors()
    one_rank = types.SimpleNamespace(world_size=1)
    members = {home: {defined.__name__: defined for defined in classes} for home, classes in homes.items()}
    members[f"{MODELS}.qwen3_dflash"]["ops"] = custom_ops
    return members | {
        "vllm": {"__version__": "0.33.1"},
        "vllm.distributed": {"get_tp_group": lambda: one_rank},
        "vllm.envs": {
            "environment_variables": variables,
            "compile_factors": compile_factors,
            "VLLM_BATCH_INVARIANT": False,
        },
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: True)},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        MODELS: {},
        f"{MODELS}.registry": {"ModelRegistry": types.SimpleNamespace(models=architectures)},
    }


def bodies(defined: dict[str, dict[str, object]]) -> set[str]:
    """The hashes of all functions that stand in for vLLM's."""
    classes = [member for members in defined.values() for member in members.values() if isinstance(member, type)]
    functions = [member for one in classes for member in vars(one).values() if isinstance(member, types.FunctionType)]
    return {gates.body_hash(function) for function in functions}
