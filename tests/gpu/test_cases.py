"""Public bug reports that only a GPU shows: graphs over weights, KV and page tables; handles in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout_engine import messages as m
from rollout_engine.sampling import SamplingParams
from tests.desk import Desk, Running, desk
from tests.engines import RunningEngine
from tests.local_engine import LocalEngine
from tests.ways import LOOPBACK, STAGINGS, Ways, free_port
from weight_updater.device_memory import GRANULE_BYTES, device_uuid
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.groups import SenderGroup
from weight_updater.requests import InitGroup

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
SIZES = (1, 2, 4, 8)
PAGE = 16
NAP = ["weights", "kv_cache", "graphs"]
Tensors = dict[str, torch.Tensor]


@dataclass
class Twins:
    """Two engines that always hold the same weights: one replays graphs, one never does."""

    graphs: Desk
    eager: Desk
    to_graphs: Ways
    to_eager: Ways
    stored: Tensors
    seed: int = 0

    def push(self, way: str, **fields) -> None:
        """New weights for both, by one path for the one with graphs."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        new = {
            name: tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05
            for name, tensor in self.stored.items()
        }
        self.to_graphs.push(way, new, **fields)
        self.to_eager.push("segment", new)

    def decode(self, num_rows: int, max_tokens: int) -> tuple[list[Running], list[Running]]:
        """The same greedy requests on both, all rows in the same passes."""
        prompts = [[5 + i, 6, 7, 8 + i, 9] * (3 + i) for i in range(num_rows)]
        both = []
        for engine in (self.graphs, self.eager):
            engine.call(m.Pause, mode="keep")
            requests = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
            engine.until(
                lambda state: state.num_waiting == num_rows, "all wait"
            )  # so that they start together
            engine.call(m.Continue)
            both.append([request.end(60) for request in requests])
        return both[0], both[1]


