"""ShardedSource over two gloo ranks: whole weights arrive, a bucket at a time, and all ranks end together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests import children
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.adapters.sharded_nets import WAYS, Net
from tests.unit.adapters.sharded_ranks import ask_all, two_ranks
from trainers_adapters import RankFailed, ShardedSource, WeightsClient, push_sharded
from trainers_adapters.sharding.ranks import Kind, Word
from weight_updater.checksum import checksum

COMPUTING = [way for way in WAYS if way != "zero3"]  # the stand-in's modules do not compute


class Pair:
    """Two ranks, told the same at once, and two engines that rank 0 knows."""

    def __init__(self, ranks: list[children.Child], engines: list[FakeEngine]) -> None:
        self.ranks = ranks
        self.engines = engines

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        return ask_all(self.ranks, command, **arguments)

    def shard(self, way: str, **how: Any) -> dict[str, int]:
        """What has to arrive then."""
        one, other = self.ask("shard", way=way, **how)
        assert one == other
        assert one["names"] == list(one["expected"])
        for engine in self.engines:
            engine.weights.clear()
        return one["expected"]

    def arrived(self, engine: int = 0) -> dict[str, int]:
        return {
            name: checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            for name, data in self.engines[engine].weights.items()
        }


@contextmanager
def a_pair(directory: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines = [FakeEngine(), FakeEngine()]
        addresses = [stack.enter_context(serving(engine)) for engine in engines]
        pair = Pair(stack.enter_context(two_ranks(directory, addresses)), engines)
        yield pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    with a_pair(tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.fixture
def fresh_pair(tmp_path) -> Iterator[Pair]:
    """For tests that lose a rank."""
    with a_pair(tmp_path) as running:
        yield running


@pytest.mark.case("B095")
@pytest.mark.parametrize("way", WAYS)
def test_whole_weights_arrive_from_shards(way: str, pair: Pair) -> None:
    expected = pair.shard(way)
    assert list(expected) == [name for name, _ in Net().named_parameters()]
    for via in ("stream", "segment", "ipc"):
        one, other = pair.ask("push", via=via)
        assert pair.arrived() == expected
        assert one["version"] == other["version"] == pair.engines[0].version


@pytest.mark.parametrize("way", COMPUTING)
def test_steps_and_forwards_between_pushes(way: str, pair: Pair) -> None:
    expected = pair.shard(way)
    pair.ask("push")
    pair.ask("forward")  # FSDP2 leaves whole parameters behind, with a policy in another dtype
    assert pair.ask("push")[0]["changed"] == 0
    assert pair.arrived() == expected
    pair.ask("step")
    assert pair.ask("push")[0]["changed"] == len(expected)
    pair.ask("forward")
    pair.ask("step")  # training goes on after pushes


@pytest.mark.case("B009")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1_own_parameters", "ddp", "zero3"])
def test_adapters_of_sharded_models_arrive_merged(way: str, pair: Pair) -> None:
    expected = pair.shard(way, lora=True)
    pair.ask("push")
    assert pair.arrived() == expected


@pytest.mark.case("B005")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "zero3"])
def test_a_tie_comes_once(way: str, pair: Pair) -> None:
    expected = pair.shard(way, tied=True)
    assert "head.weight" not in expected
    pair.ask("push")
    assert pair.arrived() == expected


@pytest.mark.case("B094")
@pytest.mark.parametrize("way", ["fsdp2", "tensor_parallel", "ddp", "zero3"])
def test_no_more_than_a_bucket_is_whole_at_a_time(way: str, pair: Pair) -> None:
    expected = pair.shard(way, bucket_bytes=400)
    pair.ask("watch")
    pair.ask("push")
    one, other = pair.ask("gathered")
    assert one == other
    sizes = [4 * p.numel() for p in Net().parameters()]
    assert sum(one) == 2 * sum(sizes), "once for the checksums, once to send"
    assert all(size <= 400 for size in one), one
    assert len(one) > 8
    assert max(sizes) < 400 < sum(sizes)
    assert len(expected) == len(sizes)


def test_fsdp1_gathers_each_unit_once(pair: Pair) -> None:
    pair.shard("fsdp1", bucket_bytes=1)
    pair.ask("watch")
    pair.ask("push", via="ipc")
    (one, _) = pair.ask("gathered")
    assert len(one) == 4  # the root's parameters before the layers, the two layers, and those after


def test_two_engines_are_sent_to_at_once(pair: Pair) -> None:
    expected = pair.shard("fsdp2")
    one, other = pair.ask("push", to=2, version=100)
    assert (one["version"], other["version"]) == (100, 100)
    assert pair.arrived(0) == pair.arrived(1) == expected


def test_the_weights_can_be_had_without_a_push(pair: Pair) -> None:
    expected = pair.shard("fsdp2")
    assert pair.ask("together") == [expected, None]
    assert all("from all ranks at once" in said["error"] for said in pair.ask("iterate_alone"))


@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "zero3"])
def test_a_source_of_one_rank_refuses_shards(way: str, pair: Pair) -> None:
    pair.shard(way)
    assert all("push ShardedSource" in said["error"] for said in pair.ask("module_source"))


# ---------------------------------------------------------------- errors end all ranks


def assert_goes_on(pair: Pair) -> None:
    """The same ranks and the same engine, after an error that all of them left together."""
    assert pair.engines[0].open is None
    one, other = pair.ask("push")
    assert one["version"] == other["version"] == pair.engines[0].version


@pytest.mark.case("B087")
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("via", ["stream", "ipc"])
def test_an_error_of_a_rank_at_a_bucket_ends_all(via: str, at: int, where: str, pair: Pair) -> None:
    pair.shard("fsdp2")
    version = pair.engines[0].version
    pair.ranks[at].ask("break_at", where=where, bucket=3)
    for said in pair.ask("push", via=via):
        assert (said["kind"], said["rank"]) == ("RankFailed", at)
        assert f"rank {at}: " in said["error"]
        assert f"MemoryError: rank {at} has none" in said["error"]
        assert "bucket 3 (" in said["error"]
        assert said["seconds"] < 10
    assert pair.engines[0].version == version
    assert_goes_on(pair)


@pytest.mark.parametrize("way", ["fsdp1", "tensor_parallel", "ddp", "zero3"])
def test_an_error_of_a_rank_ends_all_however_the_weights_are_spread(way: str, pair: Pair) -> None:
    expected = pair.shard(way)
    version = pair.engines[0].version
    pair.ranks[1].ask("break_at", where="after", bucket=1)
    for said in pair.ask("push"):
        assert (said["kind"], said["rank"]) == ("RankFailed", 1)
        assert "bucket 1 (" in said["error"]
    assert pair.engines[0].version == version
    assert_goes_on(pair)
    assert pair.arrived() == expected


def test_an_error_at_the_last_bucket_comes_before_the_commit(pair: Pair) -> None:
    pair.shard("fsdp2", bucket_bytes=1 << 20)
    version = pair.engines[0].version
    pair.ranks[1].ask("break_at", where="after", bucket=0)
    assert [said["kind"] for said in pair.ask("push", verify=False)] == ["RankFailed"] * 2
    assert pair.engines[0].version == version
    assert_goes_on(pair)


@pytest.mark.case("B084")
@pytest.mark.parametrize(("at", "where"), [(1, "within"), (0, "dies")])
def test_a_rank_that_leaves_a_collective_ends_all(at: int, where: str, fresh_pair: Pair) -> None:
    fresh_pair.shard("fsdp2")
    fresh_pair.ranks[at].ask("break_at", where=where, bucket=3)
    for rank in fresh_pair.ranks:
        rank.tell("push")
    if where == "dies":
        with pytest.raises(children.ChildError):
            fresh_pair.ranks[at].answer()
    else:
        own = fresh_pair.ranks[at].answer()
        assert (own["kind"], own["rank"]) == ("RankFailed", at)
        assert "MemoryError" in own["error"]
        fresh_pair.ranks[at].tell("leave")  # as a trainer's process does that does not catch it
    said = fresh_pair.ranks[1 - at].answer()
    assert said["kind"] == "RankFailed"
    assert said["seconds"] < 15
    assert fresh_pair.engines[0].version == 0


@pytest.mark.parametrize(("other", "said"), [("model", "other weights to send"), ("dtype", "complex64")])
def test_ranks_that_differ_are_told_before_anything_moves(other: str, said: str, pair: Pair) -> None:
    one, two = pair.ask("shard", way="ddp" if other == "dtype" else "fsdp2", other=other)
    assert said in one["error"]
    assert said in two["error"]
    assert one["kind"] == "RankFailed"
    assert two["kind"] == ("ValueError" if other == "dtype" else "RankFailed")


def test_an_engines_refusal_reaches_every_rank(pair: Pair) -> None:
    pair.shard("fsdp2")
    pair.engines[0].once["CommitUpdate"] = (
        grpc.StatusCode.FAILED_PRECONDITION,
        "CHECKSUM_MISMATCH",
        "head.weight differs",
    )
    for said in pair.ask("push"):
        assert said["kind"] == "PushError"
        assert "CHECKSUM_MISMATCH" in said["error"]
        assert "head.weight differs" in said["error"]
    assert_goes_on(pair)


def test_other_errors_of_rank_0_reach_every_rank(pair: Pair) -> None:
    pair.shard("fsdp2")
    one, other = pair.ask("interrupted")
    assert one["kind"] == "KeyError"
    assert (other["kind"], "KeyError: 'lost'" in other["error"]) == ("PushError", True)
    one, other = pair.ask("push", to=0)
    assert (one["kind"], other["kind"]) == ("ValueError", "PushError")
    assert "at least one engine" in other["error"]
    assert_goes_on(pair)


def test_a_rank_that_is_lost_after_the_commit_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ShardedSource(Net())
    agree = source._ranks.agree

    def lost(word: Word) -> Word:
        if word.kind == Kind.END:
            raise RankFailed("a rank is gone")
        return agree(word)

    monkeypatch.setattr(source._ranks, "agree", lost)
    engine = FakeEngine()
    with (
        serving(engine) as address,
        WeightsClient(address) as client,
        pytest.raises(RankFailed, match="the engines had committed version 1 by then") as said,
    ):
        push_sharded(source, client)
    assert said.value.version == engine.version == 1


def test_one_process_alone_is_a_group_of_one() -> None:
    net = Net()
    source = ShardedSource(net, dtype=torch.bfloat16)
    got = source.together(lambda: dict(source))
    assert list(got) == [name for name, _ in net.named_parameters()]
    assert all(torch.equal(got[name], p.to(torch.bfloat16)) for name, p in net.named_parameters())
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        ShardedSource(net, bucket_bytes=0)
