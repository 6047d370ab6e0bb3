"""One end of plain NCCL broadcasts, the floor of the distributed path.

python -m tests.benchmarks.gpu.broadcaster DEVICE_INDEX
"""

from __future__ import annotations

import datetime
import socket
import sys
import time

import torch
import torch.distributed as dist

from tests.children import obey


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank: int, port: int) -> bool:
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout)
    own = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout, device_id=own)
    return True


def leave() -> bool:
    dist.destroy_process_group()
    return True


def broadcast(nbytes: int, piece: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` rounds that send `nbytes` in pieces of one buffer."""
    data = torch.zeros(piece, dtype=torch.uint8, device="cuda")
    sizes = [piece] * (nbytes // piece) + ([nbytes % piece] if nbytes % piece else [])
    taken = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for size in sizes:
            dist.broadcast(data[:size], 0)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken


if __name__ == "__main__":
    torch.cuda.set_device(int(sys.argv[1]))
    obey({"port": port, "join": join, "broadcast": broadcast, "leave": leave})