@pytest.fixture(scope="module")
def twins(tiny_bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    folder = tmp_path_factory.mktemp("pushes")
    common = {
        "dtype": "bfloat16",
        "device": DEVICE,
        "num_pages": 256,
        "weights_roots": (folder,),
        "capture_batch_sizes": SIZES,
        "capture_prefill_tokens": (),  # prompts are computed alike
        "prefix_cache": False,
        "reserve_device_staging": True,
    }
    with ExitStack() as stack:
        engines = [
            stack.enter_context(desk(tiny_bf16_dir, **common, cuda_graphs=graphs)) for graphs in (True, False)
        ]
        ways = [stack.enter_context(Ways(engine, folder / str(i))) for i, engine in enumerate(engines)]
        yield Twins(*engines, *ways, load_file(tiny_bf16_dir / "model.safetensors"))


def addresses(engine: Desk) -> dict[str, int]:
    runner = engine.runner
    found = dict(runner.model.named_parameters()) | dict(runner.model.named_buffers())
    found |= {f"k{i}": t for i, t in enumerate(runner.token_to_kv_pool.k)}
    found |= {"tokens": runner.last_tokens, "table": runner.device_page_table}
    return {name: tensor.data_ptr() for name, tensor in found.items()}


def assert_alike(graphs: list[Running], eager: list[Running], *, padded: bool) -> None:
    """Token for token where no row is padded; else by the log-probabilities of what both sampled."""
    for a, b in zip(graphs, eager, strict=True):
        assert (a.finish(), b.finish()) == ("length", "length")
        if not padded:
            assert a.tokens() == b.tokens()
        same = [x == y for x, y in zip(a.tokens(), b.tokens(), strict=True)]
        shared = same.index(False) if False in same else len(same)
        assert shared > 0
        pairs = zip(a.logprobs()[:shared], b.logprobs()[:shared], strict=True)
        assert max(abs(x - y) for x, y in pairs) < 0.15


@pytest.mark.case("B057")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", ["disk", "distributed", "stream", "segment"])
def test_graphs_decode_as_eager_does_after_an_update(way, staging, twins: Twins):
    """The ipc path, whose trainer is another process, is in test_ipc.py."""
    before, captured = addresses(twins.graphs), twins.graphs.runner.decode_graph
    twins.push(way, staging=staging)
    assert addresses(twins.graphs) == before
    assert captured is not None
    assert captured.moved() == []
    for num_rows in (1, 3, 8):
        replayed = twins.graphs.runner.forward_counts["decode_graph"]
        graphs, eager = twins.decode(num_rows, 64)
        assert twins.graphs.runner.forward_counts["decode_graph"] >= replayed + 63
        assert_alike(graphs, eager, padded=num_rows not in SIZES)


@pytest.mark.case("B058")
@pytest.mark.case("B111")
@pytest.mark.parametrize("tags", [["kv_cache"], ["graphs"], NAP])
def test_graphs_decode_as_eager_does_after_a_sleep(tags, twins: Twins):
    twins.push("segment")
    before = addresses(twins.graphs)
    for _ in range(3):
        twins.graphs.call(m.ReleaseMemory, tags=tags)
        asleep = twins.graphs.call(m.ResumeMemory, tags=[])["needs_update"]
        assert asleep == ("weights" in tags)
        twins.push("segment")
        assert addresses(twins.graphs) == before
        graphs, eager = twins.decode(4, 40)
        assert_alike(graphs, eager, padded=False)


@pytest.mark.case("B059")
@pytest.mark.parametrize("num_rows", [3, 5, 7])
def test_padding_that_is_nan_reaches_no_row(num_rows, twins: Twins):
    """Rows that fill up a captured size read memory that is full of NaN, and write to the padding page."""
    twins.push("segment")
    for engine in (twins.graphs, twins.eager):
        engine.idle()
        pool = engine.runner.token_to_kv_pool
        for layer in (*pool.k_pages, *pool.v_pages):
            layer.fill_(math.nan)
    torch.cuda.synchronize()
    graphs, eager = twins.decode(num_rows, 40)
    assert_alike(graphs, eager, padded=True)
    for request in graphs:
        assert all(math.isfinite(value) for value in request.logprobs())


@pytest.mark.case("B059")
def test_the_last_page_belongs_to_whom_it_was_given(tiny_bf16_dir):
    """Slot -1 of a table would be the last slot of the last page: a live one here."""
    config = {"dtype": "bfloat16", "device": "cuda", "capture_batch_sizes": SIZES}
    model = LocalEngine(tiny_bf16_dir, num_pages=8, prefix_cache=False, **config)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=1)
    prompts = [[9] * 30, [11] * 20]  # 4 and 3 of the 8 pages
    alone = [model.generate([prompt], params)[0] for prompt in prompts]
    together = model.generate([*prompts, [3] * 2], params)  # 3 rows in a pass of 4, every page in use
    for one, other in zip(alone, together, strict=False):
        shared = [a == b for a, b in zip(one.output_ids, other.output_ids, strict=True)]
        length = shared.index(False) if False in shared else len(shared)
        pairs = zip(one.logprobs[:length], other.logprobs[:length], strict=True)
        assert length > 0
        assert max(abs(a - b) for a, b in pairs) < 0.15


@pytest.mark.case("B060")
def test_a_replay_follows_page_tables_that_grow_and_batches_that_shrink(twins: Twins):
    """From one page to six, over every border; and eight rows that end one after another."""
    twins.push("segment")
    graphs, eager = twins.decode(1, 5 * PAGE)
    assert_alike(graphs, eager, padded=False)
    both = []
    for engine in (twins.graphs, twins.eager):
        engine.call(m.Pause, mode="keep")
        requests = [engine.submit([5 + i, 6, 7], max_tokens=10 + 9 * i) for i in range(8)]
        engine.until(lambda state: state.num_waiting == 8, "all wait")
        engine.call(m.Continue)
        both.append([request.end(60) for request in requests])
    assert_alike(*both, padded=True)
    assert all(math.isfinite(value) for request in both[0] for value in request.logprobs())


# ---------------------------------------------------------------- handles


def start_connected(start_trainer, directory: Path, engine: RunningEngine, **env: str):
    return start_trainer("tests.gpu.trainer", str(directory), env=env)


