"""The scheduler against a model of integers that reads its KV back through the page tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_engine.sampling import SamplingParams
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import UNKNOWN_TOKEN
from tests.unit.scheduler.fake_model import FakeRunner, drain, expected_output, limits, sequence
from weight_updater.adapters import AdapterBook


@pytest.mark.parametrize(("chunked", "mixed", "prefix"), list(itertools.product([True, False], repeat=3)))
def test_every_switch_gives_the_same_tokens(chunked, mixed, prefix):
    bounds = limits(chunked_prefill=chunked, mixed_batches=mixed, prefix_cache=prefix)
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    prompts = [[i + 1] * (3 + 5 * i) for i in range(8)]
    sequences = [sequence(i, prompt) for i, prompt in enumerate(prompts)]
    for one in sequences:
        scheduler.add(one)
    drain(scheduler, runner)
    for one, prompt in zip(sequences, prompts, strict=True):
        assert one.output_ids == expected_output(prompt, 8)
        assert one.finish_reason == "length"
    assert ("MIXED" in runner.modes) == mixed
    assert (max(runner.num_tokens) <= 16 + 8) == chunked


@pytest.mark.case("B147")
def test_preemption_recomputes_and_changes_no_token():
    bounds = limits(num_pages=16, prefix_cache=False)
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    sequences = [sequence(i, [i + 1] * 10, max_tokens=14) for i in range(4)]  # 6 pages each, 16 in all
    for one in sequences:
        scheduler.add(one)
    drain(scheduler, runner)
    assert [one.output_ids for one in sequences] == [expected_output([i + 1] * 10, 14) for i in range(4)]
    assert sum(one.num_preemptions for one in sequences) > 0
    assert sequences[0].num_preemptions == 0, "the first in order is never preempted"
    assert all(len(one.logprobs) == len(one.output_ids) for one in sequences)
    assert scheduler.pool.num_free == 16


@pytest.mark.case("B053")
def test_prefix_cache_reuses_whole_pages_under_one_commit_only():
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    prompt = list(range(1, 14))  # 13 tokens: three whole pages and one token
    cached = []
    for number, commit in enumerate([1, 1, 2, 2]):
        one = sequence(number, prompt)
        scheduler.add(one)
        if commit == 2 and number == 2:
            scheduler.on_commit(2)
        while not scheduler.is_idle:
            batch = scheduler.schedule(commit, commit)
            scheduler.process(batch, runner.forward(batch))
        cached.append(one.num_first_cached)
        assert one.output_ids == expected_output(prompt, 8)
    assert cached == [0, 12, 0, 12]
    scheduler.check()
    assert scheduler.flush() > 0
    assert scheduler.pool.num_free == bounds.num_pages


@pytest.mark.case("B053")
def test_pages_of_adapters_are_found_by_the_same_version_only():
    """And the batch says for each row what it goes through, as it was when the pass was launched."""
    book = AdapterBook(2)
    bounds = limits()
    scheduler, runner = Scheduler(bounds, book), FakeRunner(bounds)
    prompt = list(range(1, 14))  # 13 tokens: three whole pages and one token
    numbers = itertools.count()

    def cached(name: str) -> int:
        one = sequence(next(numbers), prompt, adapter=name)
        scheduler.add(one)
        while not scheduler.is_idle:
            batch = scheduler.schedule(1, 1)
            assert batch.adapters == ([book.held[name]] if name else [])
            scheduler.process(batch, runner.forward(batch))
        (span,) = one.spans
        held = book.get(name)
        assert (span.adapter, span.adapter_version) == (name, held.version if held else 0)
        return one.num_first_cached

    for name in ("a", "b"):
        book.commit(name, 1, book.spare_slot(), 4, 0, (1, 0))
    assert [cached(name) for name in ("", "a", "b", "", "a", "b")] == [0, 0, 0, 12, 12, 12]
    book.commit("a", 2, book.spare_slot(), 4, 0, (1, 0))
    scheduler.on_commit(1)
    assert [cached(name) for name in ("", "a", "b", "a")] == [12, 0, 12, 12]
    scheduler.on_commit(2)
    assert scheduler.prefix.num_cached == 0
    scheduler.check()


def test_sequences_of_an_adapter_are_held_back_while_others_start():
    book = AdapterBook(1)
    book.commit("a", 1, 1, 4, 0, (1, 0))
    bounds = limits()
    scheduler = Scheduler(bounds, book)
    for number, name in enumerate(("a", "", "a")):
        scheduler.add(sequence(number, [number + 1] * 3, adapter=name))
    batch = scheduler.schedule(1, 1, held_back=["a"])
    assert batch.sequence_ids == [1]
    assert [one.id for one in scheduler.started_with("a")] == []
    assert [one.id for one in scheduler.started_with("")] == [1]
    assert scheduler.schedule(1, 1, only_started=True).sequence_ids == [1]
    assert scheduler.schedule(1, 1).sequence_ids == [0, 2, 1]
    assert scheduler.preempt_all("a") == 2
    assert [one.id for one in scheduler.running] == [1]


@pytest.mark.case("B053")
@pytest.mark.parametrize("retired", [True, False])
def test_pages_of_mixed_commits_never_enter_the_cache(retired):
    """Whether or not the cache still has the older commit's tree, in which they would hang."""
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    one = sequence(0, list(range(1, 10)), max_tokens=20)
    scheduler.add(one)
    for commit in [1] * 4 + [2] * 30:
        if (batch := scheduler.schedule(commit, commit)) is None:
            break
        if commit == 2 and retired:
            scheduler.on_commit(2)
        scheduler.process(batch, runner.forward(batch))
    assert [span.start for span in one.spans] == [0, 4]
    assert [span.commit_sequence for span in one.spans] == [1, 2]
    assert scheduler.prefix.num_cached == (0 if retired else 3)  # the older commit's own
    again = sequence(1, list(range(1, 10)))
    scheduler.add(again)
    batch = scheduler.schedule(2, 2)
    assert again.num_first_cached == 0
    scheduler.process(batch, runner.forward(batch))


