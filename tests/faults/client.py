"""A client that generates until it is told to stop, and reports what it got. Forked by the nursery."""

from __future__ import annotations

import json
import random
import socket
import time

from tests.faults.weights import PROMPT
from trainers_adapters import RolloutClient, RollsyncError


def main(talk: socket.socket, *, address: str, seed: int, adapter: str) -> int:
    """One greedy stream after another, of the base model or of the adapter; each is reported as a line of
    JSON: adapter, spans, tokens, finish, error.
    """
    rng, choice = random.Random(seed), random.Random(seed + 1)
    talk.setblocking(False)
    with RolloutClient(address) as rollout:
        while True:
            record = _one(rollout, rng, choice.choice(["", adapter]))
            talk.setblocking(True)
            talk.sendall(json.dumps(record).encode() + b"\n")
            talk.setblocking(False)
            try:
                talk.recv(64)
                break
            except BlockingIOError:
                pass
            if record["error"]:
                time.sleep(0.02)
    return 0


def _one(rollout: RolloutClient, rng: random.Random, adapter: str) -> dict:
    tokens: list[int] = []
    spans: list[tuple[int, int, int, str, int]] = []
    finish = error = ""
    cancel_at = rng.choice([0, 0, 3])
    try:
        stream = rollout.generate_stream(
            PROMPT,
            adapter=adapter,
            max_tokens=rng.choice([8, 48]),
            temperature=0.0,
            ignore_eos=True,
            timeout_s=20.0,
        )
        for part in stream:
            spans += [(span.start, *span.label) for span in part.spans]
            tokens += part.token_ids
            finish, error = part.finish_reason, part.error
            if cancel_at and len(tokens) >= cancel_at:
                finish = finish or "cancelled"
                break
        stream.close()
    except RollsyncError as failed:
        error = failed.reason or failed.code
    return {"adapter": adapter, "tokens": tokens, "spans": spans, "finish": finish, "error": error}
