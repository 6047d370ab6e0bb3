"""Control: commands about the engine itself: pause, cache, memory, reading weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch

from rollout_engine import messages
from rollout_engine.errors import EngineError, Reason
from rollout_engine.flows import Flow, OffLoop, Until
from rollout_engine.gate import Gate
from rollout_engine.request_table import RequestTable, too_old
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.scheduler import Scheduler
from rollout_engine.uploads import Uploads
from weight_updater.checksum import fold_by_name
from weight_updater.errors import Reason as UpdateReason
from weight_updater.errors import UpdateRefused
from weight_updater.updater import WeightUpdater

MEMORY_TAGS = ("weights", "kv_cache", "graphs")


class Control:
    """Handlers of the commands that are neither requests nor updates. Called by the loop only."""

    def __init__(
        self,
        gate: Gate,
        scheduler: Scheduler,
        requests: RequestTable,
        runner: ModelRunner,
        updater: WeightUpdater,
        uploads: Uploads,
        min_version: int,
    ) -> None:
        self._gate = gate
        self._scheduler = scheduler
        self._requests = requests
        self._runner = runner
        self._updater = updater
        self._uploads = uploads
        self._min_version = min_version
        self.released_tags: list[str] = []
        self._num_continued = 0  # calls of ContinueGeneration
        self._graphs_wait = False  # they were to be resumed, but what they are captured over is not there

    # ------------------------------------------------------------ may it run?

    def not_serving(self) -> tuple[Reason, str] | None:
        """Why generation is refused now, or None."""
        if self.released_tags:
            tags = ", ".join(self.released_tags)
            return Reason.ASLEEP, f"memory is released ({tags}); call ResumeMemoryOccupation"
        if self._updater.torn_reason:
            return Reason.NOT_SERVING, f"{self._updater.torn_reason}; commit a full update"
        if self._updater.version < self._min_version:
            return (
                Reason.VERSION_TOO_OLD,
                f"weight version {self._updater.version} is live and this engine may serve from "
                f"{self._min_version} on; push the current weights",
            )
        return None

    def check_serving(self, min_version: int) -> None:
        """Raise EngineError if a request that asks for `min_version` cannot be served now."""
        if (why := self.not_serving()) is not None:
            raise EngineError(*why)
        if self._updater.version < min_version:
            raise too_old(min_version, self._updater.version)

    def check_awake(self) -> None:
        """Raise EngineError(ASLEEP) while the weights' memory is released."""
        if "weights" in self.released_tags:
            raise EngineError(
                Reason.ASLEEP, "the weights' memory is released; call ResumeMemoryOccupation(weights) first"
            )

    # ------------------------------------------------------------ pause

    def pause(self, command: messages.Pause) -> Flow:
        """Stop forward passes; replies when none runs any more."""
        if command.mode == "wait":
            before = self._num_continued
            self._gate.num_draining += 1
            try:
                yield Until(
                    lambda: (
                        not self._scheduler.started
                        or self._gate.paused_by_user
                        or self._num_continued > before
                    )
                )
            finally:
                self._gate.num_draining -= 1
            if self._num_continued > before:
                raise EngineError(
                    Reason.BUSY,
                    "ContinueGeneration came while this pause waited for the sequences in flight, so nothing "
                    "is paused",
                )
            if self._scheduler.started:
                raise EngineError(
                    Reason.BUSY,
                    f"pause mode wait would never end: generation is paused already, with "
                    f"{len(self._scheduler.started)} sequences in flight; continue generation first, or use "
                    f"keep, abort or retract",
                )
        elif command.mode == "abort":
            for sequence in self._scheduler.live:
                self._requests.finish(sequence, "abort", "", self._updater.version)
        elif command.mode == "retract":
            self._scheduler.preempt_all()
        elif command.mode != "keep":
            raise EngineError(Reason.INVALID_REQUEST, f"unknown pause mode {command.mode!r}")
        self._gate.paused_by_user = True
        yield Until(lambda: not self._gate.in_flight)
        return {"num_running": len(self._scheduler.running)}

    def resume(self, command: messages.Continue) -> None:
        """Undo pause, and what would be one."""
        self._gate.paused_by_user = False
        self._num_continued += 1

    # ------------------------------------------------------------ cache and memory

    def flush_cache(self, command: messages.FlushCache) -> dict[str, int]:
        """Drop the prefix cache. Sequences that wait hold none of it, those that were retracted neither."""
        if self._scheduler.running:
            raise EngineError(
                Reason.BUSY,
                f"FlushCache cannot drop pages that {len(self._scheduler.running)} sequences hold; abort or "
                f"retract them (PauseGeneration), or wait",
            )
        return {"num_pages": self._scheduler.flush()}

    def release_memory(self, command: messages.ReleaseMemory) -> dict[str, int]:
        """Give memory back; addresses are kept for when it is resumed."""
        tags = self._known_tags(command.tags or list(MEMORY_TAGS))
        self._check_idle("ReleaseMemoryOccupation")
        if "weights" in tags and self._updater.open is not None:
            raise EngineError(
                Reason.BUSY, f"update {self._updater.open.update_id!r} is open; commit or abort it first"
            )
        released = 0
        for tag in tags:
            if tag in self.released_tags:
                continue
            if tag == "weights":
                self._updater.discard()
                if self._updater.owns_memory:  # an adopted arena is the trainer's to free
                    released += self._runner.release_weights()
                released += self._updater.buffers.release()
            elif tag == "kv_cache":
                self._scheduler.flush()
                released += self._runner.release_kv()
            else:
                released += self._runner.release_graphs()
            self.released_tags.append(tag)
        return {"bytes": released}

    def resume_memory(self, command: messages.ResumeMemory) -> dict[str, Any]:
        """Take memory again. Weights come back without contents: a full update must commit.

        Graphs are captured with passes over weights and KV pool, so they wait until both are there.
        """
        tags = set(self._known_tags(command.tags or list(self.released_tags)))
        if self._graphs_wait:
            tags.add("graphs")
        if "graphs" in tags and any(tag in self.released_tags for tag in set(MEMORY_TAGS) - tags):
            tags.remove("graphs")
            self._graphs_wait = "graphs" in self.released_tags
        try:
            resumed = sum(self._resume(tag) for tag in sorted(tags, key=MEMORY_TAGS.index))
        except torch.OutOfMemoryError as error:
            raise UpdateRefused(
                UpdateReason.NO_MEMORY,
                f"the device has not enough memory free to resume {', '.join(sorted(tags))}; free some, and "
                f"call ResumeMemoryOccupation again ({error})",
            ) from error
        return {"bytes": resumed, "needs_update": bool(self._updater.torn_reason)}

    def _resume(self, tag: str) -> int:
        """Take the memory of one tag again; bytes taken, 0 if it was not released.

        Graphs come last, since they are captured over the others.
        """
        resumed = 0
        if tag not in self.released_tags:
            return 0
        if tag == "weights":
            needed = self._runner.resume_weights()
            resumed += needed if self._updater.owns_memory else 0
            resumed += self._updater.buffers.resume()
        elif tag == "kv_cache":
            resumed += self._runner.resume_kv()
        else:
            resumed += self._runner.resume_graphs()
            self._graphs_wait = False
        self.released_tags.remove(tag)
        return resumed

    def _known_tags(self, tags: list[str]) -> list[str]:
        if unknown := [tag for tag in tags if tag not in MEMORY_TAGS]:
            raise EngineError(
                Reason.INVALID_REQUEST,
                f"unknown memory tag {unknown[0]!r}; there are {', '.join(MEMORY_TAGS)}",
            )
        return tags

    def _check_idle(self, call: str) -> None:
        if not self._scheduler.is_idle:
            raise EngineError(
                Reason.BUSY,
                f"{call} needs an idle engine; {len(self._scheduler.running)} sequences run and "
                f"{len(self._scheduler.waiting)} wait: abort them, or wait",
            )

    # ------------------------------------------------------------ adapters

    def remove_adapter(self, command: messages.RemoveAdapter) -> dict[str, int]:
        """Let go of an adapter; its slot is free for another."""
        book, opened, name = self._updater.adapters.book, self._updater.open, command.name
        if book.get(name) is None:
            raise EngineError(Reason.UNKNOWN_ADAPTER, f"no adapter {name!r}: {book.names()}")
        if opened is not None and opened.adapter is not None and opened.adapter.name == name:
            raise EngineError(
                Reason.BUSY,
                f"update {opened.update_id!r} of adapter {name!r} is open; end it first",
            )
        users = [sequence for sequence in self._scheduler.live if sequence.adapter == name]
        if users and not command.abort:
            raise EngineError(
                Reason.BUSY,
                f"{len(users)} sequences use adapter {name!r}; wait for them, or say abort=true to end them",
            )
        for sequence in users:
            self._requests.finish(sequence, "abort", "", self._updater.version)
        version = self._updater.adapters.remove(name)
        self._scheduler.on_commit(self._updater.commit_sequence)
        return {"version": version, "num_aborted": len(users)}

    def _adapters(self) -> list[messages.AdapterState]:
        """Those that are held, by name."""
        book = self._updater.adapters.book
        if not book.held:
            return []
        users = Counter(sequence.adapter for sequence in self._scheduler.live)
        return [
            messages.AdapterState(
                name=held.name,
                version=held.version,
                rank=held.rank,
                base_version=held.base_version,
                stale=book.is_stale(held),
                num_sequences=users[held.name],
            )
            for held in sorted(book.held.values(), key=lambda held: held.name)
        ]

    # ------------------------------------------------------------ weights, read only

    def checksums(self, command: messages.GetChecksums) -> dict[str, Any]:
        """Checksums of what lies in the slots."""
        self.check_awake()
        self._check_names(command.names)
        by_name = self._updater.checksums(command.names)
        folded = fold_by_name(by_name)
        return {"names": list(by_name), "checksums": list(by_name.values()), "folded": folded}

    def read_weight(self, command: messages.ReadWeight) -> dict[str, Any]:
        """Copy a piece of a live tensor into an upload slot."""
        self.check_awake()
        self._check_names([command.name])
        place = self._runner.target.arena.placements[command.name]
        data = self._runner.target.slot(command.name).reshape(-1).view(torch.uint8)
        piece = data[command.offset : command.offset + command.nbytes]
        self._uploads.front_ring.slot(command.slot, piece.numel()).copy_(piece)
        return {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "nbytes": piece.numel(),
            "total_bytes": data.numel(),
        }

    def _check_names(self, names: list[str]) -> None:
        placements = self._runner.target.arena.placements
        if unknown := [name for name in names if name not in placements]:
            raise EngineError(
                Reason.UNKNOWN_NAME,
                f"the model has no weight {unknown[0]!r} ({len(unknown)} unknown); it has, for example, "
                f"{next(iter(placements))!r}",
            )

    # ------------------------------------------------------------ process groups

    def init_group(self, command: messages.InitWeightsGroup) -> Flow:
        """Join a process group on a worker thread; generation goes on meanwhile."""
        backend = yield OffLoop(lambda: self._updater.groups.init(command.request))
        return {"backend": backend}

    def destroy_group(self, command: messages.DestroyWeightsGroup) -> Flow:
        """Leave a process group."""
        found = yield OffLoop(lambda: self._updater.groups.destroy(command.group_name))
        return {"found": found}

    # ------------------------------------------------------------ state

    def snapshot(self, num_steps: int, num_generated_tokens: int) -> messages.Snapshot:
        """The engine's state now."""
        why = self.not_serving()
        opened = self._updater.open
        return messages.Snapshot(
            status="not_serving" if why else "paused" if self._gate.paused_by else "serving",
            reason=why[1] if why else "",
            weight_version=self._updater.version,
            commit_sequence=self._updater.commit_sequence,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_pages=self._scheduler.pool.num_free,
            num_cached_pages=self._scheduler.prefix.num_idle,
            num_total_pages=self._scheduler.pool.num_pages,
            open_update_id=opened.update_id if opened else "",
            open_update_state=str(opened.state) if opened else "",
            open_update_version=opened.next_version if opened and opened.adapter is None else 0,
            num_steps=num_steps,
            num_generated_tokens=num_generated_tokens,
            received_bytes=opened.received_bytes if opened else 0,
            total_bytes=opened.total_bytes if opened else 0,
            paused_by=self._gate.paused_by,
            released_tags=list(self.released_tags),
            adapters=self._adapters(),
            work=dataclasses.replace(self._scheduler.work, passes=dict(self._runner.forward_counts)),
        )