@pytest.mark.alone
@pytest.mark.case("B098")
def test_a_buffer_that_was_lent_twenty_times_is_freed(gpu_engine, tiny_bf16_dir, start_trainer):
    """One strided parameter goes through a buffer of the trainer's, which engines map once."""
    with start_connected(start_trainer, tiny_bf16_dir, gpu_engine) as child:
        child.ask("connect", address=gpu_engine.address)
        child.ask("stride")
        for seed in range(20):
            child.ask("train", seed=seed)
            for staging in ("none", "device"):
                pushed = child.ask("push", staging=staging)
                assert "reason" not in pushed, pushed
            if seed == 1:
                kept, lent = child.ask("free_bytes"), child.ask("allocation_ids")
        assert child.ask("allocation_ids") == lent, "the same buffer every time"
        assert abs(child.ask("free_bytes") - kept) < 4 << 20
        assert gpu_engine.weights.checksums().by_name == child.ask("checksums")
        child.ask("close")
        assert child.ask("free_bytes") >= kept + GRANULE_BYTES, "closing gives the buffer back"


def virtual_bytes(pid: int) -> int:
    """Address space of a process and of all below it."""
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmSize:"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(virtual_bytes(int(child)) for child in children)


@pytest.mark.case("B102")
def test_a_hundred_moves_of_the_weights_do_not_pile_up(gpu_engine, tiny_bf16_dir, start_trainer):
    """Every push lends other allocations than the one before, and the engine lets go of those."""
    with start_connected(start_trainer, tiny_bf16_dir, gpu_engine) as child:
        child.ask("connect", address=gpu_engine.address)
        sizes, num_lent = [], 0
        for seed in range(100):
            child.ask("reallocate")
            if not seed % 10:
                child.ask("train", seed=seed)
            pushed = child.ask("push", staging="none")
            assert "reason" not in pushed, pushed
            num_lent += len(child.ask("allocation_ids"))
            sizes.append(virtual_bytes(gpu_engine.pid))
        assert num_lent >= 100
        assert sizes[-1] - sizes[4] < 64 << 30
        assert gpu_engine.weights.checksums().by_name == child.ask("checksums")
        child.ask("close")


@pytest.mark.case("B103")
@pytest.mark.parametrize("by", ["uuid", "number"])
def test_a_trainer_that_names_its_gpu_otherwise(by, gpu_engine, tiny_bf16_dir, start_trainer):
    visible = device_uuid(0) if by == "uuid" else "0"
    with start_connected(start_trainer, tiny_bf16_dir, gpu_engine, CUDA_VISIBLE_DEVICES=visible) as child:
        child.ask("connect", address=gpu_engine.address)
        for staging in ("none", "device"):
            child.ask("train", seed=3)
            assert "reason" not in child.ask("push", staging=staging)
            assert gpu_engine.weights.checksums().by_name == child.ask("checksums")
        child.ask("close")


@pytest.mark.case("B103")
@pytest.mark.usefixtures("two_gpus")
def test_a_trainer_that_counts_its_gpus_the_other_way_round(gpu_engine, tiny_bf16_dir, start_trainer):
    """Its cuda:0 is the engine's second GPU."""
    with start_connected(start_trainer, tiny_bf16_dir, gpu_engine, CUDA_VISIBLE_DEVICES="1,0") as child:
        child.ask("connect", address=gpu_engine.address)
        for staging in ("none", "device"):
            child.ask("train", seed=4)
            assert "reason" not in child.ask("push", staging=staging)
            assert gpu_engine.weights.checksums().by_name == child.ask("checksums")
        child.ask("close")


@pytest.mark.case("B088")
def test_two_ranks_on_this_gpu_are_refused_before_nccl_is_asked(twins: Twins):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        request = InitGroup("one", LOOPBACK, port, 1, 2, "nccl", 20.0)
        joining = pool.submit(twins.graphs.updater.groups.init, request)
        with pytest.raises(UpdateRefused) as ours:
            SenderGroup("one", LOOPBACK, port, 2, 20.0, backend="nccl", device=torch.device(DEVICE))
        with pytest.raises(UpdateRefused) as theirs:
            joining.result(30)
    texts = [error.value.message for error in (ours, theirs)]
    assert any(device_uuid(0) in text and "use the ipc path" in text for text in texts), texts
    assert {ours.value.reason, theirs.value.reason} <= {Reason.INVALID_UPDATE, Reason.PEER_LOST}
    assert torch.ones(3, device=DEVICE).sum().item() == 3
