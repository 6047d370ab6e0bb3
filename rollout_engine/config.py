"""Configuration: frozen, typed, resolved once, from flags, environment (ROLLSYNC_*) and TOML. No torch.

Precedence: flags over environment over the TOML file over defaults. Unknown keys are errors.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from rollout_engine.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
CLIENT_VARIABLES = frozenset({"ROLLSYNC_ADDRESS", "ROLLSYNC_TOKEN"})
"""Read by the commands that talk to a running engine; a server started beside them ignores the address."""


class _Environment(EnvSettingsSource):
    """Leaves lists as the text that they are, for ServeConfig to read as on the command line."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return value


def _entries(text: str, separator: str) -> list[Any]:
    """The entries of a list that came as text, from a flag or the environment.

    Raises:
        ValueError: an empty entry, or JSON that is no array.
    """
    if not text.strip():
        return []
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} starts as a JSON array and is none: {error}") from error
    entries = [entry.strip() for entry in text.split(separator)]
    if not all(entries):
        raise ValueError(f"{text!r} has an empty entry; put {separator!r} between entries only")
    return entries


def usable_path(path: Path) -> Path:
    """The path, absolute.

    Raises:
        ValueError: a home directory that nobody has, a character that no path has, or one that is not UTF-8,
            which neither the engine process nor a message to a client can be told.
    """
    try:
        path = path.expanduser().absolute()
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{str(path)!a} is not valid UTF-8; rename it, or link to it by another name"
        ) from error
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{path} cannot be made absolute: {error}") from error
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} has a NUL character, which no path may have")
    return path


