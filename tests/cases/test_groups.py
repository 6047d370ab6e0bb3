"""Process groups: who may join, and what ends in time when somebody does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout_engine import messages as m
from tests.cases.common import assert_serves, live, trained
from tests.tiny import load_reference
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.weight_updater.gloo_ends import LOOPBACK, free_port
from tests.unit.weight_updater.nccl_wire import World
from tests.unit.weight_updater.tiny_target import SHAPES, TinyTarget, begin, make_updater
from tests.ways import WAYS, manifest_of
from tests.wire.trainer import PROMPT
from trainers_adapters import BroadcastGroup, ModuleSource, PushError, push_weights, send_distributed
from trainers_adapters.clients import WeightsClient
from weight_updater import nccl
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.gloo import GlooGroup
from weight_updater.groups import SenderGroup
from weight_updater.meeting import Facts, Member, connect, listen, say_hello
from weight_updater.requests import BeginUpdate, FromDistributed, InitGroup, Path, Staging


@pytest.fixture
def world() -> Iterator[World]:
    made = World(timeout_s=30.0)
    yield made
    made.registry.close()
    made.pool.shutdown()


def rendezvous(world: World, monkeypatch, trainer: Facts, engine: Facts) -> tuple[str, str]:
    """Both ends' refusals of a group in which the ranks say this of themselves; no communicator is made."""
    built: list[object] = []
    monkeypatch.setattr(world, "build", lambda *args: built.append(args))
    main = threading.current_thread()
    monkeypatch.setattr(
        nccl, "facts_of", lambda device: trainer if threading.current_thread() is main else engine
    )
    joined: list[object] = []
    submit = world.pool.submit

    def remember(*args):
        joined.append(submit(*args))
        return joined[-1]

    monkeypatch.setattr(world.pool, "submit", remember)
    started = time.monotonic()
    with pytest.raises(UpdateRefused) as ours:
        world.join(monkeypatch)
    with pytest.raises(UpdateRefused) as theirs:
        joined[0].result(20)
    assert time.monotonic() - started < 15
    assert built == [], "before NCCL is asked"
    assert {ours.value.reason, theirs.value.reason} <= {Reason.INVALID_UPDATE, Reason.PEER_LOST}
    assert world.registry.names == []
    return ours.value.message, theirs.value.message


@pytest.mark.case("B088")
def test_two_ranks_on_one_gpu_are_refused_by_its_name(world, monkeypatch):
    here = Facts({}, "GPU-1111", "use the ipc path on one GPU, or the backend gloo")
    texts = rendezvous(world, monkeypatch, here, here)
    assert any("are both on GPU-1111; use the ipc path" in text for text in texts)


SETTINGS = {
    "the version": ({"NCCL's version": "2.27.5"}, {"NCCL's version": "2.26.2"}, "'2.27.5'", "'2.26.2'"),
    "a setting": ({"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_CUMEM_ENABLE": "1"}, "'0'", "'1'"),
    "a setting of one side": ({}, {"NCCL_P2P_DISABLE": "1"}, "not set", "'1'"),
    "a setting of the other": ({"NCCL_P2P_LEVEL": "NVL"}, {}, "'NVL'", "not set"),
}


@pytest.mark.case("B091")
@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_differ_are_told_with_both_values(what, world, monkeypatch):
    trainer, engine, ours, theirs = SETTINGS[what]
    texts = rendezvous(world, monkeypatch, Facts(trainer, "GPU-0"), Facts(engine, "GPU-1"))
    (name,) = {*trainer, *engine}
    assert any(
        name in text and f"{ours} at rank 0" in text and f"{theirs} at rank 1" in text for text in texts
    )


@pytest.mark.case("B088")
@pytest.mark.case("B091")
def test_ranks_that_fit_meet(world, monkeypatch):
    main = threading.current_thread()
    same = {"NCCL_CUMEM_ENABLE": "1", "NCCL's version": "2.27.5"}
    places = {True: "GPU-0", False: "GPU-1"}
    monkeypatch.setattr(
        nccl, "facts_of", lambda device: Facts(same, places[threading.current_thread() is main], "")
    )
    with world.join(monkeypatch):
        assert world.registry.names == ["g"]


