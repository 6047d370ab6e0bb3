"""ModelRunner: owns the device's model, KV pool and runners. Only what every model needs belongs here.

The engine's loop is its only caller. Initialisation is layered, since each layer takes memory that the
next one must know of: __init__, initialize, alloc_memory_pool, init_attention_backends, init_cuda_graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from rollout_engine.attention.base import AttentionBackend, AttentionShape
from rollout_engine.attention.registry import make_backend, resolve_backend
from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.packing import Packer
from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError
from rollout_engine.logs import get_log
from rollout_engine.models.config import ModelConfig
from rollout_engine.models.lora import attach_adapters
from rollout_engine.models.registry import MODELS
from rollout_engine.models.weights import build_model, fill_random
from rollout_engine.ops.fused import kernels_for
from rollout_engine.runner.decode_graph import DecodeCudaGraphRunner
from rollout_engine.runner.eager import EagerRunner, SplitPrefill
from rollout_engine.runner.graphs import GraphRunner, Graphs
from rollout_engine.runner.kv_pool import KVPool
from rollout_engine.runner.memory import available_memory, discard_contents, restore_contents
from rollout_engine.runner.pending import PendingStep
from rollout_engine.runner.prefill_graph import PrefillCudaGraphRunner
from rollout_engine.runner.warm_up import warm_up
from weight_updater import host_scan
from weight_updater.adapter_bank import AdapterBank
from weight_updater.arena import WeightTarget
from weight_updater.from_disk import load_directory
from weight_updater.preloaded import PreloadedWeights

log = get_log(__name__)

SPLIT_PREFILL_LAYERS = 4
"""Layers per group when forward() runs a SPLIT_PREFILL batch by itself."""


OTHER_WORKING_BYTES = 1 << 30
"""Workspaces of attention and matrix products, graphs, and what the allocator loses between blocks."""


class Stage(IntEnum):
    """How far initialisation has come; the names are the calls that lead there."""

    CREATED = 0
    INITIALIZE = 1
    ALLOC_MEMORY_POOL = 2
    INIT_ATTENTION_BACKENDS = 3
    INIT_CUDA_GRAPHS = 4


class InitOrderError(RuntimeError):
    """A step of the initialisation was called out of order."""


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
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # events and kernels outside of forward passes go there, too
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.model_config = ModelConfig.from_directory(
            config.model, known=tuple(MODELS), dtype=config.dtype, context_length=config.context_length
        )
        self.forward_stream = _forward_stream(self.device)
        self.max_running = config.max_running_requests or (256 if self.device.type == "cuda" else 64)
        self.max_prefill_tokens = config.max_prefill_tokens or (8192 if self.device.type == "cuda" else 2048)
        self.overlap = self.device.type == "cuda" if config.overlap is None else config.overlap
        self.packer = Packer(self.device, _fetch_for(self.device))
        self.decode_graph: GraphRunner | None = None
        self.prefill_graph: GraphRunner | None = None
        self.graphs: Graphs | None = None  # those of both
        self.adapters: AdapterBank | None = None  # where adapters lie, if any can be held
        self.num_adapter_slots = 0  # that a row can point to, the base model's included
        self.forward_counts = dict.fromkeys(
            ("eager", "decode_graph", "prefill_graph", "split_prefill", "idle"), 0
        )
        self._weights_released = False
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
        if self.config.max_adapters:
            dtype, rank = self.model_config.dtype, self.config.max_adapter_rank
            self.adapters = attach_adapters(self.model, self.config.max_adapters, rank, dtype, self.device)
            self.num_adapter_slots = self.config.max_adapters + 2
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
        columns = self.model_config.context_length
        pool_shape, device = (self.max_running, columns), self.device
        self.req_to_token_pool = torch.zeros(pool_shape, dtype=torch.int32, device=device)
        self.page_table = np.zeros((self.max_running, -(-columns // self.config.page_size)), dtype=np.int32)
        self.device_page_table = torch.from_numpy(self.page_table).to(device)
        self.last_tokens = torch.zeros(self.max_running, dtype=torch.int64, device=device)

    def init_attention_backends(self) -> None:
        """Choose the attention backend and load its kernels."""
        self._enter(Stage.INIT_ATTENTION_BACKENDS)
        self.attention_backend_name, self.attn_backend = self.load_attention()
        self.eager = EagerRunner(self.model, self.last_tokens, self.config.max_prompt_logits_rows)

    def load_attention(self) -> tuple[str, AttentionBackend]:
        """The attention backend's name and the backend, its kernels loaded; compiled if that is due."""
        model = self.model_config
        shape = AttentionShape(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=self.config.page_size,
            dtype=model.dtype,
            device=self.device,
        )
        name = resolve_backend(self.config.attention_backend, shape)
        backend = make_backend(name, shape)
        backend.warm_up()
        return name, backend

    def init_cuda_graphs(self) -> None:
        """Load kernels and capture graphs where they can be; on a CPU, what hashes updates is loaded."""
        self._enter(Stage.INIT_CUDA_GRAPHS)
        if self.forward_stream is None:
            host_scan.warm_up()
            return
        torch.cuda.synchronize(self.device)  # weights and pools were made on another stream
        if self.config.cuda_graphs:
            self.decode_graph = self._decode_graph_runner()
            self.prefill_graph = self._prefill_graph_runner()
        with log.repeating("kernels_loading", note="compiled at first use on a machine: some seconds"):
            if runners := [
                runner for runner in (self.decode_graph, self.prefill_graph) if runner is not None
            ]:
                self.graphs = Graphs(runners, self.forward_stream, self._has_memory)
                self.graphs.capture()
            with torch.inference_mode(), torch.cuda.stream(self.forward_stream):
                warm_up(self)

    def _decode_graph_runner(self) -> DecodeCudaGraphRunner | None:
        sizes = [size for size in self.config.capture_batch_sizes if size <= self.max_running]
        if not sizes:
            return None
        if kernels_for(self.last_tokens) is None or not self.attn_backend.captures:
            log.warning("graphs_not_captured", attention_backend=self.attention_backend_name)
            return None
        return DecodeCudaGraphRunner(self, sizes, self._captured_storages())

    def _prefill_graph_runner(self) -> PrefillCudaGraphRunner | None:
        most = self.max_prefill_tokens + self.max_running  # decode rows come on top of the prompts' tokens
        sizes = [size for size in self.config.capture_prefill_tokens if size <= most]
        return PrefillCudaGraphRunner(self, sizes, self._captured_storages()) if sizes else None

    def _captured_storages(self) -> dict[str, torch.Tensor]:
        """Everything whose address a graph may remember, by name. The objects stay the same for good."""
        storages = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        storages["kv_cache"] = self.token_to_kv_pool.k[0]
        storages["last_tokens"], storages["page_table"] = self.last_tokens, self.device_page_table
        return storages

    def forward(self, batch: ScheduleBatch) -> StepResult:
        """Run one forward pass, sample, and wait for the result. The one entry, with `launch`."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> PendingStep:
        """Start a forward pass; on a GPU it runs on after this returns, in the order of launches."""
        if self._stage < Stage.INIT_CUDA_GRAPHS:
            raise InitOrderError(f"forward() cannot run: call {Stage(self._stage + 1).name.lower()}() first")
        if self.forward_stream is None:
            return self._forward_raw(batch)
        with torch.cuda.stream(self.forward_stream):
            pending = self._forward_raw(batch)
            pending.mark()  # an update may write to the weights once this pass's result was taken
        return pending

    def _forward_raw(self, batch: ScheduleBatch) -> PendingStep:
        """Choose who runs the batch, and count the choice."""
        mode = batch.forward_mode
        if mode.is_idle():
            self.forward_counts["idle"] += 1
            return PendingStep(batch)
        if self.decode_graph is not None and mode.is_cuda_graph() and self.decode_graph.can_run_graph(batch):
            self.forward_counts["decode_graph"] += 1
            return self.decode_graph.run(batch)
        if mode.is_split_prefill():
            prefill = self.start_split_prefill(batch)
            while not prefill.advance(SPLIT_PREFILL_LAYERS):
                pass
            return prefill.finish()
        if self.prefill_graph is not None and mode.is_extend() and self.prefill_graph.can_run_graph(batch):
            self.forward_counts["prefill_graph"] += 1
            return self.prefill_graph.run(batch)
        self.forward_counts["eager"] += 1
        return self.eager.run(batch, ForwardBatch.init_new(batch, self))

    def start_split_prefill(self, batch: ScheduleBatch) -> SplitPrefill:
        """Begin a prefill whose layers the caller runs with `advance`; then `finish` samples."""
        self.forward_counts["split_prefill"] += 1
        return SplitPrefill(self.eager, batch, ForwardBatch.init_new(batch, self))

    def working_bytes(self) -> int:
        """What forward passes take on a GPU beside weights and KV pool: to be kept out of the pool's share.

        Activations of the longest prefill, logits and the sampler's copies of them, the attention
        workspace, and the memory of graphs and matrix products.
        """
        if self.device.type != "cuda":
            return 0
        model = self.model_config
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        per_token = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
        activations = self.max_prefill_tokens * per_token * model.dtype.itemsize
        logits = model.vocab_size * (self.max_running * 4 + self.config.max_prompt_logits_rows * 2) * 4
        return activations + logits + self._adapter_working_bytes() + OTHER_WORKING_BYTES

    def _adapter_working_bytes(self) -> int:
        """What a pass takes for its adapters: A's products in all slots for three linears at a time (four of
        them, one in float32), and one of B's.
        """
        model = self.model_config
        inner = self.num_adapter_slots * self.config.max_adapter_rank
        widest = max(model.intermediate_size, model.hidden_size, model.num_heads * model.head_dim)
        per_token = 3 * 5 * inner + widest if self.num_adapter_slots else 0
        return self.max_prefill_tokens * per_token * model.dtype.itemsize

    def available_memory(self) -> int:
        """Bytes free on the device now (of the host for a CPU)."""
        return available_memory(self.device)

    def release_weights(self) -> int:
        """Give the weights' memory back, their addresses kept; bytes freed. Their contents are gone."""
        self._weights_released = True
        return discard_contents(self.target.buffer)

    def resume_weights(self) -> int:
        """Make the weights writable again; bytes that the next full update will take. Graphs that wait for
        them are captured.

        Raises:
            torch.OutOfMemoryError: a GPU has not enough now; call it again.
        """
        restore_contents(self.target.buffer)
        self._weights_released = False
        self.target.finalise()
        if self.graphs is not None:
            self.graphs.capture_owed()
        return self.target.buffer.numel()

    def release_graphs(self) -> int:
        """Free the captured graphs; bytes that the device got back."""
        if self.graphs is None:
            return 0
        torch.cuda.synchronize(self.device)  # a pass whose sequences have ended may still be replayed
        self.graphs.release()
        before = self.available_memory()
        torch.cuda.empty_cache()
        return self.available_memory() - before

    def resume_graphs(self) -> int:
        """Capture graphs again; bytes that they took."""
        if self.graphs is None:
            return 0
        before = self.available_memory()
        self.graphs.capture()
        return max(0, before - self.available_memory())

    def release_kv(self) -> int:
        """Give the KV pool's memory back; bytes freed. No forward pass may run until resume_kv."""
        return self.token_to_kv_pool.release()

    def resume_kv(self) -> int:
        """Take the KV pool's memory again, zeroed, in the same tensors; bytes taken. Graphs that an update
        had to give up without it are captured again, once the weights are there too.
        """
        taken = self.token_to_kv_pool.resume()
        if self.graphs is not None:
            self.graphs.capture_owed()
        return taken

    def _has_memory(self) -> bool:
        """Whether weights and KV pool are there, over which graphs are captured."""
        return not (self._weights_released or self.token_to_kv_pool.is_released)


def _fetch_for(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """How a step's small arrays come to `device`; None: by its copy engine."""
    if kernels_for(torch.empty(0, device=device)) is None:
        return None
    from rollout_engine.ops.host_reads import fetch

    return fetch


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
