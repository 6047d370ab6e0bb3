"""GPU memory that two processes share: allocations, their identity, and CUDA IPC handles of them.

Needs the package cuda-bindings, which comes with CUDA builds of torch; it is loaded on first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weight_updater.errors import Reason, UpdateRefused

GRANULE_BYTES = 2 << 20
"""What the driver allocates at least."""


class CudaCallFailed(RuntimeError):
    """A call of the CUDA runtime or driver failed. name: of the error, for example cudaErrorInvalidValue."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.name = name


@cache
def _bindings() -> tuple[Any, Any]:
    """(runtime, driver) modules of cuda.bindings."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            "sharing GPU memory between processes needs the package cuda-bindings; install it "
            "(pip install cuda-bindings) in the environments of the trainer and of the engine",
        ) from error
    return runtime, driver


def _call(function: Any, *arguments: Any) -> Any:
    """Call a binding, which gives (error, results...); the results without the error.

    Raises:
        CudaCallFailed: the error is not success. It is cleared, so that nobody else stumbles over it.
    """
    error, *results = function(*arguments)
    if int(error) != 0:
        runtime, _ = _bindings()
        runtime.cudaGetLastError()
        raise CudaCallFailed(function.__name__, getattr(error, "name", str(error)))
    return results[0] if len(results) == 1 else results


def queue_copy(destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> bool:
    """Queue a copy between tensors of equal dtype and shape, on any devices or in host memory.

    Returns:
        False if that is not for this call: one of them is strided, cuda-bindings is missing, or another GPU
        than the stream's is the current one, which may have no context yet and would be given one.

    Raises:
        CudaCallFailed: it cannot be queued.
    """
    known = _memcpy()
    if known is None or not (destination.is_contiguous() and source.is_contiguous()):
        return False
    if torch.cuda.current_device() != stream.device.index:
        return False
    copy, kind = known
    _call(copy, destination.data_ptr(), source.data_ptr(), source.nbytes, kind, stream.cuda_stream)
    return True


@cache
def _memcpy() -> tuple[Any, Any] | None:
    """The runtime's asynchronous copy and the kind that works it out by the addresses, if there are any."""
    try:
        runtime, _ = _bindings()
    except UpdateRefused:
        return None
    return runtime.cudaMemcpyAsync, runtime.cudaMemcpyKind.cudaMemcpyDefault


def device_uuid(index: int) -> str:
    """The UUID of a visible GPU, as in nvidia-smi."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def device_of(uuid: str, for_device: torch.device) -> int:
    """The index of the GPU with `uuid` among those that this process sees, whatever their order.

    Raises:
        UpdateRefused (MEMORY_UNAVAILABLE): it sees none such, or `for_device` cannot read its memory.
    """
    visible = [device_uuid(index) for index in range(torch.cuda.device_count())]
    wanted = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if wanted not in visible:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"the memory lies on {wanted}, which this engine does not see (it sees {', '.join(visible)}); "
            f"run trainer and engine on one host and let CUDA_VISIBLE_DEVICES name that GPU too",
        )
    index = visible.index(wanted)
    own = torch.cuda.current_device() if for_device.index is None else for_device.index
    if index != own and not torch.cuda.can_device_access_peer(own, index):
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"the memory lies on {wanted}, which GPU {visible[own]} of this engine cannot read directly "
            f"(no peer access); use the distributed path",
        )
    return index


class DevicePointer:
    """Memory at an address, as torch takes it. keep: an object to be kept alive with it."""

    def __init__(self, address: int, nbytes: int, keep: object = None) -> None:
        self._keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def bytes_at(address: int, nbytes: int, index: int, keep: object = None) -> torch.Tensor:
    """[nbytes] uint8 over memory on GPU `index`, borrowed."""
    with torch.cuda.device(index):
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
        return torch.as_tensor(DevicePointer(address, nbytes, keep), device=f"cuda:{index}")


class MappedAllocation:
    """An allocation of another process, mapped here. data: [nbytes] uint8; a whole allocation or its start.

    Raises:
        UpdateRefused (MEMORY_UNAVAILABLE): the handle cannot be opened.
    """

    def __init__(self, handle: bytes, uuid: str, for_device: torch.device) -> None:
        runtime, _ = _bindings()
        self.index = device_of(uuid, for_device)
        own = torch.cuda.current_device() if for_device.index is None else for_device.index
        wire = runtime.cudaIpcMemHandle_t()
        wire.reserved = handle
        self._open = False
        try:
            with _entered(self.index):
                self._address: int = int(
                    _call(runtime.cudaIpcOpenMemHandle, wire, runtime.cudaIpcMemLazyEnablePeerAccess)
                )
            self._open = True
            if self.index != own:
                with _entered(own):
                    _allow_peer(self.index)
        except CudaCallFailed as error:
            self.close()
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"a CUDA IPC handle for {uuid} cannot be opened ({error}); is the trainer another process "
                f"of this host (and container), and does it still hold the memory?",
            ) from error

    @property
    def address(self) -> int:
        return self._address

    def check_holds(self, end: int) -> None:
        """Refuse (MEMORY_UNAVAILABLE) to look further than the allocation reaches, where the driver knows."""
        _, driver = _bindings()
        with _entered(self.index):
            error, _, nbytes = driver.cuMemGetAddressRange(driver.CUdeviceptr(self._address))
        if int(error) == 0 and end > int(nbytes):
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE, f"a region ends at byte {end} of an allocation of {nbytes} bytes"
            )

    def region(self, offset: int, size: int) -> torch.Tensor:
        """[size] uint8 at byte `offset` of the allocation, on the GPU that holds it."""
        return bytes_at(self._address + offset, size, self.index, self)

    def close(self) -> None:
        """Unmap; harmless twice. Nothing may read from it any more."""
        if self._open:
            self._open = False
            runtime, _ = _bindings()
            with _entered(self.index):
                _call(runtime.cudaIpcCloseMemHandle, self._address)


@contextlib.contextmanager
def _entered(index: int) -> Iterator[None]:
    """Make a GPU this thread's current one in the block, with its context, which driver calls need; a trainer
    finds its own one current afterwards.
    """
    runtime, _ = _bindings()
    with torch.cuda.device(index):
        _call(runtime.cudaSetDevice, index)
        yield


def _allow_peer(index: int) -> None:
    """Let kernels of the current GPU read memory of GPU `index`."""
    runtime, _ = _bindings()
    try:
        _call(runtime.cudaDeviceEnablePeerAccess, index, 0)
    except CudaCallFailed as error:
        if error.name != "cudaErrorPeerAccessAlreadyEnabled":
            raise


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one cudaMalloc gave. identity: no other allocation of this process ever has it.

    shareable: the driver can give an IPC handle for it; not so for memory that is mapped in pieces
        (torch's expandable segments) or comes from a pool.
    """

    address: int
    nbytes: int
    identity: int
    shareable: bool


