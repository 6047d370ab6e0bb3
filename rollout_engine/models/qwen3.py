"""Qwen3: each query and key head is normalised before the rotation."""

from __future__ import annotations

from rollout_engine.models.layers import Attention
from rollout_engine.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def make_attention(self, layer_id: int) -> Attention:
        bias = self.config.attention_bias
        return Attention(self.config, layer_id, qkv_bias=bias, o_bias=bias, qk_norm=True)
