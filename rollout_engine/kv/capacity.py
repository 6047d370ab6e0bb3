"""KV capacity: how many bytes the page pool may take. Integer bytes throughout.

    kv_bytes = available - pre_model_load_memory * (1 - mem_fraction_static) - reserved

`pre_model_load_memory` is sampled before the model loads and `available` after, so what the model took in
between is paid for by itself. Weights that were already resident at the first sample (adopted over IPC,
preloaded, a draft model) made that sample smaller by their size W, so that too little would be kept free:
`account_preloaded_weights` adds W back to it, and the pool gets the size it would have had if the engine
had loaded those weights itself.

    loaded here      pre = M        available = M - W    kv = M*f - W - reserved
    resident before  pre = M - W    available = M - W    kv = M*f - W - reserved + W*(1 - f)   too large
    accounted        pre = M        available = M - W    kv = M*f - W - reserved
"""

from __future__ import annotations

from rollout_engine.errors import ConfigError


class KvCapacity:
    """The arithmetic behind the page pool.

    Args:
        pre_model_load_bytes: free on the device before the model loaded.
        mem_fraction_static: share of that which weights, KV and reserves may take together, in (0, 1).
        reserved_bytes: what graphs, logits, workspaces and staging will take.
    """

    def __init__(self, pre_model_load_bytes: int, mem_fraction_static: float, reserved_bytes: int) -> None:
        self.pre_model_load_bytes = pre_model_load_bytes
        self.reserved_bytes = reserved_bytes
        # Integer share: the fraction is given in at most nine decimal places.
        self._kept_billionths = 1_000_000_000 - round(mem_fraction_static * 1_000_000_000)
        self._preloaded: dict[str, int] = {}

    @property
    def preloaded_weights_bytes(self) -> int:
        return sum(self._preloaded.values())

    def account_preloaded_weights(self, preloaded_weights_bytes: int, *, owner: str) -> None:
        """Add weights that were already resident when `pre_model_load_bytes` was sampled back to it.

        Args:
            preloaded_weights_bytes: their size; 0 changes nothing.
            owner: whose they are (for example "adopted" or "draft"); counted once.

        Raises:
            TypeError: not an int (a bool is none).
            ValueError: negative, or the owner was counted before.
        """
        if type(preloaded_weights_bytes) is not int:
            kind = type(preloaded_weights_bytes).__name__
            raise TypeError(f"preloaded_weights_bytes must be an int, not {kind} {preloaded_weights_bytes!r}")
        if preloaded_weights_bytes < 0:
            raise ValueError(f"preloaded_weights_bytes must be >= 0, not {preloaded_weights_bytes}")
        if preloaded_weights_bytes == 0:
            return
        if owner in self._preloaded:
            raise ValueError(
                f"{owner!r} has already been counted with {self._preloaded[owner]} bytes of preloaded weights"
            )
        self._preloaded[owner] = preloaded_weights_bytes

    def kv_bytes(self, available_bytes: int) -> int:
        """Bytes for the page pool, never negative.

        Args:
            available_bytes: free on the device after the model loaded.
        """
        pre_model_load_bytes = self.pre_model_load_bytes + self.preloaded_weights_bytes
        kept_free = pre_model_load_bytes * self._kept_billionths // 1_000_000_000
        return max(0, available_bytes - kept_free - self.reserved_bytes)

    def num_pages(self, available_bytes: int, bytes_per_page: int) -> int:
        """Whole pages that fit.

        Raises:
            ConfigError: not even one page fits.
        """
        pages = self.kv_bytes(available_bytes) // bytes_per_page
        if pages < 1:
            raise ConfigError(
                f"no memory for the KV pool: {available_bytes} bytes are available after loading, "
                f"{self.reserved_bytes} are reserved; raise mem_fraction_static or free memory"
            )
        return pages


def max_decode_logits_rows(capture_batch_sizes: list[int], tokens_per_request: list[int]) -> int:
    """Rows of the logits buffer that all decode graphs share: the largest product over every candidate.

    Args:
        capture_batch_sizes: batch sizes that graphs are captured for.
        tokens_per_request: candidate numbers of tokens that one request brings to a decode pass.
    """
    return max(capture_batch_sizes, default=0) * max(tokens_per_request, default=0)
