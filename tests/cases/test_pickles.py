"""Nothing is unpickled or evaluated: not by any call, not by any file, and there is no code that could."""

from __future__ import annotations

import ast
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

import weight_updater
from rollout_engine.server import convert
from rollout_engine.v1 import rollout_pb2, weights_pb2
from trainers_adapters import weights_calls
from weight_updater.requests import CudaIpcRegion, FromIpc, RegionPlacement, ShmSegment

ROOT = Path(weight_updater.__file__).resolve().parent.parent
PACKAGES = ("rollout_engine", "weight_updater", "trainers_adapters")
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "copyreg",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "np.load",
    "torch.hub.load", "yaml.load", "yaml.unsafe_load", "multiprocessing.Queue", "multiprocessing.Pipe",
}  # fmt: skip
TORCH_SHARING = {
    "reduce_tensor",
    "rebuild_cuda_tensor",
    "reductions",
    "_share_cuda_",
    "_new_shared_cuda",
    "ForkingPickler",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_torch_compile(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("re.compile", "torch.compile")


@pytest.mark.case("B049")
@pytest.mark.case("B050")
def test_no_module_can_unpickle_or_evaluate():
    found = []
    for file, tree in sources():
        for line, name in imported(tree):
            if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS:
                found.append(f"{file}:{line} imports {name}")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in FORBIDDEN_CALLS
                and not is_torch_compile(node)
            ):
                found.append(f"{file}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "weights_only":
                found.append(f"{file}:{node.value.lineno} loads with an unpickler")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", file
    assert found == []


class Exploit:
    """Unpickling it makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.mkdir, (self.marker,)


class Chain:
    """The same through a builtin, as lists of forbidden names are got around."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return getattr, (Path(self.marker), "mkdir")


def payloads(marker: Path) -> list[bytes]:
    tail = f"cbuiltins\ngetattr\n(cpathlib\nPath\n(V{marker}\ntRVmkdir\ntR(tR.".encode()
    return [
        *(pickle.dumps(Exploit(marker), protocol) for protocol in (0, 2, 5)),
        pickle.dumps(Chain(marker)),
        tail,
    ]


def holds_bytes(descriptor: Descriptor, seen: tuple[str, ...] = ()) -> bool:
    """Whether a message has a field that bytes or a text fit in, at any depth."""
    plain = {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING}
    if any(field.type in plain for field in descriptor.fields):
        return True
    nested = [field.message_type for field in descriptor.fields if field.message_type is not None]
    return any(holds_bytes(t, (*seen, t.name)) for t in nested if t.name not in seen)


METHODS = [
    (service, method)
    for file, service in ((rollout_pb2, "Rollout"), (weights_pb2, "Weights"))
    for method in file.DESCRIPTOR.services_by_name[service].methods
    if holds_bytes(method.input_type)
]


def real_oneofs(descriptor: Descriptor) -> dict[str, list[str]]:
    """The fields of which a message has one at a time."""
    return {
        one.name: [field.name for field in one.fields] for one in descriptor.oneofs if len(one.fields) > 1
    }


def num_choices(descriptor: Descriptor, seen: tuple[str, ...] = ()) -> int:
    """How many messages it takes until each field of every oneof was set once, at any depth."""
    nested = [field.message_type for field in descriptor.fields if field.message_type is not None]
    deeper = [num_choices(one, (*seen, one.name)) for one in nested if one.name not in seen]
    return max([1, *map(len, real_oneofs(descriptor).values()), *deeper])


def fill(message: Any, payload: bytes, outer: int, inner: int, depth: int = 0) -> Any:
    """Put a payload into every bytes and string field, at every depth. Numbers become 1, of what is
    repeated there are two, so that an index of 1 leads somewhere.

    outer, inner: of each oneof the field that is set, counted around; in the message itself, and below.
    """
    descriptor: Descriptor = message.DESCRIPTOR
    left_out = {
        name
        for names in real_oneofs(descriptor).values()
        for at, name in enumerate(names)
        if at != (inner if depth else outer) % len(names)
    }
    for field in descriptor.fields:
        if field.name in left_out:
            continue
        if field.type == FieldDescriptor.TYPE_BYTES:
            value: Any = payload
        elif field.type == FieldDescriptor.TYPE_STRING:
            value = payload.decode("latin-1")
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth < 4 and not field.message_type.GetOptions().map_entry:
                nested = getattr(message, field.name)
                for one in (nested.add(), nested.add()) if field.is_repeated else (nested,):
                    fill(one, payload, outer, inner, depth + 1)
            continue
        else:
            value = 1
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


@pytest.mark.case("B049")
@pytest.mark.case("B050")
@pytest.mark.parametrize(("service", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_a_pickle_in_every_field_of_every_call(service, method: MethodDescriptor, served, tmp_path):
    """A real engine; whatever it answers, nothing was made of it, and it answers the next request."""
    marker, codes = tmp_path / "marker", set()
    ways = ("stream" if s else "unary" for s in (method.client_streaming, method.server_streaming))
    with grpc.insecure_channel(served.address) as channel:
        call = getattr(channel, "_".join(ways))(
            f"/rollout_engine.v1.{service}/{method.name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=bytes,
        )
        for payload in payloads(marker):
            for request in variants(method, payload):
                try:
                    answer = call(iter(request) if method.client_streaming else request[0], timeout=5)
                    if method.server_streaming:
                        next(answer, None)
                        answer.cancel()
                except grpc.RpcError as error:
                    codes.add(error.code().name)
    assert codes <= TYPED
    assert not marker.exists()
    assert served.greedy([1, 2, 3], 2, ignore_eos=True).finish_reason == "length"
    assert served.rollout.info().state.open_update_id == ""


TYPED = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED", "CANCELLED", "ABORTED"}


def variants(method: MethodDescriptor, payload: bytes) -> Iterator[list[Any]]:
    """The request with everything set, once for each choice of the oneofs in it, so that each is reached
    behind each other one: a target that is refused would hide what stands beside it.
    """
    make, count = method.input_type._concrete_class, num_choices(method.input_type)
    choices = itertools.product(range(count), repeat=2)
    messages = [fill(make(), payload, outer, inner) for outer, inner in choices]
    for message in messages:
        yield [message, message] if method.client_streaming else [message]
    if method.client_streaming:
        yield messages


@pytest.mark.case("B104")
def test_handles_are_our_own_fields_and_no_tuple_of_torchs():
    """What torch pickles for a CUDA tensor is a tuple whose order is its own affair; nothing here uses it."""
    found = []
    for file, tree in sources():
        words = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        words |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        words |= {part for _, name in imported(tree) for part in name.split(".")}
        found += [f"{file}: {word}" for word in words & TORCH_SHARING]
    assert found == []


@pytest.mark.case("B104")
def test_every_field_of_a_handle_arrives_under_its_name():
    owner = ShmSegment("rollsync-" + "a" * 32, 64, "owner-id")
    cuda = tuple(
        CudaIpcRegion(
            f"id-{i}", f"GPU-{i}", bytes([i]) * 64, 11 * i, 13 * i + 1, 8 * i, 17 * i, owner if i else None
        )
        for i in range(3)
    )
    shared = tuple(ShmSegment(f"rollsync-{i}", 100 + i, f"shm-{i}") for i in range(3))
    places = tuple(RegionPlacement(i, 2 - i, 256 * i) for i in range(3))
    for regions, lent in ((cuda, "cuda_regions"), (shared, "regions")):
        call = weights_calls.update_from_ipc("u", regions, places, scanned=True)
        wire = type(call.request).FromString(call.request.SerializeToString())
        assert convert.from_ipc(wire, "u") == FromIpc("u", **{lent: regions}, placements=places, scanned=True)
