"""Llama and Mistral; the other decoders differ from it in their attention only.

T = packed tokens, D = hidden size, V = vocabulary
"""

from __future__ import annotations

import torch
from torch import nn

from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.models.config import ModelConfig
from rollout_engine.models.layers import (
    MLP,
    Attention,
    Embedding,
    Head,
    Heads,
    RMSNorm,
    Rope,
    RotaryEmbedding,
)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and a residual sum."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, delta: torch.Tensor | None, residual: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] each -> what this layer's MLP adds, and the sum of all before it.

        A layer's input is residual + delta; the sum is left to the next norm, which does both in one pass.
        """
        heads, residual = self.before_attention(delta, residual, rope, batch)
        return self.after_attention(self.self_attn.attend(heads, batch), residual, batch)

    def before_attention(
        self, delta: torch.Tensor | None, residual: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> tuple[Heads, torch.Tensor]:
        """What attention takes, and the layer's input [T, D]; `residual` may be overwritten with it."""
        if delta is None:
            x_TD = self.input_layernorm(residual)
        else:
            x_TD, residual = self.input_layernorm.add(delta, residual)
        return self.self_attn.heads(x_TD, rope, batch), residual

    def after_attention(
        self, attended: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, N, H], [T, D] -> what the MLP adds, and the sum before it, [T, D] each."""
        projected = self.self_attn.project(attended, batch)
        x_TD, residual = self.post_attention_layernorm.add(projected, residual)
        return self.mlp(x_TD, batch), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm: the `model.` part of the Hugging Face names."""

    def __init__(self, config: ModelConfig, attentions: list[Attention]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, attention) for attention in attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)


class LlamaForCausalLM(nn.Module):
    """A decoder with a language-model head. Build it on the meta device; `build_target` gives it storage.

    forward() is embed, run_layers over all layers, norm; split prefill and hidden-state capture call the
    three by themselves. A captured prefill calls embed and both parts of each of `layers`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, [self.make_attention(i) for i in range(config.num_layers)])
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        if config.tie:
            self.lm_head.weight = self.model.embed_tokens.weight

    def make_attention(self, layer_id: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.config, layer_id, qkv_bias=bias, o_bias=bias)

    @property
    def layers(self) -> nn.ModuleList:
        """The DecoderLayers, first to last."""
        return self.model.layers

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[T] int64, [T] int64 -> hidden states after the final norm, [T, D]."""
        hidden, rope = self.embed(input_ids, positions)
        return self.norm(self.run_layers(hidden, rope, forward_batch, 0, self.config.num_layers))

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Rope]:
        """What the first layer needs: [T, D] and the rotations of the step's positions."""
        return self.model.embed_tokens(input_ids), self.model.rotary_emb(positions)

    def run_layers(
        self, hidden: torch.Tensor, rope: Rope, forward_batch: ForwardBatch, start: int, stop: int
    ) -> torch.Tensor:
        """Layers [start, stop): [T, D] -> [T, D], before the final norm. `hidden` may be overwritten."""
        delta = None
        for layer in self.layers[start:stop]:
            delta, hidden = layer(delta, hidden, rope, forward_batch)
        return hidden if delta is None else hidden + delta

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm, [*, D] -> [*, D]."""
        normed: torch.Tensor = self.model.norm(hidden)
        return normed

    def compute_logits(self, hidden_states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states after the final norm, [R, D] -> [R, V] in the model's dtype, in `out` if given."""
        logits: torch.Tensor = self.lm_head(hidden_states, out)
        return logits

    def finalise(self) -> None:
        """Recompute derived state in place after weights were written."""
        self.model.rotary_emb.fill()
