"""A trainer on a GPU that lends its weights, as a process that obeys tests (tests/children.py).

python -m tests.gpu.ipc_trainer MODEL_DIR
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollout_engine.models.weights import model_layout
from tests.children import obey
from tests.tiny import load_reference
from trainers_adapters import AdoptedArena, IpcArena, ModuleSource, RollsyncError, WeightsClient, push_weights
from trainers_adapters.cuda_lending import CudaLending
from weight_updater.checksum import checksum
from weight_updater.requests import BeginUpdate, Staging
from weight_updater.requests import Path as Way


class Trainer:
    """Commands are its public methods."""

    def __init__(self, model_dir: str) -> None:
        self._dir = model_dir
        self._model = load_reference(Path(model_dir)).to("cuda:0", torch.bfloat16)
        self._arena = IpcArena()
        self._adopted: AdoptedArena | None = None
        self._client: WeightsClient | None = None

    def connect(self, address: str) -> None:
        self._client = WeightsClient(address)
        if self._adopted is not None:
            self._adopted.connect(self._client)

    def train(self, seed: int) -> None:
        """Write new values in place, on the current stream."""
        generator = torch.Generator(device="cuda:0").manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)

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
        try:
            report = push_weights(ModuleSource(self._model), self._client, via=self._arena, **options)
        except RollsyncError as error:
            return {"reason": error.reason, "message": error.message}
        (reply,) = report.replies.values()
        return {
            "version": report.version,
            "num_tensors": reply.num_tensors,
            "num_changed": reply.num_changed,
            "verified": reply.verified,
            "staging": str(reply.staging),
            "seconds": report.seconds,
        }

    def push_wrong_checksum(self) -> str:
        """Promise another value than lies there; the reason of the refusal."""
        source = ModuleSource(self._model)
        lending = CudaLending()
        lent = lending.lend(source, source.manifest(checksums=False))
        manifest = source.manifest()
        wrong = replace(manifest.tensors[3], checksum=manifest.tensors[3].checksum ^ 1)
        manifest = replace(manifest, tensors=(*manifest.tensors[:3], wrong, *manifest.tensors[4:]))
        update = BeginUpdate(path=Way.IPC, manifest=manifest, staging=Staging.NONE)
        try:
            self._client.update_from_ipc(update, lent.probed(), lent.placements)
        except RollsyncError as error:
            return error.reason
        finally:
            self._client.release(sorted(lending.allocation_ids))
            lending.close()
        return ""

    def checksums(self) -> dict[str, int]:
        """Of the tensors as sent in bfloat16, worked out on the CPU."""
        return {n: checksum(t.cpu().to(torch.bfloat16)) for n, t in ModuleSource(self._model)}

    def allocation_ids(self) -> list[str]:
        return sorted(self._arena.allocation_ids)

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def close(self) -> None:
        self._arena.close()

    def adopt(self, descriptor: str = "") -> None:
        """Move into an arena: in the layout of the connected engine, or for one that is to start."""
        if descriptor:
            layout = model_layout(self._dir, "bfloat16")
            self._adopted = AdoptedArena(None, self._model, layout=layout)
            self._adopted.write_descriptor(descriptor)
        else:
            self._adopted = AdoptedArena(self._client, self._model)

    def update(self, seed: int) -> dict[str, Any]:
        """Train inside an update of the adopted arena."""
        with self._adopted.update():
            self.train(seed)
        report = self._adopted.report
        return {"version": report.version, "extra_bytes": report.extra_bytes}

    def leave(self) -> dict[str, Any]:
        """Let the engine have weights of its own again."""
        report = push_weights(ModuleSource(self._model), self._client, path="ipc")
        self._adopted.close()
        self._adopted = None
        return {"version": report.version}


def main(model_dir: str) -> None:
    trainer = Trainer(model_dir)
    obey({name: getattr(trainer, name) for name in dir(trainer) if not name.startswith("_")})


if __name__ == "__main__":
    main(*sys.argv[1:])
