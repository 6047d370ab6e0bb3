"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output."""

from __future__ import annotations

from rollout_engine.models.layers import Attention
from rollout_engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def make_attention(self, layer_id: int) -> Attention:
        return Attention(self.config, layer_id, qkv_bias=True, o_bias=False)
