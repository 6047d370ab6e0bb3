"""ModelRunner: owns the device's model, KV pool and runners. Only what every model needs belongs here.

The engine's loop is its only caller. Initialisation is layered, since each layer takes memory that the
next one must know of: __init__, initialize, alloc_memory_pool, init_attention_backends, init_cuda_graphs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

import torch

from rollout_engine.attention.base import AttentionBackend
from rollout_engine.attention.registry import make_backend, resolve_backend
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError
from rollout_engine.models.config import ModelConfig
from rollout_engine.models.registry import MODELS
from rollout_engine.models.weights import build_model, fill_random
from rollout_engine.runner.eager import EagerRunner, SplitPrefill
from rollout_engine.runner.kv_pool import KVPool
from rollout_engine.runner.memory import available_memory, discard_contents, restore_contents
from weight_updater.arena import WeightTarget
from weight_updater.from_disk import load_directory
from weight_updater.preloaded import PreloadedWeights

SPLIT_PREFILL_LAYERS = 4
"""Layers per group when forward() runs a SPLIT_PREFILL batch by itself."""


class Stage(IntEnum):
    """How far initialisation has come; the names are the calls that lead there."""

    CREATED = 0
    INITIALIZE = 1
    ALLOC_MEMORY_POOL = 2
    INIT_ATTENTION_BACKENDS = 3
    INIT_CUDA_GRAPHS = 4


class InitOrderError(RuntimeError):
    """A step of the initialisation was called out of order."""


class GraphRunner(Protocol):
    """Replays captured forward passes."""

    def can_run(self, batch: ScheduleBatch) -> bool: ...

    def run(self, batch: ScheduleBatch, forward: ForwardBatch) -> StepResult: ...


class ModelRunner:
    """Runs ScheduleBatches.

    Args:
        config: model, dtype, device, threads, pool sizes.

    Raises:
        ConfigError, EngineError(MODEL_INVALID): a model or a device that cannot be used.
    """

    model: Any  # nn.Module; see models/llama.py
    target: WeightTarget
    token_to_kv_pool: KVPool
    req_to_token_pool: torch.Tensor  # [max_running_requests, context_length] int32 token slots
    attn_backend: AttentionBackend
    attention_backend_name: str  # key of attention.registry.BACKENDS, never "auto"

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.device = _device(config.device)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.model_config = ModelConfig.from_directory(
            config.model, known=tuple(MODELS), dtype=config.dtype, context_length=config.context_length
        )
        self.forward_stream = _forward_stream(self.device)
        self.decode_graph: GraphRunner | None = None
        self.prefill_graph: GraphRunner | None = None
        self.forward_counts = dict.fromkeys(
            ("eager", "decode_graph", "prefill_graph", "split_prefill", "idle"), 0
        )
        self._stage = Stage.CREATED

    def _enter(self, stage: Stage) -> None:
        if self._stage != stage - 1:
            needed = Stage(stage - 1).name.lower()
            problem = f"call {needed}() first" if self._stage < stage - 1 else "it was called before"
            raise InitOrderError(f"{stage.name.lower()}() cannot run now: {problem}")
        self._stage = stage

    def initialize(self, preloaded: PreloadedWeights | None = None) -> None:
        """Build the model in its arena and load or draw its weights.

        Args:
            preloaded: a trainer's arena to live on; nothing is loaded then.

        Raises:
            weight_updater.errors.UpdateRefused: a checkpoint that does not fit or cannot be read.
        """
        self._enter(Stage.INITIALIZE)
        home = None if preloaded is None else preloaded.home
        self.model, self.target = build_model(self.model_config, self.device, home)
        if preloaded is not None:
            return
        if self.config.load_format == "random":
            fill_random(self.model, self.target, self.config.seed)
        else:
            load_directory(self.target, str(self.config.model))
            self.target.finalise()

    def alloc_memory_pool(self, num_pages: int) -> None:
        """Allocate K and V for `num_pages` pages, zeroed, and the table of token slots."""
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}: there is no memory for a KV pool; free some")
        self._enter(Stage.ALLOC_MEMORY_POOL)
        self.token_to_kv_pool = KVPool(self.model_config, num_pages, self.config.page_size, self.device)
        self.req_to_token_pool = torch.zeros(
            (self.config.max_running_requests, self.model_config.context_length),
            dtype=torch.int32,
            device=self.device,
        )

    def init_attention_backends(self) -> None:
        self._enter(Stage.INIT_ATTENTION_BACKENDS)
        self.attention_backend_name = resolve_backend(self.config.attention_backend, self.device)
        self.attn_backend = make_backend(self.attention_backend_name)
        self.eager = EagerRunner(self.model, self.config.max_prompt_logits_rows)

    def init_cuda_graphs(self) -> None:
        """Capture graphs where there is a runner for them; nothing to capture on a CPU."""
        self._enter(Stage.INIT_CUDA_GRAPHS)

    @torch.inference_mode()
    def forward(self, batch: ScheduleBatch) -> StepResult:
        """Run one forward pass and sample. The one entry."""
        if self._stage < Stage.INIT_CUDA_GRAPHS:
            raise InitOrderError(f"forward() cannot run: call {Stage(self._stage + 1).name.lower()}() first")
        return self._forward_raw(batch)

    def _forward_raw(self, batch: ScheduleBatch) -> StepResult:
        """Choose who runs the batch, and count the choice."""
        mode = batch.forward_mode
        if mode.is_idle():
            self.forward_counts["idle"] += 1
            return StepResult()
        if self.decode_graph is not None and mode.is_cuda_graph() and self.decode_graph.can_run(batch):
            self.forward_counts["decode_graph"] += 1
            return self.decode_graph.run(batch, ForwardBatch.init_new(batch, self))
        if mode.is_split_prefill():
            prefill = self.start_split_prefill(batch)
            while not prefill.advance(SPLIT_PREFILL_LAYERS):
                pass
            return prefill.finish()
        if self.prefill_graph is not None and mode.is_extend() and self.prefill_graph.can_run(batch):
            self.forward_counts["prefill_graph"] += 1
            return self.prefill_graph.run(batch, ForwardBatch.init_new(batch, self))
        self.forward_counts["eager"] += 1
        return self.eager.run(batch, ForwardBatch.init_new(batch, self))

    def start_split_prefill(self, batch: ScheduleBatch) -> SplitPrefill:
        """Begin a prefill whose layers the caller runs with `advance`; then `finish` samples."""
        self.forward_counts["split_prefill"] += 1
        return SplitPrefill(self.eager, batch, ForwardBatch.init_new(batch, self))

    def available_memory(self) -> int:
        """Bytes free on the device now (of the host for a CPU)."""
        return available_memory(self.device)

    def release_weights(self) -> int:
        """Give the weights' memory back, their addresses kept; bytes freed. Their contents are gone."""
        return discard_contents(self.target.buffer)

    def resume_weights(self) -> int:
        """Make the weights writable again; bytes that the next full update will take.

        Raises:
            torch.OutOfMemoryError: a GPU has not enough now; the weights stay released.
        """
        restore_contents(self.target.buffer)
        self.target.finalise()
        return self.target.buffer.numel()

    def release_kv(self) -> int:
        """Give the KV pool's memory back; bytes freed. No forward pass may run until resume_kv."""
        return self.token_to_kv_pool.release()

    def resume_kv(self) -> int:
        """Take the KV pool's memory again, zeroed, in the same tensors; bytes taken."""
        return self.token_to_kv_pool.resume()


def _forward_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that forward passes run on; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no GPU; use cpu or install a CUDA build")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", int(index or torch.cuda.current_device()))
