"""A model of integers: the next token is a hash of the whole sequence, read back through the page tables.

It keeps a KV pool of token ids, so a wrong page, a stale slot or a page that was shared by mistake changes
what it samples.
"""

from __future__ import annotations

from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.rows import Limits
from rollout_engine.sampling import SamplingParams
from rollout_engine.scheduler import Scheduler
from rollout_engine.sequence import UNKNOWN_TOKEN, Sequence

VOCAB = 97
EOS = 0


def next_token(tokens: list[int], seed: int, sample_index: int) -> int:
    value = seed * 1_000_003 + sample_index
    for position, token in enumerate(tokens):
        value = (value * 31 + token * 7 + position) % 1_000_000_007
    return 1 + value % (VOCAB - 1)  # never EOS


class FakeRunner:
    def __init__(self, limits: Limits) -> None:
        self.kv = [-1] * (limits.num_pages * limits.page_size)
        self.table = [[-1] * limits.context_length for _ in range(limits.max_running)]
        self.last = [-1] * limits.max_running  # sampled last, by row of the table
        self.modes: list[str] = []
        self.num_tokens: list[int] = []

    def forward(self, batch: ScheduleBatch) -> StepResult:
        self.modes.append(batch.forward_mode.name)
        self.num_tokens.append(batch.num_tokens)
        for pool_index, first, slots in batch.slot_writes:
            self.table[pool_index][first : first + len(slots)] = slots
        assert len(set(batch.out_cache_loc)) == batch.num_tokens, "two tokens share a slot"
        row_of = [row for row, num_new in enumerate(batch.extend_lens) for _ in range(num_new)]
        for token, slot, row in zip(batch.input_ids, batch.out_cache_loc, row_of, strict=True):
            self.kv[slot] = self.last[batch.req_pool_indices[row]] if token == UNKNOWN_TOKEN else token
        at = 0
        for row, num_new in enumerate(batch.extend_lens):
            start = batch.seq_lens[row] - num_new
            mapped = self.table[batch.req_pool_indices[row]][start : batch.seq_lens[row]]
            assert mapped == batch.out_cache_loc[at : at + num_new]
            assert batch.positions[at : at + num_new] == list(range(start, batch.seq_lens[row]))
            at += num_new
        result = StepResult()
        for sample in batch.samples:
            length = batch.seq_lens[sample.row]
            assert sample.position == length
            slots = self.table[batch.req_pool_indices[sample.row]][:length]
            tokens = [self.kv[slot] for slot in slots]
            known = (sample.prompt_ids + sample.output_ids)[:length]
            assert tokens[: len(known)] == known, "KV is not this sequence's"
            assert len(known) >= length - 1, "at most one token is not known yet"
            result.token_ids.append(next_token(tokens, sample.seed, sample.sample_index))
            self.last[batch.req_pool_indices[sample.row]] = result.token_ids[-1]
            result.logprobs.append(-float(length))
            result.finite.append(True)
            result.top_logprobs.append([])
        for scored in batch.prompt_logprobs:
            result.prompt_logprobs.append([-float(target) for target in scored.targets])
        return result


def limits(**changes) -> Limits:
    values = dict(
        num_pages=64,
        page_size=4,
        context_length=64,
        max_running=8,
        max_prefill_tokens=16,
        chunked_prefill=True,
        mixed_batches=True,
        prefix_cache=True,
        eos_token_ids=(EOS,),
    )
    return Limits(**(values | changes))


def sequence(number: int, prompt: list[int], max_tokens: int = 8, **changes) -> Sequence:
    params = changes.pop("params", SamplingParams(seed=7))
    values = dict(
        id=number,
        request_id=f"r{number}",
        index=0,
        prompt_ids=prompt,
        params=params,
        seed=7,
        max_tokens=max_tokens,
        arrival=number,
    )
    return Sequence(**(values | changes))


def expected_output(prompt: list[int], num_tokens: int, sample_index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, 7, sample_index))
    return tokens[len(prompt) :]


def drain(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 2000) -> None:
    """Run until idle; every step must make progress, and the books must be right after each."""
    for _ in range(max_steps):
        if scheduler.is_idle:
            scheduler.check()
            return
        batch = scheduler.schedule(1, 1)
        assert batch is not None, "live sequences, and nothing can run"
        scheduler.process(batch, runner.forward(batch))
        scheduler.check()
    raise AssertionError("the scheduler does not come to an end")
