"""The facade as a server in this process, and a client that is nobody's library."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import uvicorn

from trainers_adapters.http_facade import create_app

Answer = tuple[int, Any]


class facade:
    """A uvicorn server in a thread, on a port of its own."""

    def __init__(self, address: str, token: str | None = None, **options: Any) -> None:
        config = uvicorn.Config(
            create_app(address, token=token, **options), log_level="warning", timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def fetch(address: str, path: str, body: Any = None, token: str = "", method: str = "") -> Answer:
    """Status and parsed JSON; a body makes it a POST."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    if token:
        request.add_header("authorization", f"Bearer {token}")
    request.method = method or ("POST" if data is not None else "GET")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text[:1] in "[{" else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read().decode())
