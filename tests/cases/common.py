"""What the tests of public bug reports share: weights, a reference, and a look at all that is live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout_engine import messages as m
from tests.desk import Desk
from tests.tiny import load_reference
from tests.wire.trainer import PROMPT, SEEDS, reference_tokens
from weight_updater.checksum import checksum

Tensors = dict[str, torch.Tensor]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
NORM = "model.norm.weight"


def stored(directory: Path) -> Tensors:
    """The tensors of a model directory."""
    return load_file(directory / "model.safetensors")


def trained(tensors: Tensors) -> Tensors:
    """Other weights, near enough that the model still makes finite logits; never the same twice."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    return {
        name: t + torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05 for name, t in tensors.items()
    }


def strided(tensors: Tensors) -> Tensors:
    """The same values with other memory: transposed, every second row, a column step, from an offset."""
    found = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 1:
            wide = torch.zeros(3 * len(tensor) + 5)
            view = wide[5::3]
        elif number % 3 == 0:
            view = torch.zeros(tensor.shape[::-1]).t()
        elif number % 3 == 1:
            view = torch.zeros(2 * tensor.shape[0] + 1, tensor.shape[1])[1::2]
        else:
            view = torch.zeros(tensor.shape[0], 3, tensor.shape[1])[:, 1]
        view.copy_(tensor)
        assert not view.is_contiguous()
        found[name] = view
    return found


def reference(directory: Path, tensors: Tensors) -> Any:
    """The transformers model of `directory` with these weights."""
    model = load_reference(directory)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {HEAD}
    model.tie_weights()
    return model


def live(engine: Desk) -> tuple[Any, ...]:
    """All that an update which is refused must leave as it was: bytes, addresses, versions, where from."""
    updater = engine.updater
    return (
        updater.checksums([]),
        engine.runner.target.addresses(),
        updater.version,
        updater.commit_sequence,
        updater.torn_reason,
        updater.open,
        updater.weights_path,
    )


def assert_serves(engine: Desk, directory: Path, tensors: Tensors, prompt: Sequence[int] = PROMPT) -> None:
    """The engine holds exactly these weights, and samples with them under the version that is live."""
    target = engine.runner.target
    for name, tensor in tensors.items():
        assert torch.equal(target.slot(name), tensor.to(target.slot(name).dtype)), name
    assert engine.updater.checksums([]).items() >= {n: checksum(target.slot(n)) for n in tensors}.items()
    completion = engine.generate(list(prompt))
    assert completion.tokens() == reference_tokens(reference(directory, tensors), prompt)
    assert completion.labels() == [engine.version] * 8


def logits(engine: Desk, prompt: Sequence[int]) -> torch.Tensor:
    """[V] float32: log-probabilities of all ids after a prompt."""
    vocab = engine.runner.model_config.vocab_size
    outputs = engine.generate(list(prompt), 1, top_logprobs=vocab, temperature=1.0, logprobs="raw").last
    found = torch.empty(vocab)
    for token_id, value in outputs.top_logprobs[0]:
        found[token_id] = value
    return found


def reference_logits(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """The same by transformers."""
    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0, -1].float().log_softmax(-1)


def wake(engine: Desk) -> bool:
    """Resume all memory; whether weights must come."""
    return bool(engine.call(m.ResumeMemory, tags=[])["needs_update"])
