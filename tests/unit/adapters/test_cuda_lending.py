"""Which handles a trainer lends for its CUDA tensors; allocations are a stand-in, on the CPU."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_kernels
from trainers_adapters import cuda_lending, send_ipc
from trainers_adapters.cuda_lending import CudaLending, Lent
from trainers_adapters.sources import ModuleSource
from weight_updater.arena import DTYPE_NAMES
from weight_updater.checksum import checksum
from weight_updater.device_memory import Allocation
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Manifest, TensorSpec


class Memory:
    """Allocations of a GPU that there is not."""

    def __init__(self) -> None:
        self.allocations: dict[int, tuple[torch.Tensor, bool]] = {}  # identity -> memory, shareable
        self.next_identity = 1
        self.freed: list[int] = []
        self.num_handles = 0

    def allocate(self, nbytes: int, *, shareable: bool = True) -> torch.Tensor:
        data = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocations[self.next_identity] = (data, shareable)
        self.next_identity += 1
        return data

    def renew(self, data: torch.Tensor) -> None:
        """Free an allocation and get another at the same address."""
        (identity,) = [one for one, (at, _) in self.allocations.items() if at is data]
        self.allocations[self.next_identity] = self.allocations.pop(identity)
        self.next_identity += 1

    def allocation_of(self, address: int, index: int) -> Allocation:
        for identity, (data, shareable) in self.allocations.items():
            if data.data_ptr() <= address < data.data_ptr() + data.numel():
                return Allocation(data.data_ptr(), data.numel(), identity, shareable)
        raise AssertionError(f"{address} lies in no allocation")

    def handle_of(self, allocation: Allocation, index: int) -> bytes | None:
        self.num_handles += 1
        return allocation.identity.to_bytes(64, "little") if allocation.shareable else None

    def read(self, lent: Lent, at: int, spec: TensorSpec) -> torch.Tensor:
        """What an engine would see of tensor `at`."""
        place = lent.placements[at]
        region = lent.regions[place.handle]
        data, _ = self.allocations[int.from_bytes(region.handle, "little")]
        assert place.offset + spec.nbytes <= region.size
        start = region.offset + place.offset
        dtype = {name: dtype for dtype, name in DTYPE_NAMES.items()}[spec.dtype]
        return data[start : start + spec.nbytes].clone().view(dtype).view(spec.shape)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()

    class Buffer:
        def __init__(self, nbytes: int, device: torch.device) -> None:
            self.nbytes = nbytes
            self.data: torch.Tensor | None = made.allocate(nbytes)

        def close(self) -> None:
            made.freed.append(self.nbytes)
            self.data = None

    def bytes_at(address: int, nbytes: int, index: int) -> torch.Tensor:
        found = made.allocation_of(address, index)
        data, _ = made.allocations[found.identity]
        return data[address - found.address :][:nbytes]

    replaced = {
        "allocation_of": made.allocation_of,
        "handle_of": made.handle_of,
        "identities_of": lambda places: [made.allocation_of(*place).identity for place in places],
        "device_uuid": lambda index: "GPU-0",
        "DeviceBuffer": Buffer,
        "bytes_at": bytes_at,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(cuda_lending, name, value)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return made


def view(data: torch.Tensor, start: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return data[start : start + count].view(dtype).view(shape)


def owned(data: torch.Tensor, start: int, *shape: int) -> torch.Tensor:
    """`view`, but whose storage tells by a weak reference who keeps it."""
    array = data.numpy()[start : start + torch.Size(shape).numel() * 2]
    storage = torch.from_numpy(array).untyped_storage()
    return torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, shape)  # type: ignore[call-overload]


def manifest_of(named: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in named.items()))


def lend(lending: CudaLending, named: dict[str, torch.Tensor]) -> Lent:
    return lending.lend(named.items(), manifest_of(named))


def assert_seen(memory: Memory, lent: Lent, named: dict[str, torch.Tensor]) -> None:
    for at, spec in enumerate(manifest_of(named).tensors):
        assert torch.equal(memory.read(lent, at, spec), named[spec.name]), spec.name


def test_one_region_for_each_allocation(memory: Memory) -> None:
    first, second = memory.allocate(4096), memory.allocate(4096)
    named = {
        "a": view(first, 512, 4, 6),
        "b": view(second, 0, 8),
        "c": view(first, 1024, 3, 5, dtype=torch.float32),
        "d": view(second, 18, 7),
    }
    for number, tensor in enumerate(named.values()):
        tensor.fill_(number + 0.5)
    lending = CudaLending()
    lent = lend(lending, named)
    assert [(region.offset, region.size) for region in lent.regions] == [(512, 572), (0, 32)]
    assert len(lending.allocation_ids) == 2
    assert_seen(memory, lent, named)
    first_bytes = [checksum(view(first, 512, 24)), checksum(view(second, 0, 8))]
    assert [region.probe_bytes for region in lent.regions] == [48, 16]
    assert [region.probe_checksum for region in lent.probed()] == first_bytes
    named["a"].fill_(9.0)
    assert lend(lending, named) is lent, "nothing is made anew for another step"
    assert memory.num_handles == 2
    checksums, _ = lending.scan()
    assert checksums == [checksum(tensor) for tensor in named.values()]


def test_another_allocation_at_the_same_address_has_another_id(memory: Memory) -> None:
    first, second = memory.allocate(4096), memory.allocate(4096)
    named = {"a": view(first, 0, 4), "b": view(second, 0, 4)}
    lending = CudaLending()
    before = lend(lending, named)
    memory.renew(first)
    after = lend(lending, named)
    assert after.digest != before.digest
    kept = after.allocation_ids & before.allocation_ids
    assert kept == {before.regions[1].allocation_id}
    assert len(after.allocation_ids) == 2
    assert_seen(memory, after, named)


@pytest.mark.case("B101")
def test_what_has_no_handle_goes_through_a_buffer(memory: Memory) -> None:
    shared, pieces = memory.allocate(4096), memory.allocate(4096, shareable=False)
    named = {
        "lent": view(shared, 0, 4, 4),
        "pieces": view(pieces, 0, 3, 3),
        "strided": view(shared, 512, 4, 6).t(),
    }
    lending = CudaLending()
    for step in range(2):
        for number, tensor in enumerate(named.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * step + number)
        lent = lend(lending, named)
        assert len(lent.regions) == 2
        assert_seen(memory, lent, named)
        assert lending.scan()[0] == [checksum(tensor) for tensor in named.values()]
    named["more"] = view(pieces, 1024, 512)
    larger = lend(lending, named)
    assert memory.freed == [], "engines may have the old buffer mapped"
    assert_seen(memory, larger, named)
    gone = lent.allocation_ids - larger.allocation_ids
    assert len(gone) == 1
    lending.forget()
    assert memory.freed == [512]
    lending.close()
    assert memory.freed == [512, 512 + 1024]
    assert lending.allocation_ids == set()


def test_what_could_not_be_lent_leaves_nothing_behind_for_what_was_lent_before(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines would read a buffer that nobody fills any more."""
    data = memory.allocate(4096)
    first = {"a": view(data, 0, 8), "b": view(data, 512, 4, 6).t()}
    second = {"a": view(data, 0, 8).view(2, 4).t(), "b": view(data, 512, 4, 6).t()}
    lending = CudaLending()
    lend(lending, first)

    def no_room(nbytes: int, device: torch.device) -> None:
        raise UpdateRefused(Reason.NO_MEMORY, "no room")

    with monkeypatch.context() as full:
        full.setattr(cuda_lending, "DeviceBuffer", no_room)
        with pytest.raises(UpdateRefused, match="no room"):
            lend(lending, second)
    for step in (1.0, 2.0):
        for tensor in first.values():
            tensor.fill_(step)
        assert_seen(memory, lend(lending, first), first)
        assert lending.scan()[0] == [checksum(tensor) for tensor in first.values()]


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_buffer_that_an_engine_may_have_mapped_is_not_freed(memory, acknowledged, monkeypatch):
    monkeypatch.setattr(send_ipc, "release_everywhere", lambda ids, clients: acknowledged)
    arena = send_ipc.IpcArena()
    arena._lending = lending = CudaLending()
    lend(lending, {"a": view(memory.allocate(512, shareable=False), 0, 8)})
    arena.close()
    assert memory.freed == ([256] if acknowledged else [])


