"""The one place that knows gRPC status codes: domain reasons become codes here and nowhere else.

Every error that leaves the front carries trailing metadata: `rollsync-reason`, a stable word, and
`rollsync-kind`: engine (a request was refused), refused (an update was; nothing was written) or torn.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from rollout_engine.logs import get_log
from rollout_engine.messages import ErrorInfo
from rollout_engine.server.unreadable import readable
from rollout_engine.v1 import rollout_pb2
from weight_updater.errors import Reason as UpdateReason
from weight_updater.errors import UpdateError, UpdateRefused, WeightsTorn

log = get_log(__name__)

Code = grpc.StatusCode
DomainError = EngineError | UpdateError
Servicer = TypeVar("Servicer", bound=type)

REASON_KEY = "rollsync-reason"
KIND_KEY = "rollsync-kind"
MAX_DETAILS = 1500
"""Characters of an error's text."""
MAX_DETAILS_BYTES = 4500
"""Of the same as it travels: a default client refuses trailing metadata above 8 KiB, or may."""

ENGINE_CODES: dict[EngineReason, grpc.StatusCode] = {
    EngineReason.INVALID_REQUEST: Code.INVALID_ARGUMENT,
    EngineReason.EMPTY_PROMPT: Code.INVALID_ARGUMENT,
    EngineReason.PROMPT_TOO_LONG: Code.INVALID_ARGUMENT,
    EngineReason.TOKEN_OUT_OF_RANGE: Code.INVALID_ARGUMENT,
    EngineReason.EXCEEDS_KV_POOL: Code.RESOURCE_EXHAUSTED,
    EngineReason.DUPLICATE_REQUEST: Code.ALREADY_EXISTS,
    EngineReason.VERSION_TOO_OLD: Code.FAILED_PRECONDITION,
    EngineReason.UNKNOWN_ADAPTER: Code.NOT_FOUND,
    EngineReason.ADAPTER_STALE: Code.FAILED_PRECONDITION,
    EngineReason.NOT_SERVING: Code.UNAVAILABLE,
    EngineReason.ASLEEP: Code.FAILED_PRECONDITION,
    EngineReason.BUSY: Code.FAILED_PRECONDITION,
    EngineReason.QUEUE_FULL: Code.RESOURCE_EXHAUSTED,
    EngineReason.TOO_MANY_STREAMS: Code.RESOURCE_EXHAUSTED,
    EngineReason.NO_TOKENIZER: Code.FAILED_PRECONDITION,
    EngineReason.UNKNOWN_NAME: Code.NOT_FOUND,
    EngineReason.MODEL_INVALID: Code.FAILED_PRECONDITION,
    EngineReason.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    EngineReason.ENGINE_DEAD: Code.UNAVAILABLE,
    EngineReason.DEADLINE: Code.DEADLINE_EXCEEDED,
    EngineReason.INTERNAL: Code.INTERNAL,
}

UPDATE_CODES: dict[UpdateReason, grpc.StatusCode] = {
    UpdateReason.INVALID_UPDATE: Code.INVALID_ARGUMENT,
    UpdateReason.MANIFEST_MISMATCH: Code.INVALID_ARGUMENT,
    UpdateReason.MANIFEST_UNKNOWN: Code.NOT_FOUND,
    UpdateReason.STALE_VERSION: Code.FAILED_PRECONDITION,
    UpdateReason.UPDATE_IN_PROGRESS: Code.ABORTED,
    UpdateReason.UNKNOWN_UPDATE: Code.NOT_FOUND,
    UpdateReason.WRONG_STATE: Code.FAILED_PRECONDITION,
    UpdateReason.INCOMPLETE: Code.FAILED_PRECONDITION,
    UpdateReason.BAD_CHUNK: Code.INVALID_ARGUMENT,
    UpdateReason.CHECKSUM_MISMATCH: Code.DATA_LOSS,
    UpdateReason.NONFINITE: Code.INVALID_ARGUMENT,
    UpdateReason.FILE_NOT_FOUND: Code.NOT_FOUND,
    UpdateReason.FILE_CORRUPT: Code.DATA_LOSS,
    UpdateReason.PATH_FORBIDDEN: Code.PERMISSION_DENIED,
    UpdateReason.MEMORY_UNAVAILABLE: Code.FAILED_PRECONDITION,
    UpdateReason.PEER_LOST: Code.UNAVAILABLE,
    UpdateReason.TIMEOUT: Code.DEADLINE_EXCEEDED,
    UpdateReason.GROUP_UNKNOWN: Code.NOT_FOUND,
    UpdateReason.GROUP_EXISTS: Code.ALREADY_EXISTS,
    UpdateReason.NO_STAGING: Code.RESOURCE_EXHAUSTED,
    UpdateReason.NO_PREVIOUS: Code.FAILED_PRECONDITION,
    UpdateReason.BASE_MISMATCH: Code.FAILED_PRECONDITION,
    UpdateReason.NO_ADAPTER_SLOT: Code.RESOURCE_EXHAUSTED,
    UpdateReason.NO_MEMORY: Code.RESOURCE_EXHAUSTED,
    UpdateReason.WOULD_MOVE: Code.FAILED_PRECONDITION,
    UpdateReason.PAUSED_WAIT: Code.FAILED_PRECONDITION,
    UpdateReason.ASLEEP: Code.FAILED_PRECONDITION,
    UpdateReason.WRITE_FAILED: Code.DATA_LOSS,
    UpdateReason.INTERNAL: Code.INTERNAL,
}


