"""DecodeCudaGraphRunner: decode passes captured once for each batch size, and replayed.

A batch is padded to the next captured size. Padded rows write to the pool's padding page and read one token
of somebody's; nobody reads what they compute.

B = rows of a batch, S = captured size, D = hidden size, V = vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout_engine.batch.adapters import AdapterRows, token_slots
from rollout_engine.batch.forward import ForwardBatch, SamplingInfo, write_slots
from rollout_engine.batch.schedule import CaptureHiddenMode, ForwardMode, ScheduleBatch
from rollout_engine.kv.capacity import max_decode_logits_rows
from rollout_engine.ops.fused import kernels_for
from rollout_engine.runner.graphs import (
    Capture,
    CapturedStorages,
    Graph,
    capture_graph,
    capture_sizes,
    smallest_fit,
)
from rollout_engine.runner.pending import PendingStep
from rollout_engine.runner.sampler import sample
from weight_updater.adapters import BASE_SLOT

WARM_UP_PASSES = 2
"""Before a capture: kernels are compiled and workspaces taken outside the graph."""


@dataclass(slots=True)
class Captured:
    """The graph of one batch size and what feeds it."""

    graph: Graph
    inputs: torch.Tensor
    """[5, S] int64: input ids, positions, token slots, rows of the pool, KV lengths. Where adapters can be
    held there is a sixth row: their slots.
    """


class DecodeCudaGraphRunner:
    """Replays decode passes.

    Args:
        runner: its model, pool, attention backend, stream and device are used.
        batch_sizes: to capture, ascending.
        storages: by name, the tensors whose identities the graphs depend on.
        capture: makes a graph of a pass.
    """

    def __init__(
        self,
        runner: Any,
        batch_sizes: list[int],
        storages: dict[str, torch.Tensor],
        capture: Capture = capture_graph,
    ) -> None:
        self._runner = runner
        self._sizes = batch_sizes
        self._storages = CapturedStorages(storages)
        self._capture_graph = capture
        self._captured: dict[int, Captured] = {}
        rows = max_decode_logits_rows(batch_sizes, [1])
        config = runner.model_config
        # A padded row: any token, at position 0 of a sequence of one token, written to the padding page. What
        # it reads is the first token of the first page of row 0 of the pool: memory that exists.
        padding = [0, 0, runner.token_to_kv_pool.padding_slot, 0, 1]
        if runner.num_adapter_slots:
            padding.append(BASE_SLOT)
        self._padding = np.array(padding, dtype=np.int64)
        self.logits = torch.zeros((rows, config.vocab_size), dtype=config.dtype, device=runner.device)

    # ------------------------------------------------------------ replay

    def can_run_graph(self, batch: ScheduleBatch) -> bool:
        """Whether a captured pass gives everything that `batch` asks for."""
        return (
            bool(self._captured)
            and batch.forward_mode.is_decode()
            and smallest_fit(self._sizes, batch.batch_size) is not None
            and not batch.prompt_logprobs
            and batch.capture_hidden_mode is CaptureHiddenMode.NULL
            and batch.seq_lens_cpu_cache is None
        )

    def run(self, batch: ScheduleBatch) -> PendingStep:
        """Replay the pass of the smallest size that fits, and sample."""
        runner, num_rows = self._runner, batch.batch_size
        size = smallest_fit(self._sizes, num_rows)
        assert size is not None, "can_run_graph was asked"
        captured = self._captured[size]
        write_slots(batch, runner)
        inputs = np.empty((len(self._padding), size), dtype=np.int64)
        inputs[0, :num_rows], inputs[1, :num_rows] = batch.input_ids, batch.positions
        inputs[2, :num_rows], inputs[3, :num_rows] = batch.out_cache_loc, batch.req_pool_indices
        inputs[4, :num_rows] = batch.seq_lens
        if runner.num_adapter_slots:
            inputs[5, :num_rows] = token_slots(batch.adapters or [None] * num_rows, batch.extend_lens)
        inputs[:, num_rows:] = self._padding[:, None]
        runner.packer.fill(captured.inputs, inputs)
        captured.graph.replay()
        if not batch.samples:
            return PendingStep(batch)
        rows = [row.row for row in batch.samples]
        logits, pools = self.logits[:num_rows], captured.inputs[3, :num_rows]
        if rows != list(range(num_rows)):
            (at,) = runner.packer.put([np.array(rows, dtype=np.int64)])
            logits, pools = logits.index_select(0, at), pools.index_select(0, at)
        info = SamplingInfo.from_rows(batch.samples, runner.packer)
        return PendingStep(batch, sample(logits, info, pools, runner.last_tokens))

    # ------------------------------------------------------------ capture

    def capture(self, pool: Any) -> None:
        """Capture every size."""
        self._captured = capture_sizes(
            "decode_graph", self._sizes, lambda size: self._capture(size, pool), self._storages
        )

    def _capture(self, size: int, pool: Any) -> Captured:
        runner = self._runner
        inputs = torch.empty((len(self._padding), size), dtype=torch.int64, device=runner.device)
        runner.packer.fill(inputs, np.repeat(self._padding[:, None], size, axis=1))
        forward = self._forward_batch(size, inputs)
        runner.attn_backend.plan(forward)
        for _ in range(WARM_UP_PASSES):
            self._pass(size, forward, inputs)
        return Captured(self._capture_graph(lambda: self._pass(size, forward, inputs), pool), inputs)

    def _forward_batch(self, size: int, inputs: torch.Tensor) -> ForwardBatch:
        runner = self._runner
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=inputs[0],
            positions=inputs[1],
            req_pool_indices=inputs[3],
            seq_lens=inputs[4],
            out_cache_loc=inputs[2],
            token_to_kv_pool=runner.token_to_kv_pool,
            req_to_token_pool=runner.req_to_token_pool,
            attn_backend=runner.attn_backend,
            sampling_info=SamplingInfo.from_rows([], runner.packer),
            seq_lens_cpu=[1] * size,
            extend_lens_cpu=[1] * size,
            req_pool_indices_cpu=[0] * size,
            page_table=runner.page_table,
            device_page_table=runner.device_page_table,
            logits_indices=inputs[3],
            sampled_pool_indices=inputs[3],
        )

    def _pass(self, size: int, forward: ForwardBatch, inputs: torch.Tensor) -> None:
        """What is captured: from token ids to logits."""
        model = self._runner.model
        if num_slots := self._runner.num_adapter_slots:
            forward.adapters = AdapterRows.masked(inputs[5], num_slots)
        kernels = kernels_for(forward.input_ids)
        ids = kernels.resolve_tokens(forward.input_ids, forward.req_pool_indices, self._runner.last_tokens)
        hidden, rope = model.embed(ids, forward.positions)
        hidden = model.norm(model.run_layers(hidden, rope, forward, 0, model.config.num_layers))
        model.compute_logits(hidden, out=self.logits[:size])

    # ------------------------------------------------------------ what the updater asks, through Graphs

    def num_captured(self) -> int:
        """How many batch sizes are captured."""
        return len(self._captured)

    def moved(self) -> list[str]:
        """Captured storage whose address, shape or dtype is no longer what was captured."""
        return self._storages.moved()

    def release(self) -> None:
        """Free every graph; decode passes run uncaptured until `capture`."""
        self._captured.clear()
        self._storages.forget()