@pytest.mark.parametrize("prefix", [True, False])
def test_completions_of_one_prompt_share_its_pages(prefix):
    bounds = limits(prefix_cache=prefix, max_prefill_tokens=64)
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    prompt = list(range(1, 22))  # 21 tokens: five whole pages
    group = [sequence(i, prompt, max_tokens=4, index=i) for i in range(4)]
    for one in group:
        one.leader = None if one is group[0] else group[0]
        scheduler.add(one)
    first = scheduler.schedule(1, 1)
    assert first.num_tokens == 21, "the others wait for the first"
    scheduler.process(first, runner.forward(first))
    second = scheduler.schedule(1, 1)
    assert second.num_tokens == 4, "each of the others computes the last token only, the first decodes"
    scheduler.process(second, runner.forward(second))
    shared = [set(one.pages[:5]) for one in group]
    assert shared[0] == shared[1] == shared[2] == shared[3]
    drain(scheduler, runner)
    for one in group:
        assert one.output_ids == expected_output(prompt, 4, one.index)


def test_prompt_logprobs_are_complete_across_chunks_and_copied_to_the_group():
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    prompt = list(range(1, 40))
    params = SamplingParams(seed=7, n=2, prompt_logprobs=True)
    group = [sequence(i, prompt, max_tokens=2, index=i, params=params) for i in range(2)]
    group[1].leader = group[0]
    for one in group:
        scheduler.add(one)
    drain(scheduler, runner)
    assert group[0].prompt_logprobs == [-float(token) for token in prompt[1:]]
    assert group[1].prompt_logprobs == group[0].prompt_logprobs
    assert sum(runner.num_tokens) < 2 * len(prompt)