def test_tensors_that_a_source_makes_anew_are_let_go_before_the_next(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a trainer would hold its model twice, and every push would come from other addresses."""
    fake_kernels(monkeypatch, FakeGpu(), cuda_lending)
    allocation = memory.allocate(4096)
    made: list[weakref.ref[torch.UntypedStorage]] = []
    alive_then: list[int] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        alive_then.append(sum(one() is not None for one in made))
        # Every time the same memory, as an allocator gives it; a storage of its own tells who keeps it.
        array = allocation.numpy()[512:1024]
        storage = torch.from_numpy(array).untyped_storage()
        made.append(weakref.ref(storage))
        whole = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (8, 32))  # type: ignore[call-overload]
        del storage
        whole.fill_(len(made))
        yield "a", whole

    manifest = Manifest((TensorSpec("a", "bfloat16", (8, 32)),))
    lending = CudaLending()

    def push() -> Lent:
        lending.let_go()
        named = list(source())  # all of it, before anything is lent
        return lending.lend(named, manifest)

    for step in range(1, 4):
        lent = push()
        expected = checksum(torch.full((8, 32), step, dtype=torch.bfloat16))
        assert lending.scan() == ([expected], False)
        assert lent.regions[0].offset == 512
    assert alive_then == [0, 0, 0]


def test_what_lies_where_it_lay_is_hashed_while_the_rest_is_compared(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    fake_kernels(monkeypatch, gpu, cuda_lending)
    data, pieces = memory.allocate(4096), memory.allocate(4096, shareable=False)
    named = {"a": view(data, 0, 4, 6), "b": view(data, 512, 8)}
    lending = CudaLending()
    launches_before: list[int] = []  # the comparison with the driver's identities
    while_comparing: list[object] = []

    def compare(places: list[tuple[int, int]]) -> list[int]:
        launches_before.append(len(gpu.launches))
        for value in while_comparing:
            named["a"].fill_(value)
        return [memory.allocation_of(*place).identity for place in places]

    monkeypatch.setattr(cuda_lending, "identities_of", compare)

    def push(*, early: bool = True) -> tuple[int, int]:
        """Launches before anything was compared, and in all."""
        launches_before.clear()
        gpu.launches.clear()
        lending.let_go()
        pairs = list(named.items())
        if early:
            lending.start_scan(pairs)
        lending.lend(pairs, manifest_of(named))
        at_once = launches_before[0] if launches_before else 0
        assert lending.scan() == ([checksum(tensor) for tensor in named.values()], False)
        return at_once, gpu.launches.count("scan")

    assert push() == (0, 1), "nothing is known yet"
    for step in (1, 2):
        named["b"].fill_(step)
        assert push() == (1, 1)
    assert push(early=False) == (0, 1)
    memory.renew(data)
    while_comparing.append(5)
    assert push() == (1, 2), "in another allocation now: what was found is dropped"
    while_comparing.clear()
    assert push() == (1, 1)
    lending.start_scan(list(named.items()))
    named["a"] = view(data, 1024, 4, 6)
    lending.lend(list(named.items()), manifest_of(named))
    assert lending.scan()[0] == [checksum(tensor) for tensor in named.values()], "of what is lent"
    named["a"] = view(data, 2048, 4, 6)
    assert push()[0] == 0, "it lies elsewhere"
    named["c"] = view(pieces, 0, 4)
    for value in (1, 2):
        named["c"].fill_(value)
        assert push()[0] == 0, "what is staged is filled first"


def test_parameters_that_lie_where_they_lay_are_lent_with_no_tensor_made_for_them(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lent last is kept until the next push, wherever the parameter points by then."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    fake_kernels(monkeypatch, FakeGpu(), cuda_lending)
    first, second = memory.allocate(4096), memory.allocate(4096)
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(owned(first, 0, 4, 6))
    module.bias = nn.Parameter(owned(first, 512, 4))
    source = ModuleSource(module)
    lending = CudaLending()
    num_made, detach = 0, torch.Tensor.detach

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_made
        num_made += 1
        return detach(tensor)

    monkeypatch.setattr(torch.Tensor, "detach", counted)

    def push() -> tuple[Lent, int]:
        """What was lent, and how many tensors were made for it."""
        nonlocal num_made
        num_made = 0
        named = source.on_gpus()
        assert named is not None
        lent, made = lending.lend(named, source.manifest(checksums=False)), num_made
        now = {name: detach(parameter) for name, parameter in module.named_parameters()}
        assert_seen(memory, lent, now)
        assert lending.scan()[0] == [checksum(tensor) for tensor in now.values()]
        return lent, made

    lent, made = push()
    assert made == 2
    with torch.no_grad():
        module.weight.fill_(7.0)
    assert push() == (lent, 0)
    before = weakref.ref(module.weight.untyped_storage())
    module.weight.data = owned(second, 0, 4, 6)
    assert before() is not None, "engines may have it mapped"
    moved, made = push()
    assert (made, moved.digest == lent.digest) == (2, False)
    assert before() is None
    assert push() == (moved, 0)


def test_what_is_staged_is_taken_as_its_parameter_lies_now(memory: Memory) -> None:
    """Not as it lay at the push before, from the same address and of the same shape."""
    data = memory.allocate(4096)
    lending = CudaLending()
    flat = view(data, 0, 24).copy_(torch.arange(24))
    for strides in ((1, 4), (2, 8), (1, 6)):
        named = {"a": flat.as_strided((4, 4), strides)}
        assert_seen(memory, lend(lending, named), named)


def test_a_source_must_yield_what_its_manifest_says(memory: Memory) -> None:
    data = memory.allocate(4096)
    named = {"a": view(data, 0, 4)}
    with pytest.raises(ValueError, match=r"yields a .*float32.* where a bfloat16"):
        CudaLending().lend({"a": view(data, 0, 4, dtype=torch.float32)}.items(), manifest_of(named))
