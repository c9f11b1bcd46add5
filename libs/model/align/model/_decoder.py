"""The decoder: one class for Mistral, Llama, SmolLM2, Qwen2 and Qwen3, with the parameter names of their HF checkpoints."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from align.model import _fused
from align.model._attention import Context, attend, context_for
from align.model._cache import KVCache
from align.model._config import ModelConfig
from align.model._errors import ModelError
from align.model._norm import rms_norm
from align.model._rope import angles, inverse_frequencies, rotate


class Linear(nn.Linear):
    """nn.Linear whose memory stays untouched until the weights come: a large model costs nothing to construct."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding, likewise."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last dimension (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., size)
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.layer, self.head_dim, self.window = layer, dim, config.window(layer)
        self.q_proj = Linear(size, config.num_attention_heads * dim, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(size, config.num_key_value_heads * dim, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(size, config.num_key_value_heads * dim, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(config.num_attention_heads * dim, size, bias=config.output_bias, dtype=dtype)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Context) -> Tensor:  # (B, T, D)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, context, self.layer, self.window)
        projected: Tensor = self.o_proj(out)
        return projected


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_has_bias, dtype=dtype)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_has_bias, dtype=dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_has_bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and around a residual. The unit of FSDP, compilation and checkpointing."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, dtype)
        self.mlp = MLP(config, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, context: Context, fused: Any = None) -> Any:  # (B, T, D)
        if fused is not None:  # here, and not as a module of its own, so that what wraps a block (FSDP, compilation) wraps both ways
            return _fused.block(self, hidden, cos, sin, context, fused)
        mixed: Tensor = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, context)
        return mixed.add(self.mlp(self.post_attention_layernorm(mixed)))


class Trunk(nn.Module):
    """Everything below the head; HF's checkpoints prefix its parameters with `model.`"""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class TiedHead(nn.Module):
    """Logits by the embedding's own weight, which stays registered, counted and saved once."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is not registered a second time

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, hidden: Tensor) -> Tensor:  # (..., D) -> (..., V)
        return F.linear(hidden, self.weight)


class Decoder(nn.Module):
    """A dense causal language model. `state_dict()` has the names of an HF checkpoint; a tied head has no entry.

    The weights are uninitialised memory until `init`, `load` or `load_state_dict` fill them.
    """

    # Whose activations the backward computes again: no block's, every second block's, every block's. Same bits, less memory, more time.
    checkpointing: Literal["none", "selective", "full"] = "none"
    # Whether a forward without a cache runs align.kernels where these are kernels, on a GPU; equal to the plain ones to rounding.
    fused: bool = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = TiedHead(self.model.embed_tokens) if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        # Not a buffer: .to(bfloat16) must not round it.
        self._frequencies, self._rope_factor = inverse_frequencies(config)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the head, (V, D); the embedding's when they are tied."""
        return self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
        forward_impl: str | None = None,
        paths: Tensor | None = None,
    ) -> Tensor:
        """Returns the hidden states after the last norm, (B, T, D); `lm_head` makes logits (..., V) of them.

        Args:
            input_ids: (B, T) int64. Without cu_seqlens each row is one sequence, padded on the right: a position never sees a later one,
                so what stands behind a sequence's end does not matter.
            position_ids: (B, T) or (1, T) int64; None: 0 .. T - 1, counted per document where cu_seqlens is given, after `cache.length`
                with a cache. With a cache they also say where each row writes, and a query at position p sees 0 .. p of its row.
            cu_seqlens: (S + 1,) int32, ends of the documents over the flattened B * T, from 0 to B * T; equal neighbours are empty
                documents.
            max_seqlen: length of the longest document, at most.
            cache: from `new_cache`; this forward's keys and values are written to it.
            forward_impl: name of the attention implementation; None picks (`pick_forward_impl`).
            paths: (P, L) int64, P sequences as places in the flattened B * T, each with -1 after its end. A token that several of them
                begin with, as answers do with their prompt, is then computed once. With position_ids, for `cpu_per_document`.

        Raises:
            ModelError: a sequence longer than `config.max_length`, or arguments that do not fit each other.
        """
        if input_ids.dim() != 2:
            raise ModelError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (B, T)")
        context, positions = context_for(
            forward_impl, input_ids.shape, position_ids=position_ids, cu_seqlens=cu_seqlens, cache=cache, max_seqlen=max_seqlen,
            like=self.model.norm.weight, paths=paths,
        )  # fmt: skip
        self._check_length(input_ids.shape[1], context, max_seqlen)
        hidden: Tensor = self.model.embed_tokens(input_ids)
        if cache is None and (context.impl == "invariant" or _fused.wanted(self, hidden)):
            return _fused.hidden_states(self, hidden, positions, context)
        cos, sin = self._angles(positions, input_ids.shape[1], hidden)
        for number, layer in enumerate(self.model.layers):
            if self._recomputes(number):
                # Nothing in a block is random, so no generator's state need be kept.
                hidden = checkpoint(layer, hidden, cos, sin, context, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, cos, sin, context)
        normed: Tensor = self.model.norm(hidden)
        return normed

    def rope_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions 0 .. length - 1, each (length, Dh / 2) fp32 on the model's device, scaling included."""
        self._frequencies = self._frequencies.to(self.output_weight.device)
        positions = torch.arange(length, device=self._frequencies.device, dtype=torch.float32)
        angle = positions[:, None] * self._frequencies
        return angle.cos() * self._rope_factor, angle.sin() * self._rope_factor

    @property
    def blocks(self) -> list[Block]:
        """The layers: what is sharded, compiled and recomputed one at a time."""
        return list(self.model.layers)

    def _recomputes(self, number: int) -> bool:
        """Whether the backward computes the block of this number again. "selective" keeps the last block, whose backward comes first."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return False
        return self.checkpointing == "full" or (len(self.model.layers) - 1 - number) % 2 == 1

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for `batch` rows of up to `max_length` positions, in the dtype and on the device of the weights."""
        config, weight = self.config, self.model.embed_tokens.weight
        if max_length > config.max_length:
            raise ModelError(f"max_length {max_length} is above the model's {config.max_length} (max_position_embeddings)")
        shape = (config.num_hidden_layers, batch, max_length, config.num_key_value_heads, config.head_dim)
        k, v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        return KVCache(k, v)

    def _check_length(self, length: int, context: Context, max_seqlen: int | None) -> None:
        if context.cache is not None:
            return  # new_cache has checked
        if context.impl in ("varlen", "invariant"):
            length = context.longest if max_seqlen is None else 0  # the true lengths are on the device, max_seqlen is rounded up
        elif context.impl == "cpu_per_document":
            length = context.longest
            if max_seqlen is not None and length > max_seqlen:
                raise ModelError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {length} tokens")
        if length > self.config.max_length:
            raise ModelError(
                f"a sequence of {length} tokens is longer than the model's {self.config.max_length} (max_position_embeddings); "
                "truncate it or use rope_scaling"
            )

    def _angles(self, positions: Tensor | None, length: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The tables of `rotate`, once for all layers."""
        if self._frequencies.device != hidden.device:
            self._frequencies = self._frequencies.to(hidden.device)
        if positions is None:
            positions = torch.arange(length, device=hidden.device)[None]
        return angles(positions, self._frequencies, self._rope_factor, hidden.dtype)


def init(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A new model on the CPU: weights normal with `config.initializer_range`, biases 0, norms 1; a function of config and seed alone."""
    model = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * config.initializer_range)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return model
