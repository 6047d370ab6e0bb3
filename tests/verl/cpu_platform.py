"""A verl platform without any accelerator, so that verl's trainer itself runs on a CPU.

verl has a registry for platforms, but none for CPUs. This one is in force with VERL_PLATFORM=cpu,
VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform and VERL_ENGINE_DEVICE=cuda (its FSDP engines are listed for
that, and ask the platform for everything else). Ray is told of GPUs that are not there, to place workers by.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

GIB = 1 << 30


def _device_module() -> types.ModuleType:
    """torch.cpu, and what verl asks of torch.cuda besides."""
    module = types.ModuleType("tests.verl.cpu_device")
    nothing = {
        "empty_cache": None,
        "synchronize": None,
        "set_device": None,
        "ipc_collect": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (GIB, GIB),
        "device_count": 1,
        "current_device": "cpu",
        "get_device_name": "cpu",
        "is_available": True,
    }
    for name, value in nothing.items():
        setattr(module, name, lambda *args, value=value, **kwargs: value)
    for name in ("Stream", "Event", "stream", "current_stream"):
        if hasattr(torch.cpu, name):
            setattr(module, name, getattr(torch.cpu, name))
    module.get_rng_state = torch.get_rng_state  # type: ignore[attr-defined]
    module.set_rng_state = torch.set_rng_state  # type: ignore[attr-defined]
    return module


def _name_devices_once() -> None:
    """verl makes its groups for "cpu:gloo" and for the platform's device, which torch takes for an error if
    that is the same.
    """
    init = torch.distributed.init_process_group

    @functools.wraps(init)
    def once(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init(backend and ",".join(dict.fromkeys(backend.split(","))), *args, **kwargs)

    torch.distributed.init_process_group = once


_name_devices_once()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """See the module's docstring; methods are PlatformBase's."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
