"""A trainer that dies by SIGKILL in the middle of a push; run as a process of its own.

    python -m tests.wire.half_sender ADDRESS MODEL_DIR PATH STAGING WORK_DIR

It begins an update, sends about half of the bytes (or, where bytes are fetched at once, all of them
without a commit), prints the update's id and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainers_adapters.clients import WeightsClient
from trainers_adapters.send_disk import DiskDirectory
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.send_ipc import IpcArena
from trainers_adapters.send_tensor import TensorStream
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.checksum import checksum
from weight_updater.requests import BeginUpdate, Manifest, Staging, TensorSpec


class DyingSource:
    """Tensors of a file, times 3; yields half of them, then the process is gone."""

    at_half: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, model_dir: Path) -> None:
        self._named = {
            name: tensor * 3 for name, tensor in load_file(model_dir / "model.safetensors").items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self._named.items()):
            if index == len(self._named) // 2:
                self.at_half()
            yield item

    def manifest(self, *, checksums: bool = True) -> Manifest:
        return Manifest(
            tuple(
                TensorSpec(name, "float32", tuple(tensor.shape), checksum(tensor))
                for name, tensor in self._named.items()
            )
        )


def main(address: str, model_dir: str, path: str, staging: str, work_dir: str) -> None:
    source = DyingSource(Path(model_dir))
    sender: Sender = {
        "disk": lambda: DiskDirectory(work_dir),
        "tensor": lambda: TensorStream(chunk_bytes=1024),
        "ipc": IpcArena,
        "distributed": lambda: BroadcastGroup(bucket_bytes=4096, group_timeout_s=60.0),
    }[path]()
    client = WeightsClient(address)
    outgoing = Outgoing(source, source.manifest(), deadline=time.monotonic() + 60.0)
    fields = {"manifest": outgoing.manifest} | sender.stage(outgoing, [client])
    begun = client.begin(BeginUpdate(path=sender.path, staging=Staging(staging), **fields))
    print(begun.update_id, flush=True)

    def die() -> None:
        """A lease that was short from the start might end before a busy machine comes this far."""
        client.renew(begun.update_id, lease_s=0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    source.at_half = die
    if path == "distributed":
        threading.Thread(
            target=sender.send,
            args=(client, begun, Outgoing(source, outgoing.manifest, time.monotonic() + 60.0)),
        ).start()
        sender.beside(begun, outgoing)
    else:
        client_deadline = Outgoing(source, outgoing.manifest, deadline=time.monotonic() + 60.0)
        sender.send(client, begun, client_deadline)
    die()


if __name__ == "__main__":
    main(*sys.argv[1:])
