"""Metrics for Prometheus, over HTTP on a port of their own.

A thread answers, so a slow scraper never holds up the event loop; the loop only copies the values when asked
to, which takes a fraction of a millisecond. Who may read is who may call: loopback by default, the same token
and the same TLS files as the engine's own port.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError
from rollout_engine.logs import get_log
from rollout_engine.server.auth import is_bearer, server_context
from rollout_engine.server.metrics import ALL, Distribution, Metric, Values

log = get_log(__name__)

COPY_WAIT_S = 5.0
"""How long a scrape waits for the event loop before it says that there is no answer."""
CLIENT_WAIT_S = 10.0
"""How long a connection may be silent."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Listens from its creation, answers from `start`, until `close`.

    Raises:
        ConfigError: prometheus-client is not installed, the address cannot be bound, a TLS file not read.
    """

    def __init__(self, config: ServeConfig) -> None:
        assert config.metrics_port is not None
        self._token = None if config.token is None else config.token.get_secret_value().encode()
        self._any_name = self._token is not None or config.tls_client_ca is not None
        self._make_application = _exposition()
        host, port = config.metrics_host, config.metrics_port
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._http = _HttpServer((str(address[0]), int(address[1])), family)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"cannot listen on {host} port {port} (metrics_port): {why}; choose another port, or 0"
            ) from error
        self.port: int = self._http.server_address[1]
        self.host = host
        try:
            self._http.socket = _with_tls(config, self._http.socket)
        except BaseException:
            self._http.server_close()
            raise
        self._thread: threading.Thread | None = None

    def start(self, read: Callable[[], Values], engine_pid: Callable[[], int]) -> None:
        """Answer with what `read` gives, which is called on the running event loop.

        Args:
            engine_pid: of the engine process, whose memory and CPU time are shown; 0 while there is none.
        """
        loop = asyncio.get_running_loop()

        async def copy() -> Values:
            return read()

        def values() -> Values:
            future = asyncio.run_coroutine_threadsafe(copy(), loop)
            try:
                return future.result(COPY_WAIT_S)
            finally:
                future.cancel()

        self._http.set_app(_guarded(self._make_application(values, engine_pid), self._token, self._any_name))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="rollsync-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more; harmless twice. Called off the event loop, or scrapes under way end in errors."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, none of which outlives the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The base class looks the host's name up in the DNS, which may take seconds; nobody reads it.
        socket_address = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(socket_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that broke off or spoke no TLS is no news."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_WAIT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug("metrics_request", request=format % arguments)


def _with_tls(config: ServeConfig, listening: socket.socket) -> socket.socket:
    """The same files as the engine's port; a client's handshake happens in its own thread."""
    if config.tls_cert is None or config.tls_key is None:
        return listening
    try:
        context = server_context(config)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use the TLS files for metrics: {error}") from error
    return context.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)


def _may_be_rebound(host: str) -> bool:
    """Whether a `host` header names neither an address nor localhost: a web page's own name can be made to
    mean loopback, and the page then reads what it likes.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return bool(host) and name != "localhost" and not ipaddress.ip_address(name)
    except ValueError:
        return True


def _guarded(application: Application, token: bytes | None, any_name: bool) -> Application:
    """Only /metrics, only reading, and only with the token if there is one.

    Args:
        any_name: whatever name the caller calls by; else loopback's, or an address.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def refuse(status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
            return [text.encode()]

        if environ["PATH_INFO"] != "/metrics":
            return refuse("404 Not Found", "metrics are at /metrics\n")
        if environ["REQUEST_METHOD"] != "GET":
            return refuse("405 Method Not Allowed", "GET only\n", ("Allow", "GET"))
        if not any_name and _may_be_rebound(environ.get("HTTP_HOST", "")):
            return refuse("403 Forbidden", "without a token, call by an IP address or as localhost\n")
        if token is not None and not is_bearer(environ.get("HTTP_AUTHORIZATION", ""), token):
            wanted = ("WWW-Authenticate", "Bearer")
            return refuse("401 Unauthorized", "send `Authorization: Bearer TOKEN`\n", wanted)
        try:
            return application(environ, start_response)
        except TimeoutError:
            return refuse("503 Service Unavailable", "the front is too busy to answer; try again\n")

    return answer


def _exposition() -> Callable[[Callable[[], Values], Callable[[], int]], Application]:
    """What makes a WSGI application of a reader of values and of the engine's process id.

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )
    except ImportError as error:
        raise ConfigError(
            "metrics_port needs the package prometheus-client; pip install 'rollsync[metrics]'"
        ) from error
    families: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    class Collector:
        def __init__(self, read: Callable[[], Values]) -> None:
            self._read = read

        def describe(self) -> Iterator[Any]:
            """Nothing: who registers this needs no values then."""
            return iter(())

        def collect(self) -> Iterator[Any]:
            values = self._read()
            for metric in ALL:
                if metric.kind == "histogram":
                    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                    for labels, distribution in values.distributions[metric].items():
                        buckets = list(cumulative(metric, distribution))
                        family.add_metric(list(labels), buckets, distribution.total)
                else:
                    family = families[metric.kind](metric.name, metric.help, labels=metric.labels)
                    for labels, value in values.numbers[metric].items():
                        family.add_metric(list(labels), value)
                yield family

    def make(read: Callable[[], Values], engine_pid: Callable[[], int]) -> Application:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="rollsync_engine", pid=engine_pid, registry=registry)
        registry.register(Collector(read))
        return make_wsgi_app(registry)

    return make


def cumulative(metric: Metric, distribution: Distribution) -> Iterator[tuple[str, float]]:
    """(upper bound, values up to it), the last bound +Inf."""
    count = 0.0
    for bound, in_bucket in zip((*metric.buckets, math.inf), distribution.counts, strict=True):
        count += in_bucket
        yield "+Inf" if bound == math.inf else str(float(bound)), count
