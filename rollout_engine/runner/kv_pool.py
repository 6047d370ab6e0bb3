"""The device memory of K and V."""

from __future__ import annotations

import torch

from rollout_engine.models.config import ModelConfig
from rollout_engine.runner.memory import discard_contents, lazy_zeros, restore_contents


class KVPool:
    """K and V of every token slot and layer, in one allocation.

    Token slots [0, num_pages * page_size) belong to the scheduler. One page more, `padding_page`, takes
    what padded tokens write; it is never read for a real one.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, device: torch.device) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.dtype = config.dtype
        self.padding_page = num_pages
        self.padding_slot = num_pages * page_size
        shape = (2, config.num_layers, (num_pages + 1) * page_size, config.num_kv_heads, config.head_dim)
        self._data = lazy_zeros(shape, config.dtype, device)
        self.nbytes = self._data.nbytes
        self.is_released = False
        self.k = list(self._data[0])  # [layer]: [token slots, kv heads, head dim]
        self.v = list(self._data[1])
        self.k_pages = [k.view(num_pages + 1, -1) for k in self.k]  # [layer]: [pages, values of a page]
        self.v_pages = [v.view(num_pages + 1, -1) for v in self.v]
        paged = (num_pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.paged = [(k.view(paged), v.view(paged)) for k, v in zip(self.k, self.v, strict=True)]

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [T, kv heads, head dim] at token slots [T] int64."""
        self.k[layer_id].index_copy_(0, slots, k)
        self.v[layer_id].index_copy_(0, slots, v)

    def release(self) -> int:
        """Give the memory back, addresses kept; bytes freed. No forward pass may run until `resume`."""
        self.is_released = True
        return discard_contents(self._data)

    def resume(self) -> int:
        """Take the memory again, zeroed, at the same addresses; bytes taken."""
        if not restore_contents(self._data) and self._data.device.type == "cuda":
            self._data.zero_()  # it had kept its memory
            torch.cuda.synchronize(self._data.device)  # passes run on another stream
        self.is_released = False
        return self.nbytes
