"""What a process that moves many buffers of some megabytes asks of the C allocator."""

from __future__ import annotations

_LARGEST_COUNTED = 31 << 20  # glibc lets a freed buffer of up to 32 MiB raise its thresholds


def keep_freed_buffers() -> None:
    """Let the allocator keep freed buffers for the next ones, up to about 64 MiB for a thread.

    A message of a megabyte lives for a millisecond. If its memory goes back to the system each time, every
    page of the next one is faulted in anew, which costs more than filling it. glibc learns from the largest
    mapped buffer that was freed; this frees one (whose pages were never touched). Other allocators do not
    mind.
    """
    bytes(_LARGEST_COUNTED)
