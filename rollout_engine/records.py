"""What the engine tells of its own work, for metrics, logs and whoever watches. No torch.

Everything here is made once per sequence, per update or per snapshot, never per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True)
class WorkCounts:
    """What the engine has done since its start; every count only grows.

    num_prompt_tokens: of sequences that were admitted, each counted once, whatever became of it later.
    num_cached_tokens: of these, found in the prefix cache.
    num_prefix_hits: admitted sequences of whose prompt at least one page was found.
    num_preemptions: sequences whose pages were taken away, to be computed anew.
    passes: forward passes by the runner that did them.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_admitted: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    passes: dict[str, int] = field(default_factory=dict)

    def admit(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A sequence runs for the first time."""
        self.num_admitted += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self.num_prefix_hits += num_cached_tokens > 0


class AdapterState(msgspec.Struct, frozen=True):
    """An adapter that is held. stale: other base weights are live than those that it was pushed over."""

    name: str
    version: int
    rank: int
    base_version: int
    stale: bool
    num_sequences: int  # that use it, running or waiting


class KvArithmetic(msgspec.Struct, frozen=True):
    """Bytes behind the page pool (see kv/capacity.py)."""

    pre_model_load_bytes: int
    available_bytes: int
    reserved_bytes: int
    preloaded_weights_bytes: int
    kv_bytes: int
    bytes_per_page: int


class SequenceRecord(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that has ended; part of its last output.

    first_token_at: time.monotonic() when its first token was there, which both processes read alike; 0.0 if
        nothing was sampled.
    versions: (weight version, number of tokens that it sampled), in the order of the tokens.
    """

    first_token_at: float
    versions: list[tuple[int, int]]


class UpdateRecord(msgspec.Struct, frozen=True):
    """An update that has ended: committed, rolled_back, refused or torn.

    staging: auto where an update was refused before it was agreed.
    reason, message: of the error; empty without one.
    version, commit_sequence: live after the end. next_version: what it was to bring, 0 if nothing was agreed.
        All of the base weights; adapter_version is what an update of `adapter` committed, 0 for none.
    seconds: by stage; see STAGES. Stages that did not happen are left out.
    ended_at: Unix time.
    """

    update_id: str
    path: str
    staging: str
    end: str
    version: int
    commit_sequence: int
    ended_at: float
    seconds: dict[str, float]
    reason: str = ""
    message: str = ""
    next_version: int = 0
    previous_version: int = 0
    num_tensors: int = 0
    num_changed: int = 0
    num_bytes: int = 0
    num_aborted: int = 0
    num_recomputed: int = 0
    num_kept: int = 0
    graphs_recaptured: int = 0
    adapter: str = ""
    adapter_version: int = 0


STAGES = (
    "whole",
    "begin",
    "transfer",
    "verify",
    "wait",
    "pause",
    "commit",
    "write",
    "finalise",
    "recapture",
)
"""Keys of UpdateRecord.seconds. They are no partition: commit holds wait and pause, pause holds write,
finalise and recapture (and the transfer, with staging none)."""