def test_scoring_samples_nothing_and_labels_each_logprob():
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    prompt = list(range(1, 40))
    one = sequence(0, prompt, max_tokens=0, params=SamplingParams(seed=7, max_tokens=0, prompt_logprobs=True))
    scheduler.add(one)
    for commit in [1, 2, 2, 2]:
        if (batch := scheduler.schedule(commit, commit)) is not None:
            assert batch.samples == []
            scheduler.process(batch, runner.forward(batch))
    assert one.finish_reason == "length"
    assert one.output_ids == []
    assert len(one.prompt_logprobs) == 38
    assert [(span.start, span.weight_version) for span in one.spans] == [(0, 1), (16, 2)]


@pytest.mark.case("B137")
@pytest.mark.case("B138")
def test_stop_ids_min_tokens_and_ignore_eos():
    scheduler = Scheduler(limits(eos_token_ids=(3,)))
    cases = [
        (SamplingParams(seed=7), [5, 3], "stop"),
        (SamplingParams(seed=7, ignore_eos=True), [5, 3, 3, 3], "length"),
        (SamplingParams(seed=7, ignore_eos=True, stop_token_ids=(5,)), [5], "stop"),
    ]
    for number, (params, tokens, reason) in enumerate(cases):
        one = sequence(number, [number + 1], max_tokens=4, params=params)
        scheduler.add(one)
        runner = FakeRunner(scheduler.limits)
        for token in tokens:
            batch = scheduler.schedule(1, 1)
            result = runner.forward(batch)
            result.token_ids = [token]
            scheduler.process(batch, result)
        assert (one.output_ids, one.finish_reason) == (tokens, reason)
        assert scheduler.is_idle
    one = sequence(9, [1], params=SamplingParams(seed=7, min_tokens=2, stop_token_ids=(8,)))
    scheduler.add(one)
    runner, forbidden = FakeRunner(scheduler.limits), []
    for _ in range(3):
        batch = scheduler.schedule(1, 1)
        forbidden.append(batch.samples[0].forbidden_ids)
        scheduler.process(batch, runner.forward(batch))
    assert forbidden[0] == forbidden[1] == (3, 8)
    assert forbidden[2] == ()


@pytest.mark.case("B127")
@pytest.mark.case("B141")
def test_a_row_that_is_not_finite_fails_alone():
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    good, bad = sequence(0, [1, 2, 3]), sequence(1, [4, 5, 6])
    scheduler.add(good)
    scheduler.add(bad)
    batch = scheduler.schedule(1, 1)
    result = runner.forward(batch)
    result.finite[1] = False
    told = scheduler.process(batch, result)
    assert [(one.id, one.finish_reason) for one in told] == [(0, ""), (1, "error")]
    assert "not finite" in bad.error
    assert bad.output_ids == []
    drain(scheduler, runner)
    assert good.output_ids == expected_output([1, 2, 3], 8)


def test_priority_runs_first_and_draining_admits_only_started():
    bounds = limits(max_running=1)
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    low, high = sequence(0, [1, 2]), sequence(1, [3, 4], priority=5)
    scheduler.add(low)
    scheduler.add(high)
    batch = scheduler.schedule(1, 1, only_started=True)
    assert batch is None
    batch = scheduler.schedule(1, 1)
    assert batch.sequence_ids == [1]
    scheduler.process(batch, runner.forward(batch))
    scheduler.preempt(high)
    assert scheduler.started == [high]
    assert scheduler.schedule(1, 1, only_started=True).sequence_ids == [1]


