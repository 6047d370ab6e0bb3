"""Ask a running engine for tokens, and see which weights sampled each of them.

rollsync serve --model DIRECTORY        (in another terminal)
python examples/generate.py "The capital of France is"
"""

from __future__ import annotations

import os
import sys

from trainers_adapters import RolloutClient, RollsyncError


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
    with RolloutClient(os.environ.get("ROLLSYNC_ADDRESS", "127.0.0.1:50051")) as engine:
        info = engine.info()
        print(f"{info.architecture}, {info.dtype} on {info.device}, weight version {info.weight_version}")

        print("\nstreamed, greedy:")
        for part in engine.generate_stream(prompt, max_tokens=16, temperature=0.0, return_text=True):
            print(part.text, end="", flush=True)
        print()

        print("\nthree samples of one prompt, whose pages they share:")
        for completion in engine.generate(prompt, n=3, max_tokens=16, seed=0, return_text=True):
            mean = sum(completion.logprobs) / len(completion.logprobs)
            versions = sorted(set(completion.weight_versions))
            print(f"  {completion.text!r}  mean logprob {mean:.2f}, versions {versions}")

        print("\nthe log-probabilities of given tokens:")
        (sampled,) = engine.generate(prompt, max_tokens=4, temperature=0.0)
        (score,) = engine.score([sampled.token_ids])
        print(f"  {sampled.token_ids[1:]} -> {[round(x, 3) for x in score.logprobs]}")


if __name__ == "__main__":
    try:
        main()
    except RollsyncError as error:
        sys.exit(f"error: {error}")
