"""The engine's ends of its receivers: processes that take chunk streams and write them into rings here.

The front starts them and hands the engine one socket for each, over a socket made for that. A receiver sends
what the front sends for a stream of its own (`Update`, `Chunk`, `EndOfChunks`), and gets the answers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from rollout_engine import messages
from rollout_engine.channel import Channel
from rollout_engine.logs import get_log
from rollout_engine.uploads import Uploads
from weight_updater.errors import UpdateError

log = get_log(__name__)


class ReceiverLinks:
    """Takes receivers' sockets, and their commands, on threads of its own.

    Args:
        handover: each message is one byte and one socket to a new receiver.
        uploads: where their chunks are filed.
        on_update: called with each Update and the channel that its Reply belongs to.
    """

    def __init__(
        self,
        handover: socket.socket,
        uploads: Uploads,
        on_update: Callable[[messages.Update, Channel], None],
    ) -> None:
        self._handover = handover
        self._uploads = uploads
        self._on_update = on_update

    def start(self) -> None:
        """Take receivers until the front closes its end."""
        threading.Thread(target=self._take_receivers, name="rollsync-receivers", daemon=True).start()

    def _take_receivers(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._handover, 1, 1)
            if not data:
                return
            for fd in fds:
                channel = Channel(socket.socket(fileno=fd))
                threading.Thread(
                    target=self._read, args=(channel,), name="rollsync-receiver", daemon=True
                ).start()

    def _read(self, channel: Channel) -> None:
        """CHANNEL THREAD of one receiver, from its start to its death."""
        try:
            ring = self._uploads.add_ring(channel)
        except UpdateError as error:
            log.warning("receiver_not_linked", error=error.message)
            channel.close()  # the receiver ends, and the front does without it
            return
        channel.send(messages.UploadRing(ring.name, ring.slots, ring.slot_bytes))
        for command in channel.commands():
            match command:
                case messages.Chunk() | messages.EndOfChunks():
                    self._uploads.file(command, ring)
                case messages.Update() if command.tensor is not None:
                    if command.tensor.segment is None:
                        self._uploads.open(command.call_id, ring)
                    self._on_update(command, channel)
                case _:
                    log.error("receiver_sent_nonsense", command=type(command).__name__)
        self._uploads.lose(ring, "the process that received the stream died; send the update again")
        channel.close()
