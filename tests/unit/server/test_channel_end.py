"""The end of a channel between processes."""

from __future__ import annotations

import os
import socket
import threading

from rollout_engine import messages
from rollout_engine.channel import Channel


def test_closing_gives_the_descriptor_back_and_ends_the_reader():
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    channel = Channel(ours)
    ended = threading.Event()

    def read() -> None:
        assert list(channel.frames()) == []
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    channel.close()
    assert ended.wait(20)
    with theirs:
        assert theirs.recv(1) == b"", "the other end sees it, although the channel object lives on"
    reused = os.open(os.devnull, os.O_RDONLY)
    os.close(reused)
    assert reused == number, "the descriptor is free"
    channel.send(messages.UploadRing("ring", 1, 8))  # to nobody, and no error
    assert list(channel.frames()) == []
