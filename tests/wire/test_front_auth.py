"""Who may call, and what they may learn: tokens, TLS, and secrets that never leave."""

from __future__ import annotations

import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_engine.config import ServeConfig, load_config
from rollout_engine.errors import ConfigError
from rollout_engine.server.auth import read_tls
from rollout_engine.v1 import rollout_pb2, weights_pb2
from tests.wire.front import prompt, reason_of, serving

SENTINEL = "SENTINEL-token-1234567890"
BEARER = (("authorization", f"Bearer {SENTINEL}"),)
METHODS = [
    (service, method)
    for file, service in ((rollout_pb2, "Rollout"), (weights_pb2, "Weights"))
    for method in file.DESCRIPTOR.services_by_name[service].methods
]


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("model"), config={"token": SENTINEL}) as made:
        made.errors = []
        yield made


def call(front, service: str, method, metadata=()) -> grpc.StatusCode:
    """Call any RPC with an empty request; returns its status."""
    ways = (
        "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
    )
    multi = getattr(front.channel, "_".join(ways))(
        f"/rollout_engine.v1.{service}/{method.name}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=bytes,
    )
    request = method.input_type._concrete_class()
    try:
        answer = multi(
            iter([request]) if method.client_streaming else request, metadata=metadata, timeout=5.0
        )
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        front.errors.append(error)
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.case("B051")
@pytest.mark.parametrize(("service", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", f"Bearer {SENTINEL}x"),),
        (("authorization", SENTINEL),),
        (("authorization", f"Basic {SENTINEL}"),),
        (("authorization", f"Bearer {SENTINEL}"), ("authorization", "Bearer wrong")),
    ],
)
def test_every_call_needs_the_token(front, service, method, metadata):
    assert call(front, service, method, metadata) is grpc.StatusCode.UNAUTHENTICATED
    assert reason_of(front.errors[-1])[1:] == ("UNAUTHENTICATED", "engine")
    assert front.errors[-1].details() == "this engine wants a token: send `authorization: Bearer TOKEN`"


@pytest.mark.case("B051")
def test_every_call_passes_with_the_token(front):
    for service, method in METHODS:
        assert call(front, service, method, BEARER) is not grpc.StatusCode.UNAUTHENTICATED, method.name
    assert len(METHODS) == 11 + 17


def test_health_is_open_and_reflection_is_not(front):
    health = health_pb2_grpc.HealthStub(front.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
    reflection = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        list(reflection.ServerReflectionInfo(iter([request]), timeout=5))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert list(reflection.ServerReflectionInfo(iter([request]), timeout=5, metadata=BEARER))


def test_a_call_that_does_not_exist_is_not_told_from_one_that_does(front):
    missing = front.channel.unary_unary("/rollout_engine.v1.Rollout/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        missing(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as caught:
        missing(b"", timeout=5, metadata=BEARER)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.case("B052")
def test_the_token_is_in_no_answer_error_log_or_child(front, caplog, capfd):
    front.errors.clear()
    for service, method in METHODS:
        for metadata in (BEARER, (("authorization", f"Bearer {SENTINEL}x"),)):
            call(front, service, method, metadata)
    seen = [f"{e.details()} {e.trailing_metadata()} {e.debug_error_string()}" for e in front.errors]
    assert len(seen) > len(METHODS)
    info = front.rollout.GetEngineInfo(rollout_pb2.GetEngineInfoRequest(), timeout=5, metadata=BEARER)
    seen += [str(info), caplog.text, *capfd.readouterr(), str(front.commands())]
    assert not [text for text in seen if SENTINEL in text]


@pytest.mark.case("B052")
def test_the_engine_gets_no_secret_and_no_environment_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLSYNC_TOKEN", SENTINEL)
    with serving(tmp_path, forked=False) as front:
        assert front.running.config.token.get_secret_value() == SENTINEL
        (first,) = front.commands("config")
        assert first["env"] == []
        assert not {"token", "tls_key", "tls_cert", "tls_client_ca"} & set(first["config"])
        assert ServeConfig(**first["config"]).host == "127.0.0.1"


def test_any_other_address_needs_a_token(tmp_path):
    with pytest.raises(ValueError, match="not loopback"):
        ServeConfig(model=tmp_path, host="0.0.0.0")
    assert ServeConfig(model=tmp_path).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("token", "word"),
    [("", "empty"), ("secret-word\n", "line break"), (" secret-word", "spaces"), ("sécret-word", "ASCII")],
)
def test_a_token_that_would_keep_nobody_out_or_everybody_is_refused_and_not_repeated(tmp_path, token, word):
    with pytest.raises(ConfigError, match=word) as refused:
        load_config({"model": tmp_path, "token": token})
    assert "cret-word" not in f"{refused.value} {refused.value.__cause__}"
    with pytest.raises(ValueError, match="tls_key") as other:  # whatever else is wrong beside it
        ServeConfig(model=tmp_path, token="secret-word", tls_cert=tmp_path)
    assert "cret-word" not in str(other.value)


# -------------------------------------------------------------------- TLS


def make_certificate(directory, name: str, issuer: str | None) -> None:
    """NAME.key and NAME.crt in a directory, signed by ISSUER or by itself."""
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    sign = ["-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key"] if issuer else []
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "1"]
    subprocess.run([*command, *files, *subject, *sign], cwd=directory, check=True, capture_output=True)


