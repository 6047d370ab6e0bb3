"""A trainer on a GPU, as a process that obeys tests (tests/children.py).

python -m tests.gpu.trainer MODEL_DIR [DEVICE]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout_engine.models.weights import model_layout
from tests.children import obey
from tests.tiny import load_reference
from trainers_adapters import (
    AdoptedArena,
    BroadcastGroup,
    DiskDirectory,
    IpcArena,
    ModuleSource,
    RollsyncError,
    TensorSegment,
    TensorStream,
    WeightsClient,
    push_weights,
)
from trainers_adapters.cuda_lending import CudaLending
from trainers_adapters.sending import Sender
from weight_updater.checksum import checksum
from weight_updater.requests import BeginUpdate, Manifest, Staging
from weight_updater.requests import Path as Way


class Trainer:
    """Commands are its public methods."""

    def __init__(self, model_dir: str, device: str = "cuda:0") -> None:
        torch.cuda.set_device(device)
        self._dir = model_dir
        self._device = device
        self._model = load_reference(Path(model_dir)).to(device, torch.bfloat16)
        self._arena = IpcArena()
        self._senders: dict[str, Sender] = {"ipc": self._arena}
        self._adopted: AdoptedArena | None = None
        self._client: WeightsClient | None = None

    def connect(self, address: str) -> None:
        self._client = WeightsClient(address)
        if self._adopted is not None:
            self._adopted.connect(self._client)

    def train(self, seed: int) -> None:
        """Write new values in place, on the current stream."""
        generator = torch.Generator(device=self._device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)

    def load(self, directory: str) -> None:
        """Write the values of a checkpoint in place."""
        stored = load_file(Path(directory) / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(stored[name])

    def poison(self) -> None:
        """One value of the last tensor becomes NaN."""
        with torch.no_grad():
            list(self._model.parameters())[-1].view(-1)[-1] = float("nan")

    def reallocate(self) -> None:
        """Every parameter gets other memory; the old goes back to the driver."""
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def stride(self) -> None:
        """One parameter's memory is transposed."""
        parameter = next(p for p in self._model.parameters() if p.dim() == 2)
        parameter.data = parameter.data.t().contiguous().t()
        assert not parameter.is_contiguous()

    def to(self, dtype: str) -> None:
        self._model.to(getattr(torch, dtype))

    def push(self, **options: Any) -> dict[str, Any]:
        """Push through the arena that is kept; what was reported, or why it was refused."""
        return self.push_by("ipc", **options)

    def push_by(self, path: str, **options: Any) -> dict[str, Any]:
        """Push by a sender that is kept: ipc, disk:DIRECTORY, stream, segment, gloo or nccl."""
        kind, _, directory = path.partition(":")
        if path not in self._senders:
            make: dict[str, Callable[[], Sender]] = {
                "disk": lambda: DiskDirectory(directory),
                "stream": lambda: TensorStream(chunk_bytes=64 << 10),
                "segment": TensorSegment,
                "gloo": lambda: BroadcastGroup(backend="gloo", bucket_bytes=128 << 10),
                "nccl": lambda: BroadcastGroup(backend="nccl", bucket_bytes=128 << 10),
            }
            self._senders[path] = make[kind]()
        try:
            report = push_weights(ModuleSource(self._model), self._client, via=self._senders[path], **options)
        except RollsyncError as error:
            return {"reason": error.reason, "message": error.message}
        (reply,) = report.replies.values()
        return {
            "version": report.version,
            "commit_sequence": reply.commit_sequence,
            "num_tensors": reply.num_tensors,
            "num_changed": reply.num_changed,
            "verified": reply.verified,
            "staging": str(reply.staging),
            "graphs_kept": reply.graphs_kept,
            "graphs_recaptured": reply.graphs_recaptured,
            "num_kept": reply.num_kept,
            "seconds": report.seconds,
        }

    def push_many(self, num_updates: int, first_seed: int) -> list[dict[str, Any]]:
        """Train and push that often by ipc, by two stagings in turn, beside sequences that go on."""
        reports = []
        for seed in range(first_seed, first_seed + num_updates):
            self.train(seed)
            staging = ("none", "device")[seed % 2]
            reports.append(self.push(staging=staging, inflight="keep", verify=seed % 3 != 0))
        return reports

    def push_wrong_checksum(self) -> str:
        """Promise another value than lies there; the reason of the refusal."""
        source = ModuleSource(self._model)
        lending = CudaLending()
        lent = lending.lend(source, source.manifest(checksums=False))
        manifest = source.manifest()
        wrong = replace(manifest.tensors[3], checksum=manifest.tensors[3].checksum ^ 1)
        manifest = Manifest((*manifest.tensors[:3], wrong, *manifest.tensors[4:]))
        update = BeginUpdate(path=Way.IPC, manifest=manifest, staging=Staging.NONE)
        try:
            self._client.update_from_ipc(update, lent.probed(), lent.placements)
        except RollsyncError as error:
            return error.reason
        finally:
            self._client.release(sorted(lending.allocation_ids))
            lending.close()
        return ""

    def push_wrong_probe(self) -> list[str]:
        """Say that an allocation begins with other bytes than it does; the refusal's reason and words."""
        source = ModuleSource(self._model)
        lending = CudaLending()
        manifest = source.manifest(checksums=False)
        lent = lending.lend(source, manifest)
        first, *others = lent.probed()
        regions = [replace(first, probe_checksum=first.probe_checksum ^ 1), *others]
        update = BeginUpdate(path=Way.IPC, manifest=manifest, staging=Staging.NONE, skip_checksums=True)
        try:
            self._client.update_from_ipc(update, regions, lent.placements)
        except RollsyncError as error:
            return [error.reason, error.message]
        finally:
            self._client.release(sorted(lending.allocation_ids))
            lending.close()
        return []

    def checksums(self) -> dict[str, int]:
        """Of the tensors as sent in bfloat16, worked out on the CPU."""
        return {n: checksum(t.cpu().to(torch.bfloat16)) for n, t in ModuleSource(self._model)}

    def allocation_ids(self) -> list[str]:
        return sorted(self._arena.allocation_ids)

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def adopt(self, descriptor: str = "") -> None:
        """Move into an arena: in the layout of the connected engine, or for one that is to start."""
        if descriptor:
            layout = model_layout(self._dir, "bfloat16")
            self._adopted = AdoptedArena(None, self._model, layout=layout)
            self._adopted.write_descriptor(descriptor)
        else:
            self._adopted = AdoptedArena(self._client, self._model)

    def update(self, seed: int = 0, directory: str = "") -> dict[str, Any]:
        """Train, or load a checkpoint, inside an update of the adopted arena."""
        with self._adopted.update():
            if directory:
                self.load(directory)
            else:
                self.train(seed)
        report = self._adopted.report
        return {
            "version": report.version,
            "extra_bytes": report.extra_bytes,
            "graphs_recaptured": report.graphs_recaptured,
        }

    def leave(self) -> dict[str, Any]:
        """Let the engine have weights of its own again."""
        report = push_weights(ModuleSource(self._model), self._client, path="ipc")
        self._adopted.close()
        self._adopted = None
        return {"version": report.version}


def main(model_dir: str, device: str = "cuda:0") -> None:
    trainer = Trainer(model_dir, device)
    obey({name: getattr(trainer, name) for name in dir(trainer) if not name.startswith("_")})


if __name__ == "__main__":
    main(*sys.argv[1:])
