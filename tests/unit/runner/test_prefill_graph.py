"""Prefill in pieces: the same bits as the eager runner at the same padded shape, and who is chosen when."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import CaptureHiddenMode, ForwardMode, ScheduleBatch
from rollout_engine.config import load_config
from rollout_engine.runner.graphs import CapturedStorages, Graphs, smallest_fit
from rollout_engine.sampling import SamplingParams
from tests.hand_scheduler import GREEDY, HandScheduler, make_runner
from tests.local_engine import LocalEngine
from tests.tiny import ARCHITECTURES, make_tiny
from tests.unit.runner.standing_graphs import capture_prefill, use_kernels

SIZES = [8, 16, 48, 96]
PROMPTS = [[5, 6, 7], list(range(10, 47)), [9] * 16, [3]]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, logprobs="raw")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model_dir(request, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp(request.param), request.param)


def run_padded(runner, batch, sizes):
    """The eager runner over a batch that is padded as a graph would pad it."""
    inputs = torch.zeros((3, smallest_fit(sizes, batch.num_tokens)), dtype=torch.int64)
    with torch.inference_mode():
        forward = ForwardBatch.init_new(batch, runner, inputs)
        return runner.eager.run(batch, forward).result()


def contents(runner):
    """All K and V but those of the padding page."""
    pool = runner.token_to_kv_pool
    return torch.stack([layer[: pool.num_pages] for layer in (*pool.k_pages, *pool.v_pages)])


def both(directory, *, num_pages=96, kernels=None):
    """A runner with prefill graphs and one without, their schedulers, and what was captured."""
    runners = [make_runner(directory, num_pages=num_pages) for _ in range(2)]
    if kernels is not None:
        for runner in runners:
            use_kernels(runner, kernels)
    graphs = capture_prefill(runners[0], SIZES)
    return runners, [HandScheduler(runner) for runner in runners], graphs


@pytest.mark.parametrize("in_place", [False, True])
def test_pieces_equal_the_eager_runner_at_the_same_padded_shape(model_dir, in_place, monkeypatch):
    """Whole prompts, chunks and chunks beside decode rows; what ids, log-probabilities and KV hold."""
    runners, schedulers, _ = both(model_dir, kernels=monkeypatch if in_place else None)
    rows = [[s.row(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)] for s in schedulers]
    steps = [
        [(0, 3), (1, 2)],  # 5 tokens
        [(1, 1), (2, 37), (4, 16)],  # 54
        [(0, 1), (3, 20)],  # a decode row beside a chunk
        [(1, 1), (2, 1), (3, 17), (5, 16), (6, 1), (7, 1)],
        [(0, 1), (6, 1), (4, 1), (3, 1)],  # all decode
    ]
    for step in steps:
        batches = [s.batch([(r[i], n) for i, n in step]) for s, r in zip(schedulers, rows, strict=True)]
        for tensor in vars_of(runners[0].prefill_graph):
            tensor.fill_(math.nan)  # nothing may come from the pass before
        found = runners[0].forward(batches[0])
        decode = batches[0].forward_mode.is_decode()
        wanted = runners[1].forward(batches[1]) if decode else run_padded(runners[1], batches[1], SIZES)
        assert found == wanted
        assert all(found.finite)
        assert torch.equal(contents(runners[0]), contents(runners[1]))
        for s, r, batch in zip(schedulers, rows, batches, strict=True):
            s.apply([(r[i], n) for i, n in step], batch, wanted)
    assert runners[0].forward_counts["prefill_graph"] == 4
    assert runners[0].forward_counts["eager"] == 1


def vars_of(prefill_graph):
    """The buffers that cross the borders of pieces."""
    crossing = prefill_graph._crossing
    return [getattr(crossing, name) for name in type(crossing).__slots__]


def test_each_pass_replays_the_pieces_of_its_size_once_and_in_order(tiny_llama_dir):
    (runner, _), (scheduler, _), recorder = both(tiny_llama_dir)
    num_layers = runner.model_config.num_layers
    assert len(recorder.graphs) == len(SIZES) * (num_layers + 1)
    assert set(recorder.pools) == {"pool"}
    for num_tokens in (8, 9, 97):
        scheduler.step([(scheduler.row([4] * num_tokens), num_tokens)])
    replays = [graph.num_replays for graph in recorder.graphs]  # captured largest first
    of_size = dict(zip(SIZES[::-1], zip(*[iter(replays)] * (num_layers + 1), strict=True), strict=True))
    assert of_size == {96: (0,) * 3, 48: (0,) * 3, 16: (1,) * 3, 8: (1,) * 3}
    assert runner.forward_counts["prefill_graph"] == 2
    assert runner.forward_counts["eager"] == 1, "97 tokens fit no captured size"


@pytest.mark.parametrize("in_place", [False, True])
def test_padding_writes_to_the_padding_page_alone(tiny_llama_dir, in_place, monkeypatch):
    (runner, _), (scheduler, _), _ = both(tiny_llama_dir, kernels=monkeypatch if in_place else None)
    pool = runner.token_to_kv_pool
    for layer in (*pool.k, *pool.v):
        layer.fill_(7.0)
    row = scheduler.row(list(range(3, 20)))
    scheduler.step([(row, 17)])
    assert runner.forward_counts["prefill_graph"] == 1
    written = torch.zeros((pool.num_pages + 1) * pool.page_size, dtype=torch.bool)
    written[row.slots[:17]] = True
    written[pool.padding_slot] = True
    for layer in (*pool.k, *pool.v):
        assert (layer[~written] == 7.0).all()
        assert (layer[written] != 7.0).all()


@pytest.mark.parametrize("before_norm", [False, True])
@pytest.mark.parametrize("mode", [CaptureHiddenMode.LAST, CaptureHiddenMode.FULL])
def test_what_is_read_from_hidden_states_has_no_padding(tiny_llama_dir, mode, before_norm):
    runners, schedulers, _ = both(tiny_llama_dir)
    params = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=3)
    batches = []
    for scheduler in schedulers:
        batch = scheduler.batch([(scheduler.row(prompt, params), len(prompt)) for prompt in PROMPTS])
        batch.capture_hidden_mode, batch.return_hidden_states_before_norm = mode, before_norm
        batches.append(batch)
    found, wanted = runners[0].forward(batches[0]), run_padded(runners[1], batches[1], SIZES)
    assert found == wanted
    assert len(found.hidden_states) == (len(PROMPTS) if mode is CaptureHiddenMode.LAST else 57)
    assert [len(values) for values in found.prompt_logprobs] == [2, 36, 15]
    assert runners[0].forward_counts["prefill_graph"] == 1


def test_who_can_run(tiny_llama_dir):
    runner = make_runner(tiny_llama_dir)
    capture_prefill(runner, SIZES)
    prefill = runner.prefill_graph

    def batch(mode, num_tokens):
        return ScheduleBatch(
            mode, extend_lens=[num_tokens], seq_lens=[num_tokens], input_ids=[3] * num_tokens
        )

    assert prefill.can_run_graph(batch(ForwardMode.EXTEND, 96))
    assert prefill.can_run_graph(batch(ForwardMode.MIXED, 1))
    assert not prefill.can_run_graph(batch(ForwardMode.EXTEND, 97))
    assert not prefill.can_run_graph(batch(ForwardMode.SPLIT_PREFILL, 8))
    assert not prefill.can_run_graph(batch(ForwardMode.DECODE, 8))
    prefill.release()
    assert not prefill.can_run_graph(batch(ForwardMode.EXTEND, 8))
    assert (prefill.num_captured(), prefill.moved()) == (0, [])


def test_split_prefill_runs_beside_prefill_graphs(tiny_llama_dir):
    runners, schedulers, _ = both(tiny_llama_dir)
    results = []
    for scheduler in schedulers:
        work = [(scheduler.row(prompt), len(prompt)) for prompt in PROMPTS]
        results.append(scheduler.step(work, ForwardMode.SPLIT_PREFILL))
    assert results[0] == results[1]
    assert runners[0].forward_counts["split_prefill"] == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_whole_requests_give_the_same_tokens(tiny_llama_dir, overlap):
    """The real scheduler: chunks beside decode rows, and tokens that only the device knows yet."""
    prompts = [[3 + (7 * i + j) % 120 for j in range(5 + 11 * i)] for i in range(8)]
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=3)
    engines = [
        LocalEngine(tiny_llama_dir, device="cpu", max_prefill_tokens=24, overlap=overlap) for _ in range(2)
    ]
    capture_prefill(engines[0].runner, [4, 8, 16, 32])
    captured, plain = ([(s.output_ids, s.logprobs) for s in e.generate(prompts, params)] for e in engines)
    assert "MIXED" in engines[0].modes
    assert engines[0].runner.forward_counts["prefill_graph"] > 8
    assert [ids for ids, _ in captured] == [ids for ids, _ in plain]
    for (_, found), (_, wanted) in zip(captured, plain, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


# ---------------------------------------------------------------- what moved, and all graphs together


def test_moved_names_what_is_no_longer_what_was_captured(tiny_llama_dir):
    runner = make_runner(tiny_llama_dir)
    capture_prefill(runner, [8])
    target = runner.target
    assert runner.prefill_graph.moved() == []
    target.buffer.mul_(1)  # written in place
    assert runner.prefill_graph.moved() == []
    elsewhere = target.arena.allocate(target.device)
    elsewhere.copy_(target.buffer)
    target.bind(elsewhere)
    moved = runner.prefill_graph.moved()
    assert "model.layers.0.self_attn.qkv_proj.weight" in moved
    assert "kv_cache" not in moved
    with torch.inference_mode():
        runner.prefill_graph.capture("pool")
    assert runner.prefill_graph.moved() == []


def test_identity_is_address_shape_and_dtype():
    storage = torch.zeros(8)
    storages = CapturedStorages({"a": storage, "b": torch.zeros(2)})
    assert storages.moved() == []
    storages.note()
    storage.set_(storage.view(2, 4).detach())
    assert storages.moved() == ["a"]
    storages.note()
    storage.data = storage.data.view(torch.int32)
    assert storages.moved() == ["a"]
    storages.forget()
    assert storages.moved() == []


class FakeRunner:
    """A runner of graphs that hold on to something."""

    def __init__(self, log: list[str], name: str, moved: list[str], fails: bool = False) -> None:
        self.log, self.name, self._moved, self.fails = log, name, moved, fails
        self.held: list[set] = []
        self.old: list[weakref.ref] = []

    def capture(self, pool):
        assert not any(ref() for ref in self.old), "an old graph was alive when a new one was captured"
        self.log.append(f"capture {self.name} in {pool}")
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        self.held = [set(), set()]
        self.old = [weakref.ref(graph) for graph in self.held]

    def release(self):
        self.log.append(f"release {self.name}")
        self.held = []

    def num_captured(self):
        return len(self.held)

    def moved(self):
        return self._moved


@pytest.fixture
def no_device(monkeypatch):
    """Stands for the calls of torch.cuda that Graphs makes."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    handles = iter(["pool 1", "pool 2", "pool 3"])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))


