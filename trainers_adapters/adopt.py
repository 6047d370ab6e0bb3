"""Adoption (ipc): trainer and engine share one arena, so a new version costs no copy and no second memory.

    with AdoptedArena(weights, module) as arena:       # the parameters become views of shared memory
        with arena.update():                           # generation pauses
            optimizer.step()
        print(arena.report.version)                    # committed

An engine can also start on the trainer's arena, so that those weights are never there twice:

    arena = AdoptedArena(None, module, layout=model_layout(directory, "bfloat16"))
    arena.write_descriptor("arena.json")               # rollsync serve --weights ipc:arena.json ...
    arena.connect(weights)                             # once it runs

(`model_layout` of rollout_engine.models.weights reads the model's configuration alone.)

The trainer may write to the parameters only inside `update`. The engine watches the trainer: when it dies,
the engine stops serving. To end the sharing and serve on, push once by any path without adopting, then
leave the `with` block.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from trainers_adapters.adopted_memory import allocate
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import RollsyncError
from trainers_adapters.parts import storage_key
from trainers_adapters.sending import named_by_digest
from trainers_adapters.sources import ModuleSource
from weight_updater.arena import TORCH_DTYPES
from weight_updater.descriptor import describe
from weight_updater.requests import (
    BeginUpdate,
    CudaIpcRegion,
    FromIpc,
    Inflight,
    Layout,
    Manifest,
    Placement,
    ShmSegment,
    TensorSpec,
    UpdateReply,
)
from weight_updater.requests import Path as Way


class AdoptedArena:
    """A module's parameters as views of one shared arena in the engine's layout. One engine, one host.

    Parameter objects stay the same, so optimizers and ties hold; their values are copied in once. When
    the block ends, the parameters get memory of their own again.

    Args:
        client: of the engine that will adopt; None if it is yet to start.
        module: has every tensor of the engine's layout, in the engine's dtype, on the CPU or on one GPU.
        layout: of the engine's arena; None asks the engine.

    Attributes:
        report: of the last update that committed.

    Raises:
        ValueError: the module does not fit the engine's layout; names the first tensor that does not.
        UpdateRefused (NO_MEMORY): no room for the arena.
    """

    def __init__(
        self, client: WeightsClient | None, module: nn.Module, *, layout: Layout | None = None
    ) -> None:
        if layout is None:
            if client is None:
                raise ValueError("AdoptedArena needs an engine to ask for its layout, or layout=")
            layout = client.layout()
        self._client = client
        self._module = module
        self._layout = layout
        self._placements = [place for place in layout.placements if not place.alias_of]
        self._manifest = Manifest(tuple(TensorSpec(p.name, p.dtype, p.shape) for p in self._placements))
        self._digest = self._manifest.digest()
        self._told = ""  # digest of what the engine was lent, once it knows it
        tensors = dict(ModuleSource(module))
        device = next(iter(tensors.values())).device
        _check_fits(tensors, self._placements, device)
        self._memory = allocate(layout.arena_bytes, device)
        self._move_in()
        self.report: UpdateReply | None = None

    @property
    def descriptor(self) -> ShmSegment | CudaIpcRegion:
        return self._memory.region()

    def write_descriptor(self, path: str | Path) -> None:
        """Write what an engine needs to start on this arena: JSON, for this user alone to read.

        The parameters must hold the weights that it is to serve; do not write to them until it is ready,
        and then only inside `update`.
        """
        text = describe(self._memory.region(), self._layout)
        target = Path(path)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:  # mode 0600
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, target)
            except OSError:
                os.unlink(file.name)
                raise

    def connect(self, client: WeightsClient) -> None:
        """Tell the arena which engine lives on it.

        Raises:
            ValueError: the engine has another layout.
        """
        if client.layout().digest() != self._layout.digest():
            raise ValueError(f"{client.address} serves weights in another layout than this arena's")
        self._client = client
        self._told = ""

    @contextmanager
    def update(
        self,
        version: int = 0,
        *,
        inflight: str = "wait",
        verify: bool = True,
        allow_nonfinite: bool = False,
        lease_s: float = 0.0,
        timeout_s: float = 600.0,
    ) -> Iterator[None]:
        """Let the block write to the parameters, then commit what it wrote as one version.

        From the second update on, the engine generates nothing while the block runs. If the block
        raises, the update is aborted; what it had written is then live memory already, so the engine
        refuses to generate until a full update commits.

        Args:
            verify: the engine hashes what lies there (one read), so that its reply and its checksums are of
                these very bytes; nothing is copied that could differ.
            allow_nonfinite: do not refuse values that are not finite. With verify off too, nothing is read.

        Raises:
            RollsyncError: begin or commit was refused, or the lease ran out in between.
        """
        client = self._client
        if client is None:
            raise ValueError("the arena has no engine yet; connect(client) first")
        asked = BeginUpdate(
            path=Way.IPC,
            update_id=f"adopt-{secrets.token_hex(8)}",
            version=version,
            manifest=self._manifest,
            inflight=Inflight(inflight),
            adopt=True,
            skip_checksums=not verify,
            allow_nonfinite=allow_nonfinite,
            lease_s=lease_s,
        )
        begun = named_by_digest(client, asked, self._digest, partial(client.begin, timeout_s=timeout_s))
        try:
            yield
            self._lend(client, begun.update_id, timeout_s)
            reply = client.commit(begun.update_id, timeout_s=timeout_s)
        except BaseException:
            with suppress(RollsyncError):  # the engine's lease ends it otherwise
                client.abort(begun.update_id)
            raise
        if reply.num_tensors == 0:
            raise RollsyncError("INTERNAL", "NOT_APPLIED", f"{client.address} adopted no tensor")
        self.report = reply

    def _lend(self, client: WeightsClient, update_id: str, timeout_s: float) -> None:
        """Name the arena to the engine: in full once, then (memory on a GPU) by digest."""
        if self._told:
            self._memory.settle()
            try:
                client.update_from_ipc(update_id, [], lent=self._told, timeout_s=timeout_s)
                return
            except RollsyncError as error:
                if error.reason != "MANIFEST_UNKNOWN":  # else the engine has forgotten it
                    raise
                self._told = ""
        region = self._memory.region()
        client.update_from_ipc(update_id, [region], timeout_s=timeout_s)
        if isinstance(region, CudaIpcRegion):
            self._told = FromIpc(update_id, cuda_regions=(region,)).digest()

    def _move_in(self) -> None:
        """Copy every parameter into its place and point it there; tied parameters get the same place."""
        views = {place.name: _view(self._memory.data, place) for place in self._placements}
        place_of: dict[object, torch.Tensor] = {}
        for name, tensor in ModuleSource(self._module):
            views[name].copy_(tensor)
            place_of[storage_key(tensor)] = views[name]
        self._rebind(place_of)

    def _rebind(self, place_of: dict[object, torch.Tensor]) -> None:
        named = list(self._module.named_parameters(remove_duplicate=False))
        keys = {id(parameter): storage_key(parameter) for _, parameter in named}  # before any of them moves
        for _, parameter in named:
            parameter.data = place_of[keys[id(parameter)]]

    def close(self) -> None:
        """Give the parameters memory of their own, and the arena back."""
        private = {storage_key(tensor): tensor.clone() for _, tensor in ModuleSource(self._module)}
        self._rebind(private)
        del private
        free = True
        if self._client is not None:
            try:
                self._client.release(self._memory.allocation_id)
            except (
                RollsyncError
            ) as error:  # an engine that still lives on the arena stops serving, and says so
                free = error.unreachable
        self._memory.close(free=free)

    def __enter__(self) -> AdoptedArena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _view(buffer: torch.Tensor, place: Placement) -> torch.Tensor:
    dtype = TORCH_DTYPES[place.dtype]
    nbytes = TensorSpec(place.name, place.dtype, place.shape).nbytes
    return buffer[place.offset : place.offset + nbytes].view(dtype).view(place.shape)


def _check_fits(tensors: dict[str, torch.Tensor], placements: list[Placement], device: torch.device) -> None:
    wanted = {place.name for place in placements}
    if wanted != tensors.keys():
        odd = sorted(wanted ^ tensors.keys())[0]
        side = "the module lacks it" if odd in wanted else "the engine has no such slot"
        raise ValueError(f"the module does not fit the engine's layout: {odd}: {side}")
    for place in placements:
        tensor = tensors[place.name]
        dtype = TORCH_DTYPES[place.dtype]
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (place.shape, dtype, device):
            raise ValueError(
                f"{place.name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; adoption shares "
                f"memory and needs {dtype} {place.shape}, all on {device} (serve with --dtype to match)"
            )
