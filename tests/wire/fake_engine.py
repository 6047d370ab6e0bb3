"""A hand-written engine process for tests of the front: scripted tokens, no torch, no model.

Run as `python -m tests.wire.fake_engine SCRIPT --fd N`, where SCRIPT is a JSON object (fake_replies.Script);
every command that arrives is written to its `log`, one JSON line each. Completion `i` of a request is
`tokens` rotated by i, one token a step.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
import zlib
from dataclasses import replace
from typing import Any

import msgspec

from rollout_engine import messages as m
from rollout_engine.records import WorkCounts
from tests.wire.fake_replies import (
    CONTEXT_LENGTH,
    EOS,
    FIRST_VERSION,
    LAYOUT,
    Running,
    Script,
    begin_reply,
    engine_info,
    listed,
    sequence_record,
    update_record,
    update_reply,
    weight_bytes,
)
from weight_updater.requests import UpdateReply, UpdateState
from weight_updater.shm import SharedSegment

REFUSED_TOKEN, FAILING_TOKEN = 99, 98  # as the first token of a prompt


class FakeEngine:
    def __init__(self, script: Script, sock: socket.socket) -> None:
        self.script = script
        self.sock = sock
        self.received = bytearray()
        self.running: list[Running] = []
        self.version, self.commits, self.steps, self.generated = FIRST_VERSION, 0, 0, 0
        self.work = WorkCounts()
        self.silent = False
        self.status, self.reason, self.paused_by = script.status, script.reason, ""
        self.released: list[str] = []
        self.uploads: dict[int, dict[str, Any]] = {}
        self.later: list[tuple[float, m.Reply]] = []
        self.last_snapshot: tuple[float, m.Snapshot | None] = (0.0, None)
        self.ring = SharedSegment.create(script.ring_slots * script.ring_slot_bytes)
        self.log = os.open(script.log, os.O_WRONLY | os.O_APPEND) if script.log else None
        self.stop_at: float | None = None

    # ---------------------------------------------------------------- the socket

    def send(self, event: m.Event) -> None:
        if not self.silent:
            payload = m.encoder.encode(event)
            self.sock.sendall(len(payload).to_bytes(4, "little") + payload)

    def frames(self, timeout_s: float) -> list[bytes]:
        """Whole frames that have come; exits when the front is gone."""
        if not select.select([self.sock], [], [], timeout_s)[0]:
            return []
        data = self.sock.recv(1 << 20)
        if not data:
            self.leave(0)
        self.received += data
        frames = []
        while len(self.received) >= 4:
            end = 4 + int.from_bytes(self.received[:4], "little")
            if len(self.received) < end:
                break
            frames.append(bytes(self.received[4:end]))
            del self.received[:end]
        return frames

    def leave(self, code: int) -> None:
        self.note({"type": "exit"})
        self.ring.unlink()
        os._exit(code)

    def note(self, entry: dict[str, Any]) -> None:
        if self.log is not None:
            os.write(self.log, (json.dumps(entry) + "\n").encode())

    # ---------------------------------------------------------------- the loop

    def run(self) -> None:
        while not (first := self.frames(1.0)):
            pass
        config, *commands = first
        self.note(
            {
                "type": "config",
                "config": json.loads(config),
                "env": [key for key in os.environ if key.startswith("ROLLSYNC_")],
                "ring": self.ring.descriptor.name,
            }
        )
        if self.script.exit_at_start is not None:
            self.leave(self.script.exit_at_start)
        if self.script.fail_start:
            self.send(m.Failed(m.ErrorInfo("engine", "MODEL_INVALID", self.script.fail_start)))
            self.leave(1)
        self.send(
            m.Ready(
                engine_info(self.steps),
                self.ring.descriptor.name,
                self.script.ring_slots,
                self.script.ring_slot_bytes,
            )
        )
        while True:
            for command in commands:
                self.handle(m.command_decoder.decode(command))
            self.step()
            self.snapshot()
            now = time.monotonic()
            for due, reply in [entry for entry in self.later if entry[0] <= now]:
                self.later.remove((due, reply))
                self.send(reply)
            if self.stop_at is not None and (not self.running or now >= self.stop_at):
                self.leave(0)
            commands = self.frames(self.script.step_s if self.running else 0.02)

    def snapshot(self) -> None:
        snapshot = m.Snapshot(
            status="paused" if self.paused_by and self.status == "serving" else self.status,
            reason=self.reason,
            weight_version=self.version,
            commit_sequence=self.commits,
            num_running=len(self.running),
            num_waiting=0,
            num_free_pages=100 - len(self.running),
            num_cached_pages=0,
            num_total_pages=100,
            open_update_id="",
            open_update_state="",
            num_steps=self.steps,
            num_generated_tokens=self.generated,
            paused_by=self.paused_by,
            released_tags=self.released,
            work=replace(self.work, passes={"eager": self.steps}),
        )
        at, last = self.last_snapshot
        age = time.monotonic() - at
        if age > 0.5 or (age > 0.05 and snapshot != last):
            self.last_snapshot = time.monotonic(), snapshot
            self.send(snapshot)

    # ---------------------------------------------------------------- generation

    def step(self) -> None:
        if self.paused_by or not self.running:
            return
        self.steps += 1
        outputs = [output for one in list(self.running) if (output := self.sample(one)) is not None]
        if outputs:
            self.send(m.Outputs(outputs))

    def sample(self, one: Running) -> m.SequenceOutput | None:
        params, tokens = one.request.params, self.script.tokens
        limit = CONTEXT_LENGTH - len(one.request.token_ids)
        limit = limit if params.max_tokens is None else params.max_tokens
        reason = "length" if limit == 0 else ""
        error = ""
        if limit:
            token = tokens[(len(one.kept) + one.index) % len(tokens)]
            one.kept.append((token, float("nan") if len(one.kept) == self.script.nan_at else -0.5))
            self.generated += 1
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
            if token in stops:
                reason = "stop"
            elif len(one.kept) >= limit:
                reason = "length"
            if one.request.token_ids[0] == FAILING_TOKEN and len(one.kept) == 2:
                reason, error = "error", "non-finite logits"
        return self.output(one, reason, error)

    def output(self, one: Running, reason: str, error: str = "") -> m.SequenceOutput | None:
        if reason:
            self.running.remove(one)
        elif not one.request.stream:
            return None
        prompt = one.request.token_ids
        start, one_new = one.sent, one.kept[one.sent :]
        spans = [m.Span(start, self.version_at(start), self.commits)]
        for at in range(start + 1, len(one.kept)):
            if self.version_at(at) != spans[-1].weight_version:
                spans.append(m.Span(at, self.version_at(at), self.commits))
        wants_prompt = one.request.params.prompt_logprobs and start == 0
        top = one.request.params.top_logprobs
        one.sent = len(one.kept)
        return m.SequenceOutput(
            request_id=one.request.request_id,
            index=one.index,
            token_ids=[token for token, _ in one_new],
            logprobs=[logprob for _, logprob in one_new],
            spans=spans if one_new or wants_prompt else [],
            finish_reason=reason,
            error=error,
            top_logprobs=[[(t + i, -0.5 - i) for i in range(top)] for t, _ in one_new] if top else [],
            prompt_logprobs=[-float(i) for i in prompt[1:]] if wants_prompt else None,
            num_prompt_tokens=len(prompt),
            hidden_states=[bytes(16) for _ in one_new] if one.request.return_hidden_states else [],
            weight_version=self.version,
            record=sequence_record([self.version_at(i) for i in range(len(one.kept))]) if reason else None,
        )

    def version_at(self, position: int) -> int:
        return self.version + (position // self.script.version_step if self.script.version_step else 0)

    def end(self, request_ids: list[str], reason: str, index: int | None = None) -> None:
        outputs = [
            self.output(one, reason)
            for one in list(self.running)
            if one.request.request_id in request_ids and index in (None, one.index)
        ]
        if outputs:
            self.send(m.Outputs([output for output in outputs if output is not None]))

    # ---------------------------------------------------------------- commands

    def handle(self, command: m.Command) -> None:
        name = type(command).__name__
        fields = msgspec.to_builtins(command, enc_hook=listed)
        if isinstance(command, m.SubmitRequest):  # without what is long
            fields = {"request_id": command.request_id, "stream": command.stream}
            fields |= {"seed": command.params.seed, "token_ids": command.token_ids[:16]}
        self.note({**fields, "type": name})
        if self.script.die_on == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.script.silent_on == name:
            self.silent = True
        match command:
            case m.SubmitRequest():
                self.submit(command)
            case m.AbortRequests():
                self.end(command.request_ids, "abort")
            case m.FinishSequence():
                self.end([command.request_id], "stop", command.index)
            case m.Chunk():
                self.chunk(command)
            case m.EndOfChunks():
                self.end_of_chunks(command)
            case m.Shutdown():
                self.stop_at = time.monotonic() + command.grace_s
            case m.Update() if command.tensor is not None and command.tensor.segment is None:
                self.uploads[command.call_id] = {"update": command, "tensors": {}, "chunks": 0, "bytes": 0}
            case _:
                self.call(command, name)

    def submit(self, request: m.SubmitRequest) -> None:
        if request.min_version > self.version:
            error = m.ErrorInfo("engine", "VERSION_TOO_OLD", f"live version is {self.version}")
        elif self.status == "not_serving":
            error = m.ErrorInfo("engine", "NOT_SERVING", self.reason)
        elif request.token_ids[0] == REFUSED_TOKEN:
            error = m.ErrorInfo("engine", "EXCEEDS_KV_POOL", "needs 20 pages of 16")
        else:
            self.running += [Running(request, index) for index in range(request.params.n)]
            for _ in range(request.params.n):
                self.work.admit(len(request.token_ids), 16 * (len(request.token_ids) // 16))
            return
        self.send(m.RequestRefused(request.request_id, error))

    def call(self, command: Any, name: str) -> None:
        if name in self.script.error_on:
            self.reply(command.call_id, name, None, m.ErrorInfo(*self.script.error_on[name]))
            return
        result = "nonsense" if name == self.script.bad_result_on else self.result(command)
        self.reply(command.call_id, name, result)

    def reply(self, call_id: int, name: str, result: Any, error: m.ErrorInfo | None = None) -> None:
        reply = m.Reply(call_id, msgspec.to_builtins(result), error, self.version, self.commits)
        self.last_snapshot = (0.0, None)  # the state goes first, as a real engine's does
        self.later.append((time.monotonic() + self.script.delay_on.get(name, 0.0), reply))

    def result(self, command: Any) -> Any:
        match command:
            case m.Pause():
                self.paused_by = "user"
                return {"num_running": len(self.running)}
            case m.Continue():
                self.paused_by = ""
            case m.FlushCache():
                return {"num_pages": 7}
            case m.ReleaseMemory():
                self.released = sorted({*self.released, *command.tags})
                return {"bytes": 100 * len(command.tags)}
            case m.ResumeMemory():
                self.released = [tag for tag in self.released if tag not in command.tags]
                return {"bytes": 100 * len(command.tags), "needs_update": "weights" in command.tags}
            case m.GetInfo():
                return engine_info(self.steps)
            case m.Begin():
                return begin_reply(command.request, self.version, self.commits)
            case m.Update() | m.Prepare() | m.Commit() | m.Rollback():
                return self.update_result(command)
            case m.AbortUpdate():
                return {"found": command.update_id == "open", "torn": False}
            case m.RenewLease():
                return {"lease_s": command.lease_s or 60.0}
            case m.ReleaseIpc():
                return {"num_released": len(command.allocation_ids)}
            case m.InitWeightsGroup():
                return {"backend": command.request.backend or "gloo"}
            case m.DestroyWeightsGroup():
                return {"found": command.group_name == "known"}
            case m.GetLayout():
                return LAYOUT
            case m.GetChecksums():
                names = command.names or [slot.name for slot in LAYOUT.placements]
                return {"names": names, "checksums": [2**64 - 1] * len(names), "folded": 2**63}
            case m.ReadWeight():
                start = command.slot * self.script.ring_slot_bytes
                self.ring.buf[start : start + command.nbytes] = weight_bytes(
                    command.name, command.offset, command.nbytes
                )
        return None

    def update_result(self, command: Any) -> UpdateReply:
        state, previous = UpdateState.RECEIVED, self.version
        if isinstance(command, m.Prepare):
            state = UpdateState.PREPARED
        elif isinstance(command, m.Rollback):
            state = UpdateState.ROLLED_BACK
        elif isinstance(command, m.Commit) or command.begin is not None:
            state = UpdateState.COMMITTED
            self.version, self.commits = self.version + 1, self.commits + 1
        update_id = getattr(command, "update_id", "")
        reply = update_reply(update_id, state, self.version, previous, self.commits)
        if state in (UpdateState.COMMITTED, UpdateState.ROLLED_BACK):
            self.send(m.UpdateEnded(update_record(reply)))
        return reply

    # ---------------------------------------------------------------- uploads

    def chunk(self, chunk: m.Chunk) -> None:
        upload = self.uploads.get(chunk.call_id)
        if upload is not None:
            start = chunk.slot * self.script.ring_slot_bytes
            tensor = upload["tensors"].setdefault(chunk.tensor, bytearray())
            tensor += bytes(max(0, chunk.offset + chunk.nbytes - len(tensor)))
            tensor[chunk.offset : chunk.offset + chunk.nbytes] = self.ring.buf[start : start + chunk.nbytes]
            upload["chunks"] += 1
            upload["bytes"] += chunk.nbytes
            time.sleep(self.script.chunk_s)
            if upload["chunks"] == self.script.fail_after_chunks:
                del self.uploads[chunk.call_id]
                error = m.ErrorInfo("refused", "BAD_CHUNK", "chunk overlaps")
                self.send(m.Reply(chunk.call_id, None, error, self.version, self.commits))
        self.send(m.ChunkTaken(chunk.call_id, chunk.slot))

    def end_of_chunks(self, end: m.EndOfChunks) -> None:
        upload = self.uploads.pop(end.call_id, None)
        if upload is None:
            return
        if not end.complete:
            error = m.ErrorInfo("refused", "PEER_LOST", "the stream broke")
            self.reply(end.call_id, "Update", None, error)
            return
        reply = self.update_result(upload["update"])
        checksum = 0
        for index in sorted(upload["tensors"]):
            checksum = zlib.crc32(upload["tensors"][index], checksum)
        changed = {"num_bytes": upload["bytes"], "received_checksum": checksum}
        self.reply(end.call_id, "Update", msgspec.to_builtins(reply) | changed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--receivers-fd", type=int)
    arguments = parser.parse_args()
    script = Script(**json.loads(arguments.script))
    FakeEngine(script, socket.socket(fileno=arguments.fd)).run()


if __name__ == "__main__":
    sys.exit(main())