def identities_of(places: Sequence[tuple[int, int]]) -> list[int]:
    """Per (address, GPU) the identity of the allocation there, 0 where there is none; see `Allocation`."""
    _, driver = _bindings()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    identities = [0] * len(places)
    for index in dict.fromkeys([index for _, index in places]):
        with _entered(index):
            for at, (address, on) in enumerate(places):
                if on == index:
                    error, identity = driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(address))
                    identities[at] = 0 if int(error) else int(identity)
    return identities


def allocation_of(address: int, index: int) -> Allocation:
    """The allocation on GPU `index` that an address lies in."""
    _, driver = _bindings()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    with _entered(index):
        base, nbytes = _call(driver.cuMemGetAddressRange, driver.CUdeviceptr(address))
        shareable = bool(_call(driver.cuPointerGetAttribute, attribute, driver.CUdeviceptr(address)))
    return Allocation(int(base), int(nbytes), identities_of([(address, index)])[0], shareable)


def handle_of(allocation: Allocation, index: int) -> bytes | None:
    """The 64-byte IPC handle of an allocation; None if the driver gives none."""
    runtime, _ = _bindings()
    if not allocation.shareable:
        return None
    try:
        with _entered(index):
            return bytes(_call(runtime.cudaIpcGetMemHandle, allocation.address).reserved)
    except CudaCallFailed:
        return None


class DeviceBuffer:
    """Memory from cudaMalloc itself, which can always be shared. data: [nbytes] uint8, zeroed.

    Raises:
        UpdateRefused (NO_MEMORY): there is not enough.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        runtime, _ = _bindings()
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.nbytes = nbytes
        # Whole granules, since smaller allocations share theirs, and a handle would show it whole.
        size = max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES
        try:
            with _entered(self.index):
                self._address: int = int(_call(runtime.cudaMalloc, size))
        except CudaCallFailed as error:
            raise UpdateRefused(
                Reason.NO_MEMORY, f"no room for {nbytes} bytes on cuda:{self.index} to share ({error})"
            ) from error
        self.data: torch.Tensor | None = bytes_at(self._address, nbytes, self.index)
        self.data.zero_()
        torch.cuda.current_stream(self.index).synchronize()  # what fills it may be queued on another stream

    @property
    def address(self) -> int:
        return self._address

    def close(self) -> None:
        """Free it; harmless twice. No tensor over it may be used any more."""
        if self.data is not None:
            self.data = None
            runtime, _ = _bindings()
            with contextlib.suppress(CudaCallFailed), _entered(self.index):
                torch.cuda.synchronize(self.index)
                _call(runtime.cudaFree, self._address)