class Stream:
    device = torch.device("cpu")

    def synchronize(self):
        pass


def graphs_of(runners, monkeypatch, has_memory=lambda: True):
    import contextlib

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return Graphs(runners, Stream(), has_memory)


def test_old_graphs_are_freed_before_new_ones_are_captured_and_share_a_pool(no_device, monkeypatch):
    log: list[str] = []
    graphs = graphs_of([FakeRunner(log, "a", ["x", "y"]), FakeRunner(log, "b", ["y", "z"])], monkeypatch)
    assert graphs.num_captured() == 0
    assert graphs.recapture() == 4
    assert graphs.recapture() == 4
    once = ["release a", "release b"]
    assert log[:4] == [*once, "capture a in pool 1", "capture b in pool 1"]
    assert log[4:] == [*once, "capture a in pool 2", "capture b in pool 2"]
    assert graphs.moved() == ["x", "y", "z"]
    graphs.release()
    assert graphs.num_captured() == 0


def test_a_capture_that_fails_leaves_no_graph(no_device, monkeypatch):
    log: list[str] = []
    graphs = graphs_of([FakeRunner(log, "a", []), FakeRunner(log, "b", [], fails=True)], monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture()
    assert graphs.num_captured() == 0
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture_owed()
    graphs._runners[1].fails = False
    assert graphs.capture_owed() == graphs.num_captured() == 4
    assert graphs.capture_owed() == 0, "nothing is owed any more"


def test_no_pass_is_captured_over_a_pool_without_memory(no_device, monkeypatch, tiny_llama_dir):
    """An update moves the weights while the KV pool is released; a pass is run before it is captured."""
    log: list[str] = []
    runner = make_runner(tiny_llama_dir)
    runner.graphs = graphs_of([FakeRunner(log, "a", ["x"])], monkeypatch, runner._has_memory)
    runner.graphs.capture()
    runner.release_kv()
    log.clear()
    assert runner.graphs.recapture() == 0
    assert (log, runner.graphs.num_captured()) == (["release a"], 0), "the old ones are stale"
    runner.resume_kv()
    assert (log[-1], runner.graphs.num_captured()) == ("capture a in pool 2", 2)
    runner.release_kv()
    runner.resume_kv()
    assert log[-1] == "capture a in pool 2", "once is enough"


@pytest.mark.parametrize("first", ["kv", "weights"])
def test_what_was_put_off_is_captured_once_weights_and_pool_are_both_there(
    first, no_device, monkeypatch, tiny_llama_dir
):
    """On a GPU a pass over weights without memory would end the process."""
    log: list[str] = []
    runner = make_runner(tiny_llama_dir)
    runner.graphs = graphs_of([FakeRunner(log, "a", ["x"])], monkeypatch, runner._has_memory)
    runner.graphs.capture()
    runner.release_kv()
    assert runner.graphs.recapture() == 0
    runner.release_weights()
    resume = {"kv": runner.resume_kv, "weights": runner.resume_weights}
    resume.pop(first)()
    assert log[-1] == "release a", "the other is not there yet"
    resume.popitem()[1]()
    assert (log[-1], runner.graphs.num_captured()) == ("capture a in pool 2", 2)


def test_what_found_no_memory_is_captured_when_it_is_asked_for_again(no_device, monkeypatch, tiny_llama_dir):
    log: list[str] = []
    runner = make_runner(tiny_llama_dir)
    fake = FakeRunner(log, "a", ["x"])
    runner.graphs = graphs_of([fake], monkeypatch, runner._has_memory)
    runner.graphs.capture()
    runner.release_kv()
    assert runner.graphs.recapture() == 0
    fake.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        runner.resume_kv()
    assert runner.graphs.num_captured() == 0
    fake.fails = False
    runner.resume_kv()
    assert (log[-1], runner.graphs.num_captured()) == ("capture a in pool 3", 2)


def test_garbage_goes_before_a_capture_and_not_while_it_runs(no_device, monkeypatch):
    """Memory of another engine in this process may be garbage, and to free it waits for the device."""
    gone: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.name, self.me = name, self

        def __del__(self) -> None:
            gone.append(self.name)

    class Littering(FakeRunner):
        def capture(self, pool):
            assert gone == ["before"]
            for _ in range(3000):
                Cycle("within")
            assert gone == ["before"]

    Cycle("before")
    graphs_of([Littering([], "a", [])], monkeypatch).capture()
    assert gc.isenabled()
    gc.collect()
    assert len(gone) == 3001


def test_the_smallest_size_that_fits():
    sizes = [1, 4, 8]
    assert [smallest_fit(sizes, n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert smallest_fit([], 1) is None


def test_sizes_come_as_a_list_or_not_at_all(tiny_llama_dir):
    config = load_config({"model": tiny_llama_dir, "capture_prefill_tokens": "64,8,64"})
    assert config.capture_prefill_tokens == (8, 64)
    assert load_config({"model": tiny_llama_dir, "capture_prefill_tokens": ""}).capture_prefill_tokens == ()
