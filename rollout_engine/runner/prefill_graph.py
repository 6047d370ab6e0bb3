"""PrefillCudaGraphRunner: what lies between the attention of two layers, captured for each number of tokens.

Attention depends on the lengths of the rows, so it runs outside, uncaptured and on the real tokens only:

    graph 0            attention     graph 1                         attention         graph L
    embed, norm, qkv,  of layer 0    o, norm, MLP of layer 0;        of layer 1  ...   o, norm, MLP of
    rotate, write KV                 norm, qkv, .. of layer 1                          layer L - 1, last sum

A pass is padded to the next captured number of tokens. Padded tokens are token 0 at position 0, and write to
the pool's padding page. What crosses from one piece to the next lies in buffers that no graph owns; final
norm, logits and sampling are EagerRunner's.

T = captured number of tokens, N = query heads, K = kv heads, H = head dim, D = hidden size, L = layers
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rollout_engine.batch.adapters import AdapterRows
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import ForwardMode, ScheduleBatch
from rollout_engine.models.layers import Heads, Rope
from rollout_engine.runner.graphs import (
    Capture,
    CapturedStorages,
    Graph,
    capture_graph,
    capture_sizes,
    smallest_fit,
)
from rollout_engine.runner.pending import PendingStep


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crosses the borders of pieces. Pieces follow each other, so all sizes share one memory."""

    residual: torch.Tensor  # [T, D] the sum of all before the last delta; after the last piece of all
    cos: torch.Tensor  # [T, 1, H]
    sin: torch.Tensor  # [T, 1, H]
    q: torch.Tensor  # [T, N, H]
    k: torch.Tensor  # [T, K, H]; unused where a piece writes keys and values to the pool
    v: torch.Tensor  # [T, K, H]
    attended: torch.Tensor  # [T, N, H]

    @classmethod
    def allocate(cls, config: Any, size: int, device: torch.device) -> Crossing:
        """For up to `size` tokens, zeroed: padding that was never written is finite."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros((size, *shape), dtype=config.dtype, device=device)

        head_dim = config.head_dim
        return cls(
            residual=zeros(config.hidden_size),
            cos=zeros(1, head_dim),
            sin=zeros(1, head_dim),
            q=zeros(config.num_heads, head_dim),
            k=zeros(config.num_kv_heads, head_dim),
            v=zeros(config.num_kv_heads, head_dim),
            attended=zeros(config.num_heads, head_dim),
        )

    def first(self, size: int) -> Crossing:
        """The same memory for `size` tokens."""
        return Crossing(*(getattr(self, name)[:size] for name in Crossing.__slots__))

    @property
    def rope(self) -> Rope:
        return self.cos, self.sin

    def keep(self, heads: Heads, residual: torch.Tensor) -> Heads:
        """Bring a piece's results here, as far as they do not lie here already. Returns the heads here."""
        for buffer, value in zip((self.q, self.k, self.v, self.residual), (*heads, residual), strict=True):
            if value is not None and value is not buffer:
                buffer.copy_(value)
        _, k, v = heads
        return self.q, None if k is None else self.k, None if v is None else self.v


@dataclass(frozen=True, slots=True)
class Captured:
    """The pieces of one number of tokens, and what feeds them."""

    pieces: list[Graph]  # L + 1
    inputs: torch.Tensor  # [3, T] int64: input ids, positions, token slots; where adapters are, their slots
    crossing: Crossing
    heads: Heads  # of `crossing`, as attention takes them