def code_of(error: DomainError) -> grpc.StatusCode:
    """The status code of a domain error."""
    if isinstance(error, EngineError):
        return ENGINE_CODES[error.reason]
    return UPDATE_CODES[error.reason]


def kind_of(error: DomainError) -> str:
    """engine, refused or torn."""
    if isinstance(error, EngineError):
        return "engine"
    return "torn" if isinstance(error, WeightsTorn) else "refused"


def error_from(info: ErrorInfo) -> DomainError:
    """The exception that an ErrorInfo of the engine process stands for."""
    if info.kind == "engine":
        return EngineError(EngineReason(info.reason), info.message)
    kind = WeightsTorn if info.kind == "torn" else UpdateRefused
    return kind(UpdateReason(info.reason), info.message)


def item_error(error: DomainError) -> rollout_pb2.RequestError:
    """What one item of a batch was refused with."""
    return rollout_pb2.RequestError(
        status=code_of(error).value[0], reason=error.reason.value, message=shorten(error.message)
    )


def shorten(text: str) -> str:
    """Cut a text to what trailing metadata can carry, where all but printable ASCII takes 3 bytes for one."""
    num_bytes = 0
    for at, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if plain else 3 * len(character.encode(errors="backslashreplace"))
        if at >= MAX_DETAILS or num_bytes > MAX_DETAILS_BYTES:
            return text[: max(0, min(at, MAX_DETAILS) - 3)] + "..."
    return text


def _metadata(error: DomainError) -> tuple[tuple[str, str], ...]:
    return ((REASON_KEY, error.reason.value), (KIND_KEY, kind_of(error)))


async def abort(context: grpc.aio.ServicerContext, error: DomainError) -> NoReturn:
    """End an RPC with the status of a domain error."""
    await context.abort(code_of(error), shorten(error.message), trailing_metadata=_metadata(error))
    raise AssertionError("abort does not return")


def abort_now(context: grpc.ServicerContext, error: DomainError) -> NoReturn:
    """`abort` for a server of threads."""
    context.set_trailing_metadata(_metadata(error))
    context.abort(code_of(error), shorten(error.message))
    raise AssertionError("abort does not return")


def guarded(service: ServiceDescriptor) -> Callable[[Servicer], Servicer]:
    """Class decorator: every RPC of `service` ends in a status of the tables above.

    The class has a `tally`, which counts the errors.

    An exception that is no domain error is a bug of ours: the log gets the traceback, the caller a
    short text without any of it, since an exception's text may carry paths or secrets.

    Raises:
        TypeError: at import, if the class lacks an RPC of the service.
    """

    def decorate(servicer: Servicer) -> Servicer:
        for method in service.methods:
            if method.name not in vars(servicer):
                raise TypeError(f"{servicer.__name__} lacks {service.name}.{method.name}")
            setattr(servicer, method.name, _guard(vars(servicer)[method.name]))
        return servicer

    return decorate


def _guard(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(handler)
    async def answer(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handler(self, readable(request), context)
        except (EngineError, UpdateError) as error:
            self.tally.errored(kind_of(error), error.reason)
            await abort(context, error)
        except grpc.aio.BaseError:  # an abort that the handler made itself
            raise
        except Exception as bug:  # noqa: BLE001 - a bug of ours; the log has it
            internal = _internal(handler.__name__, bug)
            self.tally.errored(kind_of(internal), internal.reason)
            await abort(context, internal)

    return answer


def _internal(method: str, bug: Exception) -> EngineError:
    """What the caller is told of an exception, which the log gets."""
    log.exception("rpc_failed", bug, rpc=method)
    return EngineError(EngineReason.INTERNAL, f"{method}: internal error; the engine's log has it")


def answered(context: grpc.ServicerContext, method: str, handler: Callable[[], Any]) -> Any:
    """What `handler` gives, or the end of the RPC as `guarded` has it; for a server of threads."""
    try:
        return handler()
    except (EngineError, UpdateError) as error:
        known: DomainError = error
    except grpc.RpcError:  # the client is gone, nobody reads a status
        raise
    except Exception as bug:  # noqa: BLE001 - a bug of ours must not look like the caller's
        known = _internal(method, bug)
    abort_now(context, known)
