"""What compiles or loads at its first use does so before the first request: a few passes over padding.

Kernels are compiled once for each kind of arguments: their dtypes, which sizes are 1 or multiples of 16,
which addresses are aligned. So the passes here take the way that those of requests take, and the kernels in
ops see to it that the kind does not depend on the batch (do_not_specialize_on_alignment).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rollout_engine.batch.forward import ForwardBatch
from rollout_engine.batch.schedule import ForwardMode, SampleRow, ScheduleBatch
from rollout_engine.logs import get_log
from rollout_engine.ops.fused import MANY_ROWS
from rollout_engine.sampling import SamplingParams
from weight_updater import host_scan

if TYPE_CHECKING:
    from rollout_engine.runner.model_runner import ModelRunner

log = get_log(__name__)

SHALLOW_PAGES = 64

DRAWN = SamplingParams()
DRAWN_RAW = SamplingParams(temperature=0.5, logprobs="raw")
"""The drawing kernels' other kind: log-probabilities of two distributions."""
GENERAL = SamplingParams(
    temperature=0.5, top_k=8, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1
)
"""What runner.sampler does in steps."""


def warm_up(runner: ModelRunner) -> None:
    """Run what passes of requests run, on the current stream. Writes to the padding page only.

    Graphs are captured already, and with them the kernels of the passes that they hold are loaded.
    """
    started = time.monotonic()
    for batch in _passes(runner):
        if runner.decode_graph is None or not runner.decode_graph.can_run_graph(batch):
            runner.eager.run(batch, ForwardBatch.init_new(batch, runner)).result()
    log.info("kernels_ready", seconds=round(time.monotonic() - started, 1))


def _passes(runner: ModelRunner) -> Iterator[ScheduleBatch]:
    slot = runner.token_to_kv_pool.padding_slot
    # A product of one row has a kernel of its own.
    yield _pass(ForwardMode.EXTEND, 1, 1, slot, DRAWN)
    yield _pass(ForwardMode.EXTEND, 2, 4, slot, DRAWN_RAW)
    yield _pass(ForwardMode.EXTEND, 2, 4, slot, GENERAL)
    # Norms of many rows have one, too.
    num_tokens = min(MANY_ROWS + 1, runner.model_config.context_length)
    yield _pass(ForwardMode.EXTEND, -(-(MANY_ROWS + 1) // num_tokens), num_tokens, slot, DRAWN)
    # Attention cuts rows into fewer pieces the more rows there are, half as many for twice the rows.
    num_rows = 1
    while num_rows < runner.max_running:
        yield _pass(ForwardMode.DECODE, num_rows, 1, slot, DRAWN)
        num_rows *= 2
    yield _pass(ForwardMode.DECODE, runner.max_running, 1, slot, DRAWN)


def _pass(
    mode: ForwardMode, num_rows: int, num_tokens: int, slot: int, params: SamplingParams
) -> ScheduleBatch:
    """`num_rows` rows of `num_tokens` tokens each, all of them written to one slot, and all rows sampled."""
    total = num_rows * num_tokens
    return ScheduleBatch(
        mode,
        sequence_ids=list(range(num_rows)),
        req_pool_indices=[0] * num_rows,
        seq_lens=[num_tokens] * num_rows,
        extend_lens=[num_tokens] * num_rows,
        input_ids=[0] * total,
        positions=list(range(num_tokens)) * num_rows,
        out_cache_loc=[slot] * total,
        samples=[SampleRow(row, params, 0, 0, num_tokens, [], []) for row in range(num_rows)],
    )


def compile_ahead(runner: ModelRunner) -> str:
    """Compile what an engine of this configuration would; on a CPU that is what hashes updates.

    Returns:
        The name of its attention backend.
    """
    if runner.device.type != "cuda":
        host_scan.warm_up()
        return runner.load_attention()[0]
    make_shallow(runner)
    return runner.attention_backend_name


def make_shallow(runner: ModelRunner) -> None:
    """Initialise a new runner over one layer of its model, with random weights.

    All layers are alike, so it compiles every kernel of the whole model, and takes the memory of that layer,
    of the embedding and of the head.
    """
    runner.config = runner.config.model_copy(update={"load_format": "random", "weights": ""})
    runner.model_config = replace(runner.model_config, num_layers=1)
    runner.initialize()
    runner.alloc_memory_pool(SHALLOW_PAGES)
    runner.init_attention_backends()
    runner.init_cuda_graphs()
