"""Can one process read another's GPU memory? Two processes find out, the way trainer and engine do it.

python -m rollout_engine.doctor.ipc_probe lend    allocates, writes, prints a line, waits for stdin to end
python -m rollout_engine.doctor.ipc_probe map LINE    maps what the line names and prints its checksum
"""

from __future__ import annotations

import json
import sys

NBYTES = 1 << 20


def lend() -> None:
    """LENDER. One line of JSON: the handle, where it is, and the checksum of what lies there."""
    import torch

    from weight_updater.checksum import checksum
    from weight_updater.device_memory import DeviceBuffer, allocation_of, device_uuid, handle_of

    buffer = DeviceBuffer(NBYTES, torch.device("cuda", 0))
    assert buffer.data is not None
    buffer.data.copy_(torch.arange(NBYTES, device="cuda:0") % 251)
    torch.cuda.synchronize()
    handle = handle_of(allocation_of(buffer.address, 0), 0)
    if handle is None:
        raise SystemExit("the driver gives no IPC handle for memory of cudaMalloc")
    line = {"handle": handle.hex(), "uuid": device_uuid(0), "checksum": checksum(buffer.data.cpu())}
    print(json.dumps(line), flush=True)
    sys.stdin.read()
    buffer.close()


def map_lent(line: str) -> None:
    """MAPPER. Prints the checksum of what it reads."""
    import torch

    from weight_updater.checksum import checksum
    from weight_updater.device_memory import MappedAllocation

    lent = json.loads(line)
    mapping = MappedAllocation(bytes.fromhex(lent["handle"]), lent["uuid"], torch.device("cuda", 0))
    print(checksum(mapping.region(0, NBYTES).cpu()), flush=True)
    mapping.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["lend"]:
        lend()
    else:
        map_lent(sys.argv[2])
