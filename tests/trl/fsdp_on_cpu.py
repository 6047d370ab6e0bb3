"""accelerate shards by FSDP on accelerators only; here it does on CPUs, too, and FSDP itself is the real one.

All that is replaced is accelerate's decision: ranks of CPUs that were given an FSDP plugin use it.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState


def install() -> None:
    """For the process, before its Accelerator is made."""
    decide = AcceleratorState.__init__

    def shards_on_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        decide(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = shards_on_cpu  # type: ignore[method-assign]