class ServeConfig(BaseSettings):
    """Everything `rollsync serve` can be told. Bytes and seconds unless a name says otherwise."""

    # Inputs are hidden in errors: the token is one of them.
    model_config = SettingsConfigDict(
        env_prefix="ROLLSYNC_", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    model: Path
    """Directory with config.json, safetensors and (for text) tokenizer.json."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the live weights and KV; auto takes the checkpoint's."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes cuda when there is one."""
    load_format: Literal["disk", "random"] = "disk"
    """random draws weights (normal, 0.02; norms 1) from `seed`, for benchmarks and tests."""
    weights: str = ""
    """ipc:FILE starts on the arena that a trainer describes in FILE (AdoptedArena.write_descriptor), copies
    nothing and loads nothing; empty loads by `load_format`."""
    num_threads: int = Field(0, ge=0, le=4096)
    """Intra-op threads of torch; 0 keeps torch's own choice."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Of random weights, and mixed into the seeds drawn for requests without one."""

    host: str = "127.0.0.1"
    port: int = Field(50051, ge=0, le=65535)
    """0 lets the system choose; the chosen port is printed and in --ready-file."""
    token: SecretStr | None = None
    """Bearer token that every call but health must carry; needed for a host that is not loopback."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """With all three: mTLS; clients must present a certificate of this CA."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Serve metrics for Prometheus at http://METRICS_HOST:PORT/metrics; 0 lets the system choose, none serves
    none. Token and TLS are those of the engine's own port."""
    metrics_host: str = "127.0.0.1"
    metrics_log: Path | None = None
    """Append samples and updates to this file, as JSON lines; `rollsync plot` draws it."""
    metrics_log_bytes: int = Field(32 << 20, ge=4096)
    """At this size the file becomes FILE.1, in place of an older one."""
    metrics_log_seconds: float = Field(1.0, ge=0.05, le=86400)
    """Between two samples."""
    log_format: Literal["text", "json"] = "text"
    """Of the lines on stderr: columns for people, or one JSON object a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_message_bytes: int = Field(4 << 20, ge=64 << 10, lt=1 << 31)
    """Limit of one gRPC message in either direction; the default is a default client's own."""
    upload_slots: int = Field(8, ge=2, le=1024)
    """Slots of the shared-memory ring between the processes, each of `max_message_bytes`."""
    stream_receivers: int | None = Field(None, ge=0, le=16)
    """Processes that take chunks of weights at ports of their own, started by the first update that streams;
    0 leaves the stream to the front. By default one for every four cores, and from one to four."""
    max_generate_streams: int = Field(65536, ge=1)
    """Calls of Generate, GenerateBatch and Score that may be open at once; more are refused."""
    max_weight_streams: int = Field(64, ge=1, le=1024)
    """Streams of chunks and readers of weights that may be open at once, at the front and each receiver."""
    max_watch_streams: int = Field(256, ge=1)
    """Calls of WatchEngine, and of reflection, that may be open at once."""
    max_health_streams: int = Field(1024, ge=1)
    """Watches of health that may be open at once; they need no token."""
    weights_roots: tuple[Path, ...] = ()
    """Directories that disk updates may read below; `model` is always allowed. In the environment they stand
    in one variable, as those of PATH do."""

    page_size: int = Field(16, ge=1, le=1024)
    num_pages: int = Field(0, ge=0)
    """Pages of the KV pool; 0 sizes it from memory."""
    mem_fraction_static: float = Field(0.0, ge=0, lt=1)
    """Share of the memory before the model loads that weights, KV and reserves may take together; 0 takes
    0.85 on a GPU, and 0.3 on a CPU, whose memory the trainer needs too."""
    context_length: int = Field(0, ge=0)
    """0 takes the model's."""
    max_running_requests: int = Field(0, ge=0, le=4096)
    """Sequences of one forward pass; 0 takes 256 on a GPU and 64 on a CPU."""
    max_waiting_requests: int = Field(65536, ge=1)
    max_prefill_tokens: int = Field(0, ge=0)
    """Prompt tokens of one forward pass; a longer prompt is cut into chunks of this size. 0 takes 8192 on a
    GPU and 2048 on a CPU."""
    chunked_prefill: bool = True
    mixed_batches: bool = True
    """Let prefill chunks and decode rows share a forward pass."""
    prefix_cache: bool = True
    attention_backend: Literal["auto", "torch", "flashinfer"] = "auto"
    """auto takes flashinfer on a GPU where it is installed and fits the model, else torch."""
    cuda_graphs: bool = True
    """Capture forward passes on a GPU: decode passes if the attention backend can be captured, prefill passes
    around their attention."""
    capture_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Batch sizes that decode graphs are captured for, up to max_running_requests; others are padded."""
    capture_prefill_tokens: tuple[int, ...] = (32, 64, 128, 192, 256, 384, 512)
    """Tokens of prefill and mixed passes that graphs are captured for, others are padded; above the largest,
    where the device takes longer than the host, passes run uncaptured. Empty: none is captured."""
    overlap: bool | None = None
    """Prepare the next forward pass while the device runs one; by default on a GPU only."""
    max_prompt_logits_rows: int = Field(512, ge=1)
    """Rows of logits computed at once for prompt log-probabilities."""

    max_adapters: int = Field(0, ge=0, le=256)
    """LoRA adapters that can be held beside the base weights; memory for all of them is taken at start."""
    max_adapter_rank: int = Field(16, ge=1, le=1024)
    """Of each of them; one of a smaller rank takes as much memory."""
    reserve_device_staging: bool = False
    """Keep a second arena on the device, so that updates default to staging=device."""
    lease_seconds: float = Field(60.0, gt=0, le=4_294_967)
    """An open update that no call touches for this long ends. At most what messages hold in milliseconds."""
    min_version: int = Field(0, ge=0, lt=1 << 64)
    """Refuse generation below this weight version; for an engine that replaces a lost one."""
    initial_version: int = Field(0, ge=0, lt=1 << 64)
    """Weight version of the weights loaded at start."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @field_validator("model", "tls_cert", "tls_key", "tls_client_ca", "metrics_log")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else usable_path(path)

    @field_validator("host", "metrics_host")
    @classmethod
    def _can_be_looked_up(cls, host: str) -> str:
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise ValueError(f"{host!r} is neither a host's name nor an address: {error}") from error
        if not host.isprintable():
            raise ValueError(f"{host!r} has characters that no host's name has")
        return host

    @field_validator("token")
    @classmethod
    def _can_be_sent(cls, token: SecretStr | None) -> SecretStr | None:
        text = "" if token is None else token.get_secret_value()
        if token is not None and not text:
            raise ValueError(
                "is empty, which would let everybody in; unset it (ROLLSYNC_TOKEN), or choose one"
            )
        if not (text.isascii() and text.isprintable() and text == text.strip()):
            raise ValueError(
                "has characters that no header can carry: use printable ASCII, without spaces or a line "
                "break at its ends"
            )
        return token

    @field_validator("capture_batch_sizes", "capture_prefill_tokens", mode="before")
    @classmethod
    def _list_of_sizes(cls, sizes: Any) -> Any:
        return _entries(sizes, ",") if isinstance(sizes, str) else sizes

    @field_validator("capture_batch_sizes", "capture_prefill_tokens")
    @classmethod
    def _positive_sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in sizes):
            raise ValueError(f"every size must be at least 1, not {min(sizes)}")
        return tuple(sorted(set(sizes)))

    @field_validator("weights_roots", mode="before")
    @classmethod
    def _list_of_roots(cls, roots: Any) -> Any:
        return _entries(roots, os.pathsep) if isinstance(roots, str) else roots

    @field_validator("weights_roots")
    @classmethod
    def _absolute_roots(cls, roots: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(map(usable_path, roots))

    @field_validator("weights")
    @classmethod
    def _names_an_arena(cls, weights: str) -> str:
        kind, _, path = weights.partition(":")
        if weights and (kind != "ipc" or not path):
            raise ValueError(f"is {weights!r}; it must be ipc:FILE, or empty to load by load_format")
        return f"ipc:{usable_path(Path(path))}" if weights else ""

    @property
    def num_stream_receivers(self) -> int:
        """`stream_receivers`, or what it is by default on this machine."""
        if self.stream_receivers is not None:
            return self.stream_receivers
        return max(1, min(4, (os.cpu_count() or 1) // 4))

    @property
    def arena_descriptor(self) -> Path | None:
        """The file that describes the arena to start on."""
        return Path(self.weights.partition(":")[2]) if self.weights else None

    @model_validator(mode="after")
    def _is_safe(self) -> ServeConfig:
        tls = (self.tls_cert, self.tls_key)
        if any(tls) and not all(tls):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca and not all(tls):
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        for key in ("host", "metrics_host"):
            host = getattr(self, key)
            if host not in LOOPBACK and self.token is None and self.tls_client_ca is None:
                raise ValueError(
                    f"{key} {host!r} is not loopback: set a token (ROLLSYNC_TOKEN) or mTLS "
                    "(tls_cert, tls_key, tls_client_ca)"
                )
        return self


def load_config(flags: dict[str, Any], toml: Path | None = None) -> ServeConfig:
    """Resolve flags, environment and an optional TOML file into one ServeConfig.

    Args:
        flags: given on the command line; None values are left out.
        toml: a file whose top-level keys are ServeConfig's fields.

    Raises:
        ConfigError: naming each bad or unknown key.
    """
    values: dict[str, Any] = {}
    if toml is not None:
        try:
            values = tomllib.loads(toml.read_text())
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no TOML, no UTF-8, long numbers
            raise ConfigError(f"cannot read {toml}: {error}") from error
    in_environment = {key for key in values if f"ROLLSYNC_{key.upper()}" in os.environ}
    values = {key: value for key, value in values.items() if key not in in_environment}
    values |= {key: value for key, value in flags.items() if value is not None}
    known = {f"ROLLSYNC_{name.upper()}" for name in ServeConfig.model_fields} | CLIENT_VARIABLES
    if unknown := sorted(k for k in os.environ if k.startswith("ROLLSYNC_") and k not in known):
        raise ConfigError(f"unknown environment variable {unknown[0]}; known: {', '.join(sorted(known))}")
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_told(dict(one)) for one in error.errors())) from error


def _told(error: dict[str, Any]) -> str:
    """One of pydantic's errors, as somebody reads it who knows flags and keys, and no pydantic."""
    key = ".".join(map(str, error["loc"]))
    flag = f"--{key.replace('_', '-')}"
    if error["type"] == "missing":
        return f"{key} is missing: give {flag}, ROLLSYNC_{key.upper()} or the key {key} of a --config file"
    text = error["msg"].removeprefix("Value error, ")
    return f"{key}: {text}" if key else text