class PrefillCudaGraphRunner:
    """Replays prefill and mixed passes, but for their attention.

    Args:
        runner: its model, pool, attention backend and device are used.
        sizes: numbers of tokens to capture, ascending.
        storages: by name, the tensors whose identities the graphs depend on.
        capture: makes a graph of a piece.
    """

    def __init__(
        self,
        runner: Any,
        sizes: list[int],
        storages: dict[str, torch.Tensor],
        capture: Capture = capture_graph,
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._storages = CapturedStorages(storages)
        self._capture_graph = capture
        self._captured: dict[int, Captured] = {}
        self._crossing = Crossing.allocate(runner.model_config, sizes[-1], runner.device)

    # ------------------------------------------------------------ replay

    def can_run_graph(self, batch: ScheduleBatch) -> bool:
        """Whether a captured pass has room for the batch. What it asks for does not matter: all that differs
        between batches of one size runs outside of the graphs.
        """
        mode = batch.forward_mode
        return (
            bool(self._captured)
            and mode.is_extend()
            and not mode.is_split_prefill()
            and smallest_fit(self._sizes, batch.num_tokens) is not None
        )

    def run(self, batch: ScheduleBatch) -> PendingStep:
        """Replay the pieces of the smallest size that fits around the batch's attention, and sample."""
        size = smallest_fit(self._sizes, batch.num_tokens)
        assert size is not None, "can_run_graph was asked"
        captured = self._captured[size]
        forward = ForwardBatch.init_new(batch, self._runner, captured.inputs)
        forward.attn_backend.plan(forward)
        for piece, layer in zip(captured.pieces, self._runner.model.layers, strict=False):
            piece.replay()
            layer.self_attn.attend(captured.heads, forward, captured.crossing.attended)
        captured.pieces[-1].replay()
        finished: PendingStep = self._runner.eager.finish(batch, forward, captured.crossing.residual)
        return finished

    # ------------------------------------------------------------ capture

    def capture(self, pool: Any) -> None:
        """Capture every size."""
        self._captured = capture_sizes(
            "prefill_graph", self._sizes, lambda size: self._capture(size, pool), self._storages
        )

    def _capture(self, size: int, pool: Any) -> Captured:
        runner = self._runner
        num_rows = 4 if runner.num_adapter_slots else 3
        inputs = torch.empty((num_rows, size), dtype=torch.int64, device=runner.device)
        # A batch without rows: every token is padding.
        forward = ForwardBatch.init_new(ScheduleBatch(ForwardMode.EXTEND), runner, inputs)
        crossing = self._crossing.first(size)
        forward.q_out = crossing.q
        heads: Heads = (crossing.q, None, None)
        graphs = []
        for number in range(len(runner.model.layers) + 1):
            piece = partial(self._piece, number, forward, inputs, crossing)
            # Once uncaptured: kernels are compiled and workspaces taken outside of the graph.
            heads = piece() or heads
            graphs.append(self._capture_graph(piece, pool))
        return Captured(graphs, inputs, crossing, heads)

    def _piece(
        self, number: int, forward: ForwardBatch, inputs: torch.Tensor, crossing: Crossing
    ) -> Heads | None:
        """From the attention of layer number - 1, or the input ids, to that of layer `number`, or the end.

        Reads the inputs and `crossing`, and writes `crossing`; keys and values go there or to the KV pool.

        Returns:
            What attention takes, in `crossing`; None at the end.
        """
        model = self._runner.model
        layers = model.layers
        delta: Any = None  # of the layer before
        if num_slots := self._runner.num_adapter_slots:
            forward.adapters = AdapterRows.masked(inputs[3], num_slots)
        if number == 0:
            residual, rope = model.embed(forward.input_ids, forward.positions)
            crossing.cos.copy_(rope[0])
            crossing.sin.copy_(rope[1])
        else:
            delta, residual = layers[number - 1].after_attention(
                crossing.attended, crossing.residual, forward
            )
        if number < len(layers):
            heads, residual = layers[number].before_attention(delta, residual, crossing.rope, forward)
            return crossing.keep(heads, residual)
        torch.add(residual, delta, out=crossing.residual)
        return None

    # ------------------------------------------------------------ what the updater asks, through Graphs

    def num_captured(self) -> int:
        """How many numbers of tokens are captured."""
        return len(self._captured)

    def moved(self) -> list[str]:
        """Captured storage whose address, shape or dtype is no longer what was captured."""
        return self._storages.moved()

    def release(self) -> None:
        """Free every graph; prefill passes run uncaptured until `capture`."""
        self._captured.clear()
        self._storages.forget()
