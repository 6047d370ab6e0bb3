"""Without a token no web page drives the facade: not by simple requests, not by a name that was rebound."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest
from starlette.datastructures import Headers

from tests.http.facade import facade
from trainers_adapters.http_facade.guard import foreign

TEXT = {"content-type": "text/plain"}
"""What a page may send without asking first."""


@pytest.fixture(scope="module")
def url(engine):
    with facade(engine.address) as address:
        yield address


def send(url, method, path, headers, body=None):
    """Status and parsed answer of a request with exactly these headers beside content-length."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_page_cannot_pause_the_engine_or_swap_its_weights(url, engine):
    """Every shape of request that browsers send without a preflight."""
    host = urlsplit(url).netloc
    before = engine.rollout.info().state
    swap = json.dumps({"model_path": engine.rollout.info().model_path}).encode()
    page = {"host": host, "origin": "https://evil.example"}
    for headers in (
        page,
        page | {"sec-fetch-site": "cross-site"},
        {"host": host, "origin": "null"},
        {"host": host, "origin": "http://localhost:8888"},  # another service of this machine
        {"host": host, "sec-fetch-site": "cross-site"},  # an image, a link
        {"host": host, "sec-fetch-site": "same-site"},
        {"host": "evil.example:30000", "origin": "http://evil.example:30000"},  # rebound: same origin
        {"host": "evil.example:30000", "sec-fetch-site": "same-origin"},
    ):
        for method, path, body in (
            ("POST", "/pause_generation", b""),
            ("POST", "/sleep?level=2", b""),
            ("POST", "/update_weights_from_disk", swap),
            ("GET", "/flush_cache", None),
            ("GET", "/server_info", None),
            ("OPTIONS", "/generate", None),
        ):
            status, answer = send(url, method, path, headers | TEXT, body)
            assert (status, answer["error"]["type"]) == (403, "FOREIGN_CALLER"), (headers, path)
    after = engine.rollout.info().state
    assert (after.paused_by, after.weight_version) == (before.paused_by, before.weight_version)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:30000", "127.0.0.1", "localhost:30000", "LOCALHOST", "[::1]:30000", "10.1.2.3:8000", ""],
)
def test_programs_of_this_machine_are_answered(host, url):
    """By name or address, through a forwarded port too, and whether they send an empty host or none."""
    assert send(url, "GET", "/weight_version", {"host": host})[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example:30000",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "[evil",
        "2130706433",
        "my-host",
    ],
)
def test_names_that_may_come_to_mean_this_machine_are_refused_and_told_what_to_do(host, url):
    status, answer = send(url, "GET", "/weight_version", {"host": host})
    assert (status, answer["error"]["type"]) == (403, "FOREIGN_CALLER")
    assert host in answer["message"]
    assert "ROLLSYNC_TOKEN" in answer["message"]


def test_what_ordinary_clients_send_is_answered():
    address = {"host": "localhost:30000"}
    for more in (
        {"user-agent": "python-requests/2.32", "accept": "*/*"},
        {"sec-fetch-mode": "cors"},  # Node's fetch
        {"sec-fetch-site": "none"},  # typed by a user
        {"sec-fetch-site": "same-origin", "origin": "http://localhost:30000"},
        {"origin": "http://LOCALHOST:30000"},
    ):
        assert foreign(Headers(address | more)) is None
    assert foreign(Headers({})) is None  # HTTP/1.0
    assert foreign(Headers(address | {"origin": "http://localhost:30001"}))
    assert foreign(Headers(address | {"origin": "http://[broken"}))


def test_with_a_token_any_name_is_served_and_the_token_decides():
    """A service name of Docker or Kubernetes, a page behind a proxy: neither knows the token by itself."""
    with facade("127.0.0.1:1", "secret") as url:
        service = {"host": "rollsync.svc.cluster.local:30000", "origin": "https://console.example"}
        assert send(url, "GET", "/get_world_size", service)[0] == 401
        assert send(url, "GET", "/get_world_size", service | {"authorization": "Bearer other"})[0] == 401
        status, answer = send(url, "GET", "/get_world_size", service | {"authorization": "Bearer secret"})
        assert (status, answer) == (200, {"world_size": 1})


def test_health_says_why_only_to_who_has_the_token():
    with facade("127.0.0.1:1", "secret") as url:
        for path in ("/health", "/liveness"):
            assert send(url, "GET", path, {"host": "svc"}) == (503, {"status": "down"})
        status, answer = send(url, "GET", "/health", {"host": "svc", "authorization": "Bearer secret"})
        assert (status, answer["error"]["type"]) == (503, "UNREACHABLE")
        assert "127.0.0.1:1" in answer["message"]