@pytest.mark.case("B056")
@pytest.mark.case("B148")
@settings(max_examples=200, deadline=None)
# Two sequences compute the same page at once; its cached twin must be held by both.
@example(12, 1, [[1], [1, 1], [1, 1]], [], (False, False, True, False))
@example(12, 1, [[1, 1], [1], [1], [1]], [], (False, False, True, False))
@given(
    num_pages=st.integers(12, 30),
    page_size=st.integers(1, 5),
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=1, max_size=10),
    events=st.lists(
        st.tuples(st.sampled_from(["abort", "commit", "preempt", "flush", "none"]), st.integers(0, 9))
    ),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_pages_are_never_lost_whatever_happens(num_pages, page_size, prompts, events, switches):
    chunked, mixed, prefix, overlap = switches
    bounds = limits(
        num_pages=num_pages,
        page_size=page_size,
        context_length=min(64, num_pages * page_size),
        max_running=4,
        chunked_prefill=chunked,
        mixed_batches=mixed,
        prefix_cache=prefix,
    )
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    sequences = []
    for number, prompt in enumerate(prompts):
        room = scheduler.max_sequence_tokens - len(prompt)
        if room > 0:
            sequences.append(sequence(number, prompt, max_tokens=min(room, 10)))
            scheduler.add(sequences[-1])
    commit = 1
    in_flight = None  # with overlap, the pass before is taken in once the next one is launched
    happenings = iter(events)
    for _ in range(3000):
        if scheduler.is_idle and in_flight is None:
            break
        what, number = next(happenings, ("none", 0))
        if what == "abort" and scheduler.live:
            scheduler.remove(scheduler.live[number % len(scheduler.live)])
        elif what == "commit":
            if in_flight is not None:
                scheduler.process(*in_flight)
                in_flight = None
            commit += 1
            scheduler.preempt_all()  # recompute, so that tokens stay predictable
            scheduler.on_commit(commit)
        elif what == "preempt" and scheduler.running:
            scheduler.preempt(scheduler.running[number % len(scheduler.running)])
        elif what == "flush":
            scheduler.flush()
        scheduler.check()
        batch = scheduler.schedule(commit, commit)
        launched = None if batch is None else (batch, runner.forward(batch))
        assert launched or in_flight or scheduler.is_idle
        if not overlap:
            in_flight, launched = launched, None
        if in_flight is not None:
            scheduler.process(*in_flight)
        in_flight = launched
        scheduler.check()
    assert scheduler.is_idle
    for one in sequences:
        assert one.output_ids == expected_output(one.prompt_ids, len(one.output_ids))
    scheduler.flush()
    assert scheduler.pool.num_free == num_pages


def test_the_next_pass_is_made_up_while_one_is_in_flight():
    bounds = limits(eos_token_ids=(3,))
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    one, two = sequence(0, [5, 6], max_tokens=3), sequence(1, [7], max_tokens=9)
    scheduler.add(one)
    scheduler.add(two)
    first = scheduler.schedule(1, 1)
    first_result = runner.forward(first)
    second = scheduler.schedule(1, 1)
    assert second.input_ids == [UNKNOWN_TOKEN] * 2
    assert [sample.position for sample in second.samples] == [3, 2]
    second_result = runner.forward(second)
    first_result.token_ids[1] = 3  # the end of a sequence, found out one pass late
    assert [s.finish_reason for s in scheduler.process(first, first_result)] == ["", "stop"]
    third = scheduler.schedule(1, 1)
    assert third.sequence_ids == [0]
    assert scheduler.schedule(1, 1) is None, "the third token ends it, whatever it is"
    assert scheduler.process(second, second_result) == [one], "what came after the end is nobody's"
    assert two.output_ids == [3]
    (told,) = scheduler.process(third, runner.forward(third))
    assert (told.output_ids, told.finish_reason) == (expected_output([5, 6], 3), "length")
    scheduler.check()
    assert scheduler.is_idle


def test_penalties_wait_for_the_ids_they_count():
    scheduler = Scheduler(limits())
    scheduler.add(sequence(0, [5, 6], params=SamplingParams(seed=7, presence_penalty=1.0)))
    runner = FakeRunner(scheduler.limits)
    first = scheduler.schedule(1, 1)
    assert scheduler.schedule(1, 1) is None
    scheduler.process(first, runner.forward(first))
    second = scheduler.schedule(1, 1)
    assert second.samples[0].output_ids == expected_output([5, 6], 1)
