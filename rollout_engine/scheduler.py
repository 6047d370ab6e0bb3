"""Scheduler: which sequences run in the next forward pass, and which pages they get. No torch.

Policy: sequences run in the order of (priority, arrival). Running ones come first: each decodes one token
or prefills its next chunk. Then waiting ones are admitted while rows, prompt budget and pages last. When
pages run out, idle pages of the prefix cache are evicted; then the last in order is preempted: its pages
are freed and it waits to be computed anew. The first in order is never preempted, so there is always
progress.

A batch counts as computed once `schedule` has returned it, since passes run in the order of their launch:
the next batch may be made up while one is in flight. `process` takes the results in, in the same order.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterator

from rollout_engine.batch.schedule import ScheduleBatch, StepResult
from rollout_engine.kv.pages import PageAccountingError, PagePool
from rollout_engine.kv.prefix import Node, PrefixCache, RootKey
from rollout_engine.records import WorkCounts
from rollout_engine.rows import Limits, build_batch, stop_ids
from rollout_engine.sequence import Sequence
from weight_updater.adapters import BASE_NUMBER, AdapterBook


class Scheduler:
    """Owns the queues and the pages; the engine's loop is its only caller.

    Args:
        adapters: those that sequences may choose; None: there are none.
    """

    def __init__(self, limits: Limits, adapters: AdapterBook | None = None) -> None:
        self.limits = limits
        self.adapters = adapters or AdapterBook()
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.prefix = PrefixCache(self.pool)
        self.waiting: list[Sequence] = []  # sorted by order
        self.running: list[Sequence] = []  # sorted by order; they hold a row, and pages
        self._live: dict[int, Sequence] = {}
        self._free_rows = list(range(limits.max_running - 1, -1, -1))
        self.work = WorkCounts()

    @property
    def is_idle(self) -> bool:
        return not self._live

    @property
    def started(self) -> list[Sequence]:
        """In flight: running, or preempted with tokens sampled already."""
        return self.running + [sequence for sequence in self.waiting if sequence.output_ids]

    def started_with(self, adapter: str) -> list[Sequence]:
        """Those in flight that go through an adapter; ""  means all that are in flight."""
        return [sequence for sequence in self.started if adapter in ("", sequence.adapter)]

    @property
    def live(self) -> list[Sequence]:
        """Running and waiting sequences."""
        return list(self._live.values())

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens (prompt and output) that one sequence can reach with the whole pool to itself."""
        return min(self.limits.context_length, self.limits.num_pages * self.limits.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._live[sequence.id] = sequence
        insort(self.waiting, sequence, key=lambda s: s.order)

    # ------------------------------------------------------------ one step

    def schedule(
        self,
        weight_version: int,
        commit_sequence: int,
        *,
        only_started: bool = False,
        held_back: Collection[str] = (),
    ) -> ScheduleBatch | None:
        """Decide the next forward pass under these weights; None when nothing can run.

        Args:
            only_started: admit no sequence that has no token yet (an update waits for the others).
            held_back: adapters of which the same holds.
        """
        decodes: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        budget = self.limits.max_prefill_tokens
        for sequence in list(self.running):
            if sequence.pool_index < 0:
                continue  # preempted by one before it
            if sequence.must_wait or (sequence.num_launched and len(sequence) >= self.max_sequence_tokens):
                continue
            if sequence.kv_key != self._key(sequence, commit_sequence):
                sequence.kv_key = None
            if _is_decode(sequence):
                if self._grow(sequence, 1):
                    decodes.append((sequence, 1))
            elif (num_tokens := self._chunk(sequence, budget)) and self._grow(sequence, num_tokens):
                prefills.append((sequence, num_tokens))
                budget -= num_tokens
        for sequence, num_tokens in self._admit(budget, commit_sequence, only_started, held_back):
            (decodes if _is_decode(sequence) else prefills).append((sequence, num_tokens))
        if prefills and not self.limits.mixed_batches:
            decodes = []
        if not prefills and not decodes:
            return None
        return build_batch(prefills, decodes, self.limits, weight_version, commit_sequence, self.adapters)

    def _key(self, sequence: Sequence, commit_sequence: int) -> RootKey:
        """What the KV that `sequence` computes now belongs to."""
        return commit_sequence, self.adapters.number(sequence.adapter)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens that `sequence` may bring to this step; 0 if it has to wait for the next."""
        if self.limits.chunked_prefill:
            return min(sequence.num_pending, budget)
        fits = sequence.num_pending <= budget or budget == self.limits.max_prefill_tokens
        return sequence.num_pending if fits else 0

    def _admit(
        self, budget: int, commit_sequence: int, only_started: bool, held_back: Collection[str]
    ) -> Iterator[tuple[Sequence, int]]:
        """Move waiting sequences to running, in order, and yield them with their tokens."""
        for sequence in list(self.waiting):
            if not self._free_rows or budget <= 0:
                return
            if not sequence.output_ids and (only_started or sequence.adapter in held_back):
                continue
            if sequence.num_launched:
                continue  # preempted, and the last of its passes is still in flight
            if _is_prefilling(sequence.leader):
                continue  # share its prompt's pages then
            self._attach_cached(sequence, commit_sequence)
            needed = self.pool.pages_for(len(sequence) + 1) - len(sequence.pages)
            num_tokens = 1 if _is_decode(sequence) else self._chunk(sequence, budget)
            if not num_tokens or needed > self.pool.num_free + self.prefix.num_idle + self._spare(sequence):
                self._free_pages(sequence)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.order)
            sequence.pool_index = self._free_rows.pop()
            grown = self._grow(sequence, num_tokens)
            assert grown, "admission counted the pages"
            budget -= num_tokens
            if sequence.num_first_cached < 0:
                sequence.num_first_cached = sequence.num_cached
            if not sequence.num_preemptions:
                self.work.admit(len(sequence.prompt_ids), sequence.num_cached)
            yield sequence, num_tokens

    def _spare(self, sequence: Sequence) -> int:
        """One page of slack where the whole pool is exactly the sequence: it may not need the next token."""
        return 1 if len(sequence) >= self.max_sequence_tokens else 0

    def _attach_cached(self, sequence: Sequence, commit_sequence: int) -> None:
        """Give a waiting sequence the pages that hold the start of it already."""
        leader = sequence.leader
        key = sequence.kv_key = self._key(sequence, commit_sequence)
        scored = leader is not None and leader.finish_reason != "error" and not leader.wants_prompt_logprobs
        if leader is not None and scored and sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = list(leader.prompt_logprobs)
            sequence.spans = list(leader.spans) if sequence.samples_nothing else []
        if sequence.wants_prompt_logprobs:
            sequence.node = self.prefix.root(key) if self.limits.prefix_cache else None
        elif self.limits.prefix_cache:
            tokens = sequence.tokens(0, len(sequence))
            sequence.pages, sequence.node = self.prefix.match(key, tokens, len(tokens) - 1)
            sequence.num_node_pages = len(sequence.pages)
        elif leader is not None and leader.pool_index >= 0 and leader.kv_key == key:
            num_shared = (len(sequence.prompt_ids) - 1) // self.limits.page_size
            sequence.pages = leader.pages[:num_shared]
            for page in sequence.pages:
                self.prefix.hold(page)
        sequence.num_cached = sequence.num_computed = len(sequence.pages) * self.limits.page_size

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` pages for `num_tokens` more tokens, preempting later ones if need be.

        Returns:
            False if even that was not enough: earlier sequences hold the pages, and it waits.
        """
        missing = self.pool.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        while self.pool.num_free < missing:
            if self.prefix.evict(missing - self.pool.num_free):
                continue
            last = self.running[-1]
            if last is sequence or last.order < sequence.order:
                return False
            self.preempt(last)
        sequence.pages.extend(self.pool.take() for _ in range(missing))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's pages and let it wait to be computed anew; it keeps its tokens."""
        self._leave_running(sequence)
        sequence.num_preemptions += 1
        self.work.num_preemptions += 1
        insort(self.waiting, sequence, key=lambda s: s.order)

    def preempt_all(self, adapter: str = "") -> int:
        """Preempt every running sequence (of an adapter); returns how many."""
        running = [sequence for sequence in self.running if adapter in ("", sequence.adapter)]
        for sequence in running:
            self.preempt(sequence)
        return len(running)

    # ------------------------------------------------------------ results

    def process(self, batch: ScheduleBatch, result: StepResult) -> list[Sequence]:
        """Take in what a forward pass gave; returns the sequences with something new to tell."""
        told: dict[int, Sequence] = {}
        for sequence_id in batch.sequence_ids:
            if (sequence := self._live.get(sequence_id)) is not None:
                sequence.num_launched -= 1
        for scored, logprobs in zip(batch.prompt_logprobs, result.prompt_logprobs, strict=True):
            if (sequence := self._live.get(batch.sequence_ids[scored.row])) is not None:
                self._take_prompt_logprobs(sequence, logprobs, scored.row, batch, told)
        for i, sample in enumerate(batch.samples):
            sequence = self._live.get(batch.sequence_ids[sample.row])
            if sequence is not None:
                sequence.num_unknown -= 1
                self._take_sample(sequence, i, batch, result)
                told[sequence.id] = sequence
        for row, sequence_id in enumerate(batch.sequence_ids):
            if (sequence := self._live.get(sequence_id)) is not None:
                adapter = batch.adapter(row)
                number = BASE_NUMBER if adapter is None else adapter.number
                self._cache_pages(sequence, (batch.commit_sequence, number))
                done = not sequence.num_pending and not sequence.num_launched
                if sequence.samples_nothing and done and not sequence.finish_reason:
                    sequence.finish_reason = "length"
                    told[sequence_id] = sequence
        for sequence in told.values():
            if sequence.finish_reason:
                self.remove(sequence)
        return list(told.values())

    def _take_prompt_logprobs(
        self,
        sequence: Sequence,
        logprobs: list[float],
        row: int,
        batch: ScheduleBatch,
        told: dict[int, Sequence],
    ) -> None:
        if sequence.samples_nothing:
            start = len(sequence.prompt_logprobs)
            sequence.label(start, batch.weight_version, batch.commit_sequence, batch.adapter(row))
        sequence.prompt_logprobs.extend(logprobs)
        if not all(map(math.isfinite, logprobs)):
            _fail_nonfinite(sequence)
            told[sequence.id] = sequence

    def _take_sample(self, sequence: Sequence, i: int, batch: ScheduleBatch, result: StepResult) -> None:
        if sequence.finish_reason:
            return
        if not result.finite[i]:
            _fail_nonfinite(sequence)
            return
        token_id = result.token_ids[i]
        adapter = batch.adapter(batch.samples[i].row)
        sequence.label(len(sequence.output_ids), batch.weight_version, batch.commit_sequence, adapter)
        sequence.output_ids.append(token_id)
        sequence.logprobs.append(result.logprobs[i])
        if sequence.params.top_logprobs:
            sequence.top_logprobs.append(result.top_logprobs[i])
        if sequence.wants_hidden:
            sequence.hidden_states.append(result.hidden_states[i])
        if token_id in stop_ids(sequence, self.limits):
            sequence.finish_reason = "stop"
        elif (
            len(sequence.output_ids) >= sequence.max_tokens
            or len(sequence) - sequence.num_unknown >= self.max_sequence_tokens
        ):
            sequence.finish_reason = "length"

    def _cache_pages(self, sequence: Sequence, key: RootKey) -> None:
        """Put the pages that are full now into the prefix cache, if all were computed under one commit, and
        through one adapter.
        """
        size = self.limits.page_size
        while sequence.kv_key == key and sequence.node is not None:
            start = sequence.num_node_pages * size
            if start + size > min(sequence.num_computed, len(sequence) - sequence.num_unknown):
                return
            if not self.prefix.is_live(sequence.node):
                sequence.node = None  # its prefix was evicted: a page without it could never be found
                return
            tokens = tuple(sequence.tokens(start, start + size))
            self._cache_page(sequence, sequence.node, tokens)

    def _cache_page(self, sequence: Sequence, parent: Node, tokens: tuple[int, ...]) -> None:
        """Cache the sequence's next page; if its tokens are cached already, use that page from now on."""
        at = sequence.num_node_pages
        own = sequence.pages[at]
        sequence.node = self.prefix.insert(parent, tokens, own)
        if sequence.node.page != own:
            self.prefix.hold(sequence.node.page)
            sequence.pages[at] = sequence.node.page
            self.prefix.drop(own)
            sequence.num_pages_written = min(sequence.num_pages_written, at)
        sequence.num_node_pages += 1

    # ------------------------------------------------------------ ends

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds; it must be live."""
        del self._live[sequence.id]
        if sequence.pool_index >= 0:
            self._leave_running(sequence)
        else:
            self.waiting.remove(sequence)

    def on_commit(self, commit_sequence: int) -> None:
        """Weights or adapters changed: pages of others can never match again, so let them go."""
        numbers = [BASE_NUMBER, *(adapter.number for adapter in self.adapters.held.values())]
        self.prefix.retire(keep={(commit_sequence, number) for number in numbers})

    def flush(self) -> int:
        """Drop the whole prefix cache; returns the number of pages."""
        return self.prefix.retire()

    def check(self) -> None:
        """Compare the books with what sequences and cache really hold.

        Raises:
            PageAccountingError: they differ.
        """
        held = [page for sequence in self.running for page in sequence.pages]
        self.pool.check([*held, *self.prefix.pages()])
        if len(self._free_rows) + len(self.running) != self.limits.max_running:
            raise PageAccountingError(
                f"{len(self._free_rows)} rows are free beside {len(self.running)} running"
            )

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.pool_index)
        sequence.pool_index = -1
        self._free_pages(sequence)

    def _free_pages(self, sequence: Sequence) -> None:
        # Last page first, so that a leaf of the prefix cache is older than its parent.
        for page in reversed(sequence.pages):
            self.prefix.drop(page)
        sequence.pages = []
        sequence.num_computed = sequence.num_cached = 0
        sequence.num_pages_written = sequence.num_node_pages = 0
        sequence.node = None


def _is_decode(sequence: Sequence) -> bool:
    """One token to compute, and the next one to be drawn from it."""
    return sequence.num_pending == 1 and not sequence.samples_nothing and not sequence.wants_prompt_logprobs


def _is_prefilling(leader: Sequence | None) -> bool:
    """Whether a group's first sequence computes its prompt, or has just launched the last of it."""
    if leader is None or leader.pool_index < 0:
        return False
    return leader.num_computed < len(leader.prompt_ids) or (leader.num_launched > 0 and not leader.output_ids)


def _fail_nonfinite(sequence: Sequence) -> None:
    sequence.finish_reason = "error"
    sequence.error = "the logits of this sequence are not finite: NaN or infinity in the weights or its KV"