@pytest.mark.case("B091")
def test_what_a_rank_says_of_itself_is_read_from_its_environment(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = nccl.facts_of(torch.device("cpu"))
    assert facts.same == {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_LEVEL": "SYS"}
    assert facts.place == ""


def meet(members: list[Member], port: int) -> list[UpdateError | None]:
    """What each member's hello ends with; rank 0 hosts."""
    outcomes: list[UpdateError | None] = [None] * len(members)
    stores: list[object] = []
    listener = listen(LOOPBACK, port)

    def hello(at: int) -> None:
        try:
            store = connect(members[at], listener if at == 0 else None)
            stores.append(store)
            say_hello(members[at], store, time.monotonic() + members[at].timeout_s)
        except UpdateError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=hello, args=(at,)) for at in range(len(members))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.case("B089")
@pytest.mark.parametrize(
    ("ranks", "text"), [([0, 1, 1, 2, 3], "rank 1 of 5 is taken"), ([0, 2, 3, 4, 4], "rank 4 of 5")]
)
def test_a_rank_that_is_taken_twice_is_refused_at_once(ranks, text):
    """Four engines that count their ranks alike, or from the same offset."""
    port = free_port()
    members = [Member("g", LOOPBACK, port, rank, 5, 30.0) for rank in ranks]
    started = time.monotonic()
    outcomes = meet(members, port)
    assert time.monotonic() - started < 15, "nobody waits for the rank that does not come"
    assert all(isinstance(error, UpdateRefused) for error in outcomes)
    assert any(text in error.message for error in outcomes)


@pytest.mark.case("B089")
def test_a_rank_that_is_missing_is_named():
    port = free_port()
    outcomes = meet([Member("g", LOOPBACK, port, rank, 4, 0.5) for rank in (0, 1, 3)], port)
    assert all(
        error is not None and "rank 2 did not come within 0.5 s" in error.message for error in outcomes
    )


@pytest.mark.case("B089")
@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_every_engine_of_a_push_gets_a_rank_of_its_own(num_engines, monkeypatch):
    class Silent:
        def __init__(self, *args: object, **options: object) -> None:
            self.world_size = args[3]

        def broadcast(self, manifest, tensors, bucket_bytes) -> None:
            """The engine, which is not real either, does not wait for it."""

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(send_distributed, "SenderGroup", Silent)
    module = torch.nn.Linear(3, 2)
    engines = [FakeEngine() for _ in range(num_engines)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(WeightsClient(stack.enter_context(serving(one)))) for one in engines]
        with BroadcastGroup() as group:
            push_weights(ModuleSource(module), clients, via=group)
            assert group._group.world_size == num_engines + 1
    joined = [event for one in engines for event in one.events if event.startswith("InitWeightsUpdateGroup")]
    assert sorted(joined) == [
        f"InitWeightsUpdateGroup {rank}/{num_engines + 1}" for rank in range(1, num_engines + 1)
    ]


@pytest.mark.case("B082")
@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1", "0.0.0.0", "::1"])
def test_addresses_that_lead_nowhere_are_named_in_time(address):
    """The trainer told a name or an address that is its own only from where it stands."""
    port, started = free_port(), time.monotonic()
    with pytest.raises(UpdateRefused) as refused:
        GlooGroup(Member("g", address, port, 1, 2, 0.5))
    assert time.monotonic() - started < 15, "by itself the system would try for two minutes"
    assert refused.value.reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    shown = f"[{address}]" if ":" in address else address
    assert f"rank 0 at {shown}:{port}" in refused.value.message


@pytest.mark.case("B082")
def test_an_engine_that_is_told_a_useless_address_answers_meanwhile(engine):
    before, port = live(engine), free_port()
    request = InitGroup("nowhere", "192.0.2.1", port, 1, 2, timeout_s=0.5)
    joining = engine.start(m.InitWeightsGroup, request=request)
    while not joining.done():
        assert engine.generate(PROMPT).labels() == [before[2]] * 8
    with pytest.raises(UpdateRefused, match=rf"rank 0 at 192\.0\.2\.1:{port}") as refused:
        joining.result()
    assert refused.value.reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    assert live(engine) == before


@pytest.mark.case("B082")
def test_the_address_that_a_trainer_tells_is_its_own_choice():
    """It is where rank 0 listens, too: an address of another host is refused there and then."""
    with pytest.raises(
        UpdateRefused, match=r"cannot listen on 192\.0\.2\.1 .* address of this host"
    ) as refused:
        SenderGroup("g", "192.0.2.1", 0, 2, 1.0)
    assert refused.value.reason is Reason.INVALID_UPDATE
    client = WeightsClient("127.0.0.1:1")
    with client, BroadcastGroup(master_address="192.0.2.1") as group, pytest.raises(PushError) as failed:
        push_weights(ModuleSource(torch.nn.Linear(2, 2)), client, via=group)
    assert "192.0.2.1" in failed.value.message
    assert failed.value.reason == "INVALID_UPDATE"


@pytest.mark.case("B084")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("how", ["stalls", "leaves", "never sends"])
def test_a_sender_that_stops_half_way(how, staging, engine, ways, tied_dir, weights):
    """After the first of several buckets: the call ends in time, and the group can be made anew."""
    ways.join()
    before, new = live(engine), trained(weights)
    group, gate = ways._group, threading.Event()

    def tensors() -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(new.values()):
            if number == 5:
                if how == "leaves":
                    raise KeyboardInterrupt
                gate.wait(20)
            yield tensor

    def broadcast() -> None:
        if how == "never sends":
            gate.wait(20)
            return
        try:
            group.broadcast(manifest_of(new), tensors(), 4096)
        except (UpdateError, KeyboardInterrupt):
            return

    begin = BeginUpdate(Path.DISTRIBUTED, manifest=manifest_of(new), staging=staging, bucket_bytes=4096)
    begun = engine.begin(begin)
    sending = threading.Thread(target=broadcast)
    sending.start()
    started = time.monotonic()
    timeout_s = 3.0 if how == "stalls" else 0.5  # of one wait: the first bucket must have come before
    with pytest.raises(UpdateError) as lost:
        engine.update(FromDistributed(begun.update_id, ways._group_name, timeout_s=timeout_s))
    assert time.monotonic() - started < 15, "the sender would go on after 20 s"
    assert lost.value.reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    gate.set()
    sending.join()
    assert engine.updater.groups.names == [], "a group that failed is gone"
    assert engine.version == before[2]
    if staging is Staging.HOST or how == "never sends":
        assert engine.generate(PROMPT).labels() == [before[2]] * 8
    else:
        assert engine.updater.torn_reason
    ways.push("distributed", new, staging=staging)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B073")
def test_who_is_down_is_named_and_nobody_commits(tied_dir):
    source, up = ModuleSource(load_reference(tied_dir)), FakeEngine()
    with serving(up) as address, WeightsClient(address) as alive, WeightsClient("127.0.0.1:1") as dead:
        for clients in ([alive, dead], [dead, alive]):
            with pytest.raises(PushError, match=r"127\.0\.0\.1:1") as error:
                push_weights(source, clients, 7)
            assert (error.value.committed, up.version, up.open) == ((), 0, None)


@pytest.mark.case("B073")
def test_replicas_with_payloads_of_their_own_keep_them_apart():
    """As ranks that each hold another part: what one gets never shows in the other."""
    engines = [FakeEngine(), FakeEngine()]
    modules = [torch.nn.Linear(4, 3) for _ in engines]
    for engine, module in zip(engines, modules, strict=True):
        with serving(engine) as address, WeightsClient(address) as client:
            push_weights(ModuleSource(module), client, 3)
    for engine, module in zip(engines, modules, strict=True):
        assert engine.version == 3
        assert engine.weights["weight"] == module.weight.detach().numpy().tobytes()
    assert engines[0].weights != engines[1].weights


def counted(updater_call: Callable[[], object]) -> int:
    """extra_bytes that a commit reported."""
    return updater_call().extra_bytes  # type: ignore[attr-defined]


@pytest.mark.case("B094")
def test_an_update_takes_no_second_model_where_none_was_reserved(engine, ways, weights):
    """staging none: nothing but what a bucket needs; each reply says what was taken."""
    nbytes = engine.runner.target.arena.nbytes
    for way in WAYS:
        assert counted(lambda way=way: ways.push(way, trained(weights), staging=Staging.NONE)) == 0
        assert counted(lambda way=way: ways.push(way, trained(weights), staging=Staging.DEVICE)) == 0
        assert counted(lambda way=way: ways.push(way, trained(weights), staging=Staging.HOST)) == nbytes


@pytest.mark.case("B094")
def test_a_staging_that_does_not_fit_is_refused_before_a_byte_moves(monkeypatch):
    """And the old weights serve on; without staging there is room."""
    target = TinyTarget()
    updater = make_updater(target)
    before = target.buffer.clone()

    def no_room(nbytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError(f"cannot allocate {nbytes} bytes")

    monkeypatch.setattr("weight_updater.staging.aligned_zeros", no_room)
    new = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    for fields in ({"staging": Staging.HOST}, {}):
        with pytest.raises(UpdateRefused, match="no room for staging in host memory") as refused:
            begin(updater, new, **fields)
        assert refused.value.reason is Reason.NO_MEMORY
        assert updater.open is None
    assert torch.equal(target.buffer, before)
    begin(updater, new, staging=Staging.NONE)
