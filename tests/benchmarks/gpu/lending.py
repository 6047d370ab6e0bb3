"""A CUDA tensor as memory that another process may map: typed fields, as the ipc path wants them."""

from __future__ import annotations

import secrets

import torch

from weight_updater.requests import CudaIpcRegion


def lend(tensor: torch.Tensor) -> CudaIpcRegion:
    """The contiguous `tensor`'s memory; it must stay allocated until the engines have released it.

    The handle names the whole allocation that the tensor lies in, which is why there is an offset.
    """
    from cuda.bindings import driver, runtime

    assert tensor.is_contiguous()
    address = tensor.data_ptr()
    base, _ = _checked(driver.cuMemGetAddressRange(address))
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(int(base)))
    uuid = torch.cuda.get_device_properties(tensor.device).uuid
    return CudaIpcRegion(
        allocation_id=secrets.token_hex(16),
        device_uuid=f"GPU-{str(uuid).removeprefix('GPU-')}",
        handle=bytes(handle.reserved),
        offset=address - int(base),
        size=tensor.nbytes,
    )


def _checked(result: tuple) -> tuple:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA says {error!r}")
    return tuple(values)
