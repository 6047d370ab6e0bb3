"""TRL's AsyncGRPOTrainer: a rollout worker and a weight transfer that use a rollsync engine.

    transfer = WeightTransfer("127.0.0.1:50051")
    worker = RolloutWorker(transfer, dataset, reward, tokenizer, config)
    trainer = AsyncGRPOTrainer(model=path, args=config, train_dataset=dataset,
                               rollout_worker=worker, weight_transfer=transfer)

Both are TRL's own protocols. The worker samples in threads of the trainer's process while the trainer
trains. Sequences in flight go on over a weight update (inflight="keep"); a sample counts as old as its
oldest token.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
import math
import queue
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Unpack

from trainers_adapters.errors import RollsyncError
from trainers_adapters.frameworks.live_engine import EngineLost, EngineOptions, LiveEngine, WeightsLost
from trainers_adapters.frameworks.rollouts import seed_of
from trainers_adapters.frameworks.trl_settings import prompt_token_ids
from trainers_adapters.results import Completion
from trainers_adapters.rollout_calls import Request, Sampling
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksums as checksums_of
from weight_updater.requests import Manifest, TensorSpec

log = logging.getLogger(__name__)

__all__ = ["RolloutWorker", "WeightTransfer"]

IDLE_S = 0.1
"""Seconds between two looks of a thread that has to wait."""
STOP_S = 30.0
"""Seconds that stop() waits for the threads."""


class WeightTransfer:
    """WeightTransferProtocol: the trainer's weights become the engine's.

    pause and resume do nothing, because a commit itself pauses the engine, for as long as it takes and no
    longer. Whether all tensors come (frozen ones do not) is found out at the first send.

    Args: the engine's address, and EngineOptions; inflight is "keep" unless it is given.
    """

    def __init__(self, address: str, **options: Unpack[EngineOptions]) -> None:
        if options.setdefault("inflight", "keep") == "abort":
            raise ValueError("inflight is 'abort', which would cut samples short; keep, recompute or wait")
        self.engine = LiveEngine(address, **options)

    def init_weight_transfer(self) -> None:
        """Wait for the engine."""
        self.engine.wait()

    def pause(self) -> None:
        """Nothing: see above."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all that the iterator yields; on return it is live.

        The iterator is taken to its end first, whatever happens then, since other ranks may gather
        parameters along with it.
        """
        named = list(iterator)
        missing = self.engine.missing(name for name, _ in named)
        self.engine.push(_Named(named), partial=bool(missing))

    def resume(self) -> None:
        """Nothing: see above."""

    def destroy(self) -> None:
        """Give back what pushes allocated, and the connection."""
        self.engine.close()


class _Named:
    """Tensors under names, as a source. Raises ValueError for a dtype that cannot be sent."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = [(name, tensor.detach()) for name, tensor in named]
        for name, tensor in self._named:
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {tensor.dtype}; it can be sent as one of {', '.join(DTYPE_NAMES.values())}"
                )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._named)

    def manifest(self, *, checksums: bool = True) -> Manifest:
        sums: Sequence[int | None] = [None] * len(self._named)
        if checksums:
            sums = checksums_of([tensor for _, tensor in self._named])
        return Manifest(
            tuple(
                TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), value)
                for (name, tensor), value in zip(self._named, sums, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """A prompt's completions with their rewards (NaN: none) by reward function."""

    number: int
    prompt: Any
    prompt_ids: list[int]
    completions: list[Completion]
    messages: list[list[dict[str, str]]]
    rewards: dict[str, list[float]]


class RolloutWorker:
    """RolloutWorkerProtocol: samples and scores groups in threads, from the engine of a WeightTransfer.

    An engine that was lost is asked again and again; the trainer's next push mends it. If that does not
    come within the engine's restart_s, check_health (which TRL calls while it waits for samples) raises.

    Args:
        transfer: the trainer's; its engine is sampled from.
        dataset: rows with a `prompt` (text or messages); their other columns go to the reward functions,
            with `weight_version`, the oldest that sampled any of a completion's tokens.
        reward_funcs: one or several, called as GRPOTrainer calls them; may be async.
        processing_class: the tokenizer.
        args: the trainer's AsyncGRPOConfig.
        eos_token_ids: that end a completion; by default the tokenizer's and the served model's.
    """

    def __init__(
        self,
        transfer: WeightTransfer,
        dataset: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        processing_class: Any,
        args: Any,
        *,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._engine = transfer.engine
        self._dataset = dataset
        self._reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._tokenizer = processing_class
        self._args = args
        self._sampling = _sampling(args, processing_class, eos_token_ids)
        self._numbers = itertools.count()
        self._rows = itertools.cycle(range(len(dataset)))
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._in_flight: set[str] = set()
        self._trainer_versions: dict[int, int] = {}  # engine's weight version -> TRL's model version
        self._latest = 0
        self._failure: Exception | None = None
        self._lost: tuple[float, str] | None = None  # since when (monotonic), and how
        self._alive_at = time.monotonic()

    # ------------------------------------------------------------ what TRL calls

    def start(self) -> None:
        """Begin to sample: as many groups at once as max_inflight_tasks samples make."""
        wanted = self._args.max_inflight_tasks // self._args.num_generations
        self._alive_at = time.monotonic()
        for number in range(max(1, wanted)):
            thread = threading.Thread(target=self._work, name=f"rollouts-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads; what they were sampling is thrown away."""
        self._stopping.set()
        with self._lock:
            running = sorted(self._in_flight)
        if running:
            try:
                self._engine.abort(running)
            except RollsyncError as error:  # the engine is gone, and with it what it was sampling
                log.info("nothing to abort: %s", error)
        for thread in self._threads:
            thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """What was pushed last is TRL's `model_version`."""
        self._latest = model_version
        self._trainer_versions[self._engine.version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if sampling failed, lost its engine for good, or came to a standstill."""
        if self._failure is not None:
            raise RuntimeError(f"rollouts failed: {self._failure}") from self._failure
        lost = self._lost
        if lost is not None and time.monotonic() - lost[0] > self._engine.restart_s:
            raise EngineLost(
                "UNAVAILABLE",
                "WEIGHTS_LOST",
                f"for {self._engine.restart_s:g} s the engine at {self._engine.address} has not had the "
                f"weights of this run ({lost[1]}), and no sample is left to train on until the next push; "
                f"start it again on that address and resume from a checkpoint",
            )
        if time.monotonic() - self._alive_at > stale_after_s:
            raise RuntimeError(f"no group was finished for more than {stale_after_s:g} s")

    # ------------------------------------------------------------ threads

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    number, row = next(self._numbers), self._dataset[next(self._rows)]
                self._deliver(number, row)
        except Exception as error:
            if not self._stopping.is_set():
                log.exception("a rollout thread failed")
                self._failure = error

    def _deliver(self, number: int, row: dict[str, Any]) -> None:
        """One group, from its prompt to the trainer's queue."""
        started = time.monotonic()
        group = self._sampled(number, row)
        if group is None:
            return
        lengths = [len(completion.token_ids) for completion in group.completions]
        cut = sum(completion.finish_reason == "length" for completion in group.completions)
        self.metrics_queue.put(
            {
                "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
                "completions/clipped_ratio": (float(cut), float(len(lengths))),
                "rollsync/group_seconds": time.monotonic() - started,
                "rollsync/weight_version": float(self._engine.version),
            }
        )
        for sample in self._samples(group):
            while not self._stopping.is_set():
                self._alive_at = time.monotonic()
                try:
                    self.rollout_buffer.put(sample, timeout=IDLE_S)
                    break
                except queue.Full:
                    continue

    def _sampled(self, number: int, row: dict[str, Any]) -> _Group | None:
        """Sample and score; an engine without the weights is asked again. None: stopped meanwhile."""
        kwargs = self._args.chat_template_kwargs or {}
        (prompt_ids,) = prompt_token_ids(self._tokenizer, [row["prompt"]], **kwargs)
        sampling = self._sampling.copy()
        sampling["seed"] = seed_of(f"{self._args.seed}/async", number)
        while not self._stopping.is_set():
            request_id = f"rollout-{number}-{secrets.token_hex(4)}"
            with self._lock:
                self._in_flight.add(request_id)
            try:
                request = Request(prompt_ids, sampling, request_id)
                (completions,) = self._engine.sample([request], timeout_s=self._engine.timeout_s, mixed=True)
            except WeightsLost as error:
                self._note_lost(str(error))
                self._stopping.wait(IDLE_S)
                continue
            finally:
                with self._lock:
                    self._in_flight.discard(request_id)
            self._lost = None
            return self._scored(number, row, prompt_ids, completions)
        return None

    def _note_lost(self, what: str) -> None:
        self._alive_at = time.monotonic()  # check_health has a clock of its own for this
        if self._lost is None:
            log.warning("%s was lost (%s); waiting for the next push", self._engine.address, what)
            self._lost = (time.monotonic(), what)

    # ------------------------------------------------------------ scores

    def _scored(
        self, number: int, row: dict[str, Any], prompt_ids: list[int], completions: list[Completion]
    ) -> _Group:
        ids = [completion.token_ids for completion in completions]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        count = len(ids)
        given = {name: [value] * count for name, value in row.items() if name != "prompt"}
        given |= {
            "prompts": [row["prompt"]] * count,
            "completions": texts if isinstance(row["prompt"], str) else messages,
            "completion_ids": ids,
            "weight_version": [min(completion.weight_versions) for completion in completions],
        }
        rewards = {_name(func): _call(func, given, count) for func in self._reward_funcs}
        return _Group(number, row["prompt"], prompt_ids, completions, messages, rewards)

    def _samples(self, group: _Group) -> list[Any]:
        """The group as TRL's RolloutSamples."""
        numpy = importlib.import_module("numpy")
        worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
        totals = [_total(one) for one in zip(*group.rewards.values(), strict=True)]
        known = [total for total in totals if not math.isnan(total)]
        mean = statistics.fmean(known) if known else math.nan
        spread = statistics.pstdev(known) if known else math.nan
        samples = []
        for index, (completion, total) in enumerate(zip(group.completions, totals, strict=True)):
            before, after = len(group.prompt_ids), len(completion.token_ids)
            own = {f"rewards/{name}": values[index] for name, values in group.rewards.items()}
            samples.append(
                worker.RolloutSample(
                    prompt=group.prompt,
                    completion=group.messages[index],
                    input_ids=numpy.asarray([*group.prompt_ids, *completion.token_ids], dtype=numpy.int64),
                    completion_mask=numpy.asarray([0] * before + [1] * after, dtype=numpy.int64),
                    old_log_probs=numpy.asarray([0.0] * before + completion.logprobs, dtype=numpy.float32),
                    advantage=0.0 if math.isnan(total) else (total - mean) / (spread + 1e-8),
                    model_version=self._model_version(min(completion.weight_versions)),
                    group_id=group.number,
                    metrics={"reward": total, "reward_std": spread, **own},
                    enqueued_at=time.time(),
                )
            )
        return samples

    def _model_version(self, weight_version: int) -> int:
        """TRL's number for it; weights that it has not named yet will get the next."""
        return self._trainer_versions.get(weight_version, self._latest + 1)


def _sampling(args: Any, tokenizer: Any, eos_token_ids: Sequence[int] | None) -> Sampling:
    return {
        "n": args.num_generations,
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "logprobs": "processed",
        "ignore_eos": eos_token_ids is not None,
        "stop_token_ids": [tokenizer.eos_token_id] if eos_token_ids is None else list(eos_token_ids),
    }


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _call(func: Callable[..., Any], given: dict[str, Any], count: int) -> list[float]:
    """A reward function's values; None becomes NaN.

    Raises:
        ValueError: not one for each completion.
    """
    values = func(**given)
    if inspect.isawaitable(values):
        values = asyncio.run(_awaited(values))
    rewards = [math.nan if value is None else float(value) for value in values]
    if len(rewards) != count:
        raise ValueError(f"{_name(func)} gave {len(rewards)} rewards for {count} completions")
    return rewards


async def _awaited(values: Any) -> Any:
    return await values


def _total(rewards: Sequence[float]) -> float:
    """Their sum without those that are NaN; NaN if all are."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) if known else math.nan
