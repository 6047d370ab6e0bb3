"""The disk path, sending side: safetensors with checksums in a directory that the engines can read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, ClassVar

from trainers_adapters.clients import WeightsClient
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.requests import BeginReply, Path, UpdateReply
from weight_updater.safetensors_io import save_weights


class DiskDirectory(Sender):
    """Writes each push into `directory`, atomically, over the one before.

    Args:
        directory: below one of the engines' weights roots, under the same name on their hosts.
        max_shard_bytes: larger models are split into several files.
    """

    path: ClassVar[Path] = Path.DISK
    hashes_bytes: ClassVar[bool] = True

    def __init__(self, directory: FilePath | str, *, max_shard_bytes: int = 5 << 30) -> None:
        self._directory = os.path.abspath(directory)
        self._max_shard_bytes = max_shard_bytes

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        save_weights(
            self._directory,
            outgoing.source if outgoing.resident is None else outgoing.resident,
            max_shard_bytes=self._max_shard_bytes,
            checksums=outgoing.verify,
        )
        return {"directory": self._directory, "manifest": None, "manifest_digest": "", "checksums": ()}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return client.update_from_disk(begun.update_id, self._directory, timeout_s=outgoing.seconds_left)
