"""What is told of a sequence, where it did not run straight from its start to its end."""

from __future__ import annotations

import math

from rollout_engine.sampling import SamplingParams
from rollout_engine.scheduler import Scheduler
from tests.unit.scheduler.fake_model import FakeRunner, drain, limits, sequence

PROMPT = list(range(1, 13))
SCORED = SamplingParams(seed=7, prompt_logprobs=True)


def test_tokens_count_as_cached_that_were_there_when_it_ran() -> None:
    """What was found by an attempt for which there were no pages had been given away when it came to run."""
    bounds = limits(num_pages=6, max_prefill_tokens=64)
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    first = sequence(0, PROMPT, max_tokens=1)
    scheduler.add(first)
    drain(scheduler, runner)
    scheduler.add(sequence(1, [50] * 7, max_tokens=17))  # takes all pages in the end
    scheduler.process(batch := scheduler.schedule(1, 1), runner.forward(batch))
    late = sequence(2, PROMPT + [13] * 8, max_tokens=2)
    scheduler.add(late)
    drain(scheduler, runner)
    (told,) = [late.take_output(1)]
    assert told.num_cached_tokens == scheduler.work.num_cached_tokens == 0


def scored_pair(scheduler: Scheduler, **changes: object):
    leader = sequence(0, PROMPT, params=SCORED, request_id="r", **changes)
    follower = sequence(1, PROMPT, params=SCORED, request_id="r", index=1, leader=leader, **changes)
    for one in (leader, follower):
        scheduler.add(one)
    return leader, follower


def test_what_failed_for_the_first_completion_is_no_score_of_the_second() -> None:
    scheduler, runner = Scheduler(limits()), FakeRunner(limits())
    leader, follower = scored_pair(scheduler, max_tokens=0)
    for spoil in (math.nan, None):
        batch = scheduler.schedule(1, 1)
        assert batch is not None
        result = runner.forward(batch)
        if spoil is not None:
            result.prompt_logprobs[0][3] = spoil
        scheduler.process(batch, result)
    assert leader.finish_reason == "error"
    assert follower.finish_reason == "length"
    assert follower.prompt_logprobs == [-float(token) for token in PROMPT[1:]], "it was computed anew"


def test_scores_without_end_are_not_finite_either() -> None:
    """+inf among the logits leaves NaN for its own token, and -inf for every other."""
    scheduler, runner = Scheduler(limits()), FakeRunner(limits())
    one = sequence(0, PROMPT, params=SCORED, max_tokens=0)
    scheduler.add(one)
    batch = scheduler.schedule(1, 1)
    assert batch is not None
    result = runner.forward(batch)
    result.prompt_logprobs[0][3] = -math.inf
    scheduler.process(batch, result)
    assert one.finish_reason == "error"
    assert "not finite" in one.error