def test_mtls_wants_a_certificate_of_the_ca(tmp_path):
    for name, issuer in (("ca", None), ("server", "ca"), ("client", "ca"), ("stranger", None)):
        make_certificate(tmp_path, name, issuer)
    read = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".key", ".crt")}
    tls = {
        "tls_cert": tmp_path / "server.crt",
        "tls_key": tmp_path / "server.key",
        "tls_client_ca": tmp_path / "ca.crt",
    }
    with serving(tmp_path, config=tls) as front:
        outcomes = {}
        for name in ("client", "stranger"):
            credentials = grpc.ssl_channel_credentials(
                read["ca.crt"], read[f"{name}.key"], read[f"{name}.crt"]
            )
            with grpc.secure_channel(front.address, credentials) as channel:
                generate = channel.unary_stream(
                    "/rollout_engine.v1.Rollout/Generate",
                    request_serializer=rollout_pb2.GenerateRequest.SerializeToString,
                    response_deserializer=rollout_pb2.GenerateResponse.FromString,
                )
                try:
                    tokens = [i for m in generate(prompt(1, max_tokens=2), timeout=5) for i in m.token_ids]
                    outcomes[name] = tokens
                except grpc.RpcError as error:
                    outcomes[name] = error.code()
        assert outcomes == {"client": [10, 11], "stranger": grpc.StatusCode.UNAVAILABLE}


def test_a_tls_file_that_cannot_be_read_is_named(tmp_path):
    config = ServeConfig(model=tmp_path, tls_cert=tmp_path / "no.crt", tls_key=tmp_path / "no.key")
    with pytest.raises(ConfigError, match=r"tls_key: cannot read .*no\.key"):
        read_tls(config)
    assert read_tls(ServeConfig(model=tmp_path)) is None


@pytest.mark.parametrize("broken", ["no PEM", "another's key", "a password", "no CA"])
def test_tls_files_that_cannot_be_used_are_told_before_a_model_loads(tmp_path, broken):
    """gRPC itself would say that the port cannot be bound."""
    for name in ("server", "other"):
        make_certificate(tmp_path, name, None)
    files = {f"tls_{kind}": tmp_path / f"server.{end}" for kind, end in (("cert", "crt"), ("key", "key"))}
    assert read_tls(ServeConfig(model=tmp_path, **files)) is not None
    if broken == "no PEM":
        files["tls_cert"].write_text("no certificate")
    elif broken == "another's key":
        files["tls_key"] = tmp_path / "other.key"
    elif broken == "a password":
        command = [
            "openssl",
            "ec",
            "-in",
            "server.key",
            "-aes256",
            "-passout",
            "pass:x",
            "-out",
            "locked.key",
        ]
        subprocess.run([*command, "-passout", "pass:x"], cwd=tmp_path, check=True, capture_output=True)
        files["tls_key"] = tmp_path / "locked.key"
    else:
        files["tls_client_ca"] = tmp_path / "server.key"
    with pytest.raises(ConfigError, match="tls_cert, tls_key or tls_client_ca cannot be used"):
        read_tls(ServeConfig(model=tmp_path, **files))
