"""Real processes with a token and mTLS: who is let in, and that secrets are only where they must be."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import RunningEngine, serve
from tests.holdings import descendants_of
from tests.tiny import load_reference, make_tiny
from tests.wire.test_front_auth import make_certificate
from tests.wire.trainer import PROMPT, train
from trainers_adapters import (
    BroadcastGroup,
    ModuleSource,
    RolloutClient,
    RollsyncError,
    TensorStream,
    Tls,
    WeightsClient,
    push_weights,
)

TOKEN = "SENTINEL-token-0123456789"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name, issuer in (
        ("ca", None),
        ("server", "ca"),
        ("client", "ca"),
        ("other", None),
        ("alien", "other"),
    ):
        make_certificate(folder, name, issuer)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(model_dir, certificates) -> Iterator[RunningEngine]:
    flags = [f"--tls-{what}={certificates / name}" for what, name in SERVER_FILES.items()]
    flags += ["--num-pages=64", "--stream-receivers=1", "--log-level=debug", "--log-format=json"]
    with serve(model_dir, *flags, token=TOKEN) as running:
        yield running


SERVER_FILES = {"cert": "server.crt", "key": "server.key", "client-ca": "ca.crt"}


@pytest.fixture
def tls(certificates) -> Tls:
    return Tls(certificates / "ca.crt", certificates / "client.crt", certificates / "client.key")


def test_mtls_lets_in_its_own_and_refuses_the_wrong_ca_on_either_side(engine, certificates, tls):
    with RolloutClient(engine.address, token=TOKEN, tls=tls) as rollout:
        assert len(rollout.generate(PROMPT, max_tokens=2, ignore_eos=True)[0].token_ids) == 2
    alien = certificates / "alien.crt", certificates / "alien.key"
    for wrong in (
        dataclasses.replace(tls, cert=alien[0], key=alien[1]),  # whom the engine does not know
        dataclasses.replace(tls, cert=None, key=None),  # who shows nothing
        dataclasses.replace(tls, ca=certificates / "other.crt"),  # who does not know the engine
        None,  # plain text
    ):
        with RolloutClient(engine.address, token=TOKEN, tls=wrong) as stranger:
            with pytest.raises(RollsyncError) as refused:
                stranger.info(timeout_s=5)
            assert refused.value.code == "UNAVAILABLE", wrong
            assert TOKEN not in f"{refused.value!r} {refused.value.message}"


def test_no_secret_is_in_a_reply_an_error_a_log_or_another_process(engine, certificates, tls, model_dir):
    model = load_reference(model_dir)
    train(model, 3)
    source, said = ModuleSource(model), []
    with (
        RolloutClient(engine.address, token=TOKEN, tls=tls) as rollout,
        WeightsClient(engine.address, token=TOKEN, tls=tls) as weights,
    ):
        for via in (TensorStream(), BroadcastGroup()):  # by a receiver, by a group's process
            with via:
                said.append(push_weights(source, weights, via=via))
                processes = descendants_of(engine.pid)
                said += [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes]
                said += [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (engine.pid, *processes)]
            said += [rollout.info(), rollout.generate(PROMPT, max_tokens=2)]
        for call in (
            lambda: rollout.generate([]),
            lambda: rollout.generate(PROMPT, request_id=TOKEN[:8], min_version=1 << 40),
            lambda: weights.update_from_disk("none", "/etc"),
            lambda: weights.commit("none"),
            lambda: push_weights(source, weights, 1, via=TensorStream()),
        ):
            with pytest.raises(RollsyncError) as refused:
                call()
            said.append(f"{refused.value!r} {refused.value.message} {refused.value.__cause__!r}")
        said += [repr(rollout), repr(weights), repr(tls)]
    for token in ("", TOKEN + "x", TOKEN[:-1]):
        with WeightsClient(engine.address, token=token, tls=tls) as stranger:
            with pytest.raises(RollsyncError) as denied:
                stranger.checksums()
            assert denied.value.code == "UNAUTHENTICATED"
            said.append(f"{denied.value!r} {denied.value.message}")
    assert len(processes) >= 3, "the engine, a receiver, a group's process"
    said.append(engine.log.read_text())
    assert '"event": "update_committed"' in said[-1]
    text = " ".join(map(str, said))
    key = (certificates / "server.key").read_bytes()
    pieces = [line for line in key.decode().splitlines() if "-" not in line]
    pieces += [base64.b64encode(key).decode()[40:80], TOKEN]
    assert not [piece for piece in pieces if piece in text]
