"""An Engine whose loop is turned by hand: a model of integers, and an updater over a model of six tensors.

Passes overlap, as on a GPU: each is taken in once the next one was launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollout_engine import messages
from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.engine import Engine
from rollout_engine.sampling import SamplingParams
from rollout_engine.scheduler import Scheduler
from rollout_engine.uploads import Uploads
from tests.unit.scheduler.fake_model import FakeRunner, limits
from tests.unit.weight_updater.tiny_target import TinyTarget, make_updater, manifest_of, pack, weights
from weight_updater.requests import BeginUpdate, FromTensor, Inflight, Path, Staging
from weight_updater.shm import SharedSegment


class News:
    """The channel to a front: keeps what the engine says. on_reply: called with each call's id."""

    def __init__(self, on_reply: Callable[[int], None]) -> None:
        self.on_reply = on_reply
        self.replies: dict[int, messages.Reply] = {}
        self.outputs: list[messages.SequenceOutput] = []
        self.refused: list[messages.RequestRefused] = []
        self.taken: list[int] = []  # slots of the ring

    def send(self, *events: messages.Event) -> None:
        for event in events:
            if isinstance(event, messages.Reply):
                self.replies[event.call_id] = event
                self.on_reply(event.call_id)
            elif isinstance(event, messages.Outputs):
                self.outputs += event.outputs
            elif isinstance(event, messages.ChunkTaken):
                self.taken.append(event.slot)
            elif isinstance(event, messages.RequestRefused):
                self.refused.append(event)


class Launched:
    """A pass in flight."""

    def __init__(self, found: StepResult) -> None:
        self._found = found

    def result(self) -> StepResult:
        return self._found


class OverlappingRunner:
    """Stands for a ModelRunner. resumed: the memory that was, in that order."""

    overlap = True

    def __init__(self, target: TinyTarget) -> None:
        self.target = target
        self.model = FakeRunner(limits())
        self.forward_counts: dict[str, int] = {}
        self.resumed: list[str] = []

    def launch(self, batch: ScheduleBatch) -> Launched:
        return Launched(self.model.forward(batch))

    def release_weights(self) -> int:
        return 0

    release_kv = release_graphs = release_weights

    def resume_weights(self) -> int:
        self.resumed.append("weights")
        return 0

    def resume_kv(self) -> int:
        self.resumed.append("kv_cache")
        return 0

    def resume_graphs(self) -> int:
        self.resumed.append("graphs")
        return 0


class PromptPool:
    """Stands for the pool of workers: each function has run once it is handed over, so that what takes how
    many turns is no matter of when a thread gets a core.
    """

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - the worker's boundary
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass


class HandEngine:
    """An engine, and calls to it that wait for nothing."""

    def __init__(
        self,
        *,
        min_version: int = 0,
        version: int = 4,
        num_slots: int = 1,
        runner: Callable[[TinyTarget], OverlappingRunner] | None = None,
    ) -> None:
        self.target = TinyTarget()
        self.updater = make_updater(self.target, device_staging=True, version=version)
        self.runner = (runner or OverlappingRunner)(self.target)
        self.news = News(self._look)
        self.was_in_flight: dict[int, bool] = {}  # a pass, when a call was answered
        channel: Any = self.news
        fake: Any = self.runner
        info: Any = lambda: None  # noqa: E731 - nobody asks
        self.scheduler = Scheduler(limits(), self.updater.adapters.book)
        self.engine = Engine(
            runner=fake,
            scheduler=self.scheduler,
            updater=self.updater,
            channel=channel,
            uploads=Uploads(channel, num_slots, 4096, 10.0),
            info=info,
            min_version=min_version,
            max_waiting=64,
            copy_bytes_per_second=1e9,
        )
        self.segment = SharedSegment.create(manifest_of(weights(1)).packed_offsets()[1])
        self._num_calls = 0

    def _look(self, call_id: int) -> None:
        self.was_in_flight[call_id] = self.engine._gate.in_flight

    def work_promptly(self) -> None:
        """From here on each worker is done by the next turn."""
        self.engine._flows._pool.shutdown()
        self.engine._flows._pool = PromptPool()  # type: ignore[assignment]

    def close(self) -> None:
        self.engine._flows.close()
        self.updater.close()
        self.engine._uploads.close()
        self.segment.close()
        self.segment.unlink()

    def put(self, command: messages.Command) -> None:
        self.engine._inbox.put(command)

    def call(self, kind: type[messages.Call], *fields: Any, **named: Any) -> int:
        """Send a call; returns its id."""
        self._num_calls += 1
        self.put(kind(*fields, call_id=self._num_calls, **named))
        return self._num_calls

    def submit(self, name: str, max_tokens: int = 8, **fields: Any) -> None:
        params = SamplingParams(seed=7, max_tokens=max_tokens)
        self.put(messages.SubmitRequest(name, [3, 5, 8], params, **fields))

    def begin(self, version: int, **fields: Any) -> BeginUpdate:
        """A request for an update whose bytes then wait in `segment`."""
        tensors = weights(version)
        pack(self.segment, tensors)
        asked: dict[str, Any] = {"path": Path.TENSOR, "manifest": manifest_of(tensors)}
        asked |= {"staging": Staging.DEVICE, "inflight": Inflight.KEEP}
        return BeginUpdate(version=version, **asked | fields)

    def push(self, version: int, **fields: Any) -> int:
        """An update in one call."""
        tensor = FromTensor("", self.segment.descriptor)
        return self.call(messages.Update, tensor=tensor, begin=self.begin(version, **fields))

    def turn_until(self, predicate: Callable[[], object], seconds: float = 20.0) -> None:
        """Turn the loop until something holds that workers of the pool may have to do first."""
        deadline = time.monotonic() + seconds
        while not predicate():
            assert time.monotonic() < deadline, f"it did not come within {seconds:g} s"
            self.engine.turn()
            time.sleep(0.0005)

    def reply(self, call_id: int) -> messages.Reply:
        """Turn until a call is answered."""
        self.turn_until(lambda: call_id in self.news.replies)
        return self.news.replies[call_id]

    def done(self, call_id: int) -> dict[str, Any]:
        """Turn until a call is answered, which it must be without an error."""
        reply = self.reply(call_id)
        assert reply.error is None, reply.error
        result: dict[str, Any] = reply.result
        return result

    def tokens(self, name: str) -> list[int]:
        """What was told of a request's first completion."""
        told = [output for output in self.news.outputs if (output.request_id, output.index) == (name, 0)]
        return [token for output in told for token in output.token_ids]
