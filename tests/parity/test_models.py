"""Every architecture against transformers in float32: logits, greedy tokens, log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout_engine.batch.schedule import CaptureHiddenMode
from rollout_engine.models import products
from rollout_engine.sampling import SamplingParams
from tests.hand_scheduler import GREEDY, HandScheduler, make_runner
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, load_reference, make_tiny

TOLERANCE = 1e-4
LENGTHS = (1, 5, 16, 37, 70)
TEXT = """
The river had been low all summer, and when the rain came at last nobody in the village trusted it. They
stood under the eaves of the mill and counted: one day, two days, then a week of it, warm and steady, until
the weir sang again and the children were told to keep away from the bank. Old Marten, who had kept the gates
for forty years, walked the length of the dam each morning with a stick and a lantern, and wrote down the
height of the water in a book with a green cover. On the ninth day he wrote nothing. He went to the mayor and
said that the third gate would not close, that it had moved by the width of a hand since Sunday, and that if
anybody wanted to save the bridge they had better find him six men and a good rope before dark. The mayor,
who was a careful person, asked what it would cost. "Less than a bridge," said Marten, and put on his hat.
"""
CASES = [(name, tied) for name in ARCHITECTURES for tied in (False, True)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}")
def tiny(request, tmp_path_factory):
    """(our runner, the transformers model) of one tiny model."""
    name, tied = request.param
    directory = make_tiny(tmp_path_factory.mktemp(name), name, tied=tied)
    return make_runner(directory, num_pages=128), load_reference(directory)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return make_runner(smollm2_dir, num_pages=64, context_length=512), load_reference(smollm2_dir)


@pytest.fixture
def one_thread():
    """Threads share a product as their number and the place of its operands in memory suggest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts_of(vocab_size: int, lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def prompts_from(directory: Path) -> list[list[int]]:
    """Three of each length but 1, out of TEXT: a trained model computes over text what it was made for. Over
    one token, or random ones, its logits are ill-conditioned: transformers differs from itself by up to 9e-4
    there, depending on how many rows or threads a product has.
    """
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    return [tokens[start : start + n] for start in (0, 60, 110) for n in LENGTHS[1:]]


@torch.no_grad()
def reference_greedy(model, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def our_logits(runner, rows) -> list[torch.Tensor]:
    """Logits of every prompt position of `rows`, prefilled in one batch, through the hidden states."""
    scheduler = HandScheduler(runner)
    work = [(scheduler.row(prompt, room=1), len(prompt)) for prompt in rows]
    batch = scheduler.batch(work)
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    result = runner.forward(batch)
    hidden = torch.stack([torch.frombuffer(bytearray(h), dtype=torch.float32) for h in result.hidden_states])
    return list(runner.model.compute_logits(hidden).split([len(prompt) for prompt in rows]))


def check_logits(pair, batches):
    runner, reference = pair
    for prompts in batches:
        for prompt, ours in zip(prompts, our_logits(runner, prompts), strict=True):
            assert (ours - reference_logits(reference, prompt)).abs().max().item() < TOLERANCE


def each_alone(prompts: list[list[int]]) -> list[list[list[int]]]:
    """Products of other heights than those of a batch: other operations."""
    return [[prompt] for prompt in prompts]


def check_greedy(pair, vocab_size, num_tokens, **how):
    runner, reference = pair
    scheduler = HandScheduler(runner)
    rows = [scheduler.row(prompt, room=num_tokens) for prompt in prompts_of(vocab_size)]
    scheduler.run(rows, num_tokens, **how)
    for row in rows:
        assert row.output == reference_greedy(reference, row.prompt, num_tokens)
        scores = reference_logits(reference, row.tokens).log_softmax(-1)[len(row.prompt) - 1 : -1]
        theirs = scores.gather(1, torch.tensor(row.output)[:, None])[:, 0]
        assert (torch.tensor(row.logprobs) - theirs).abs().max() < TOLERANCE


def test_logits(tiny):
    prompts = prompts_of(VOCAB_SIZE)
    check_logits(tiny, [prompts, *each_alone(prompts)])


@pytest.mark.parametrize(
    "how", [{}, {"chunk": 7}, {"chunk": 7, "delay": 5}], ids=["whole", "chunked", "mixed"]
)
def test_greedy_tokens_and_logprobs(tiny, how):
    check_greedy(tiny, VOCAB_SIZE, 64, **how)


def test_prompt_logprobs_in_chunks_and_blocks(tiny):
    runner, reference = tiny
    runner.eager.max_prompt_logits_rows = 11
    scheduler = HandScheduler(runner)
    params = SamplingParams(temperature=0.0, prompt_logprobs=True)
    hot = SamplingParams(temperature=2.0, prompt_logprobs=True, logprobs="processed")
    prompts = prompts_of(VOCAB_SIZE)
    rows = [scheduler.row(prompt, params) for prompt in prompts] + [scheduler.row(prompts[-1], hot)]
    scheduler.run(rows, 2, chunk=13)
    for row in rows:
        temperature = row.params.temperature or 1.0
        scores = (reference_logits(reference, row.prompt) / temperature).log_softmax(-1)[:-1]
        theirs = scores.gather(1, torch.tensor(row.prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        assert len(row.prompt_logprobs) == len(row.prompt) - 1
        torch.testing.assert_close(torch.tensor(row.prompt_logprobs), theirs, atol=TOLERANCE, rtol=0)


def test_sampled_logprobs_are_of_the_sampled_token(tiny):
    runner, reference = tiny
    for params, scale in (
        (SamplingParams(seed=5, temperature=3.0), 3.0),
        (SamplingParams(seed=5, temperature=3.0, logprobs="raw"), 1.0),
    ):
        scheduler = HandScheduler(runner)
        row = scheduler.row(prompts_of(VOCAB_SIZE)[2], params)
        scheduler.run([row], 32)
        scores = (reference_logits(reference, row.tokens) / scale).log_softmax(-1)[len(row.prompt) - 1 : -1]
        theirs = scores.gather(1, torch.tensor(row.output)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), theirs, atol=TOLERANCE, rtol=0)
        assert (scores.argmax(-1) != torch.tensor(row.output)).any()  # not greedy in disguise


@pytest.mark.parametrize("onednn", [True, False])
def test_smollm2_logits(onednn, smollm2, smollm2_dir, monkeypatch):
    if not onednn:
        monkeypatch.setattr(products, "ONEDNN", None)
    texts = prompts_from(smollm2_dir)
    check_logits(smollm2, [texts, *each_alone(texts + prompts_of(49152))])


@pytest.mark.parametrize("index", range(1, len(LENGTHS)), ids=LENGTHS[1:])
def test_smollm2_hidden_states_round_like_those_of_transformers(index, smollm2, one_thread):
    """A prompt alone goes through the same products and sums: not one bit differs before the head."""
    runner, reference = smollm2
    prompt = prompts_of(49152)[index]
    scheduler = HandScheduler(runner)
    batch = scheduler.batch([(scheduler.row(prompt, room=1), len(prompt))])
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    ours = [torch.frombuffer(bytearray(h), dtype=torch.float32) for h in runner.forward(batch).hidden_states]
    with torch.no_grad():
        theirs = reference.model(torch.tensor([prompt])).last_hidden_state[0]
    assert torch.equal(torch.stack(ours), theirs)


def test_smollm2_greedy_tokens_and_logprobs(smollm2):
    check_greedy(smollm2, 49152, 64, chunk=24, delay=3)


def test_llama3_rope_and_biases_match(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=[2, 3],
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.3, 0.2)
    model.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    assert runner.model_config.eos_token_ids == (2, 3)
    assert runner.model_config.rope.rope_type == "llama3"
    prompt = prompts_of(VOCAB_SIZE, (200,))
    [ours] = our_logits(runner, prompt)
    assert (ours - reference_logits(load_reference(tmp_path), prompt[0])).abs().max() < TOLERANCE
    scheduler = HandScheduler(runner)
    row = scheduler.row(prompt[0], GREEDY)
    scheduler.run([row], 16, chunk=64)
    assert row.output == reference_greedy(load_reference(tmp_path), prompt[0], 16)
