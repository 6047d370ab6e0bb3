"""`rollsync generate`: complete one prompt on a running engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_engine.cli.output import (
    DEFAULT_ADDRESS,
    I32,
    U32,
    U64,
    AddressOption,
    CaOption,
    CertOption,
    JsonOption,
    KeyOption,
    TokenOption,
    print_json,
    reported,
    rollout_client,
    say,
)

if TYPE_CHECKING:
    from trainers_adapters.clients import RolloutClient
    from trainers_adapters.results import Completion


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text; - reads stdin.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=U32, help="Completions of the prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=0, max=I32, help="Tokens of a completion at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set that reaches it.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, max=I32, help="Keep the k most likely; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, max=U64, help="Fixes the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the completion; repeatable.")] = None,
    min_version: Annotated[int, typer.Option(min=0, max=U64, help="Refuse older weights.")] = 0,
    adapter: Annotated[str, typer.Option(help="LoRA adapter that samples; none: the base weights.")] = "",
    min_adapter_version: Annotated[
        int, typer.Option(min=0, max=U64, help="Refuse an older version of it.")
    ] = 0,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt: text as it is sampled, or with --ids token ids."""
    wanted = read_prompt(prompt, ids)
    options: dict[str, Any] = {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or [],
        "min_version": min_version,
        "adapter": adapter,
        "min_adapter_version": min_adapter_version,
        "return_text": isinstance(wanted, str),
    }
    with reported(as_json), rollout_client(address, token, tls_ca, tls_cert, tls_key) as client:
        if as_json:
            completions = client.generate(wanted, **options)
            print_json({"completions": completions, "weight_version": completions[0].weight_version})
        elif n == 1:
            _stream(client, wanted, options)
        else:
            for completion in client.generate(wanted, **options):
                print(f"[{completion.index}] {_shown(completion)}")


def read_prompt(prompt: str | None, ids: str | None) -> str | list[int]:
    """The one prompt that was given; typer.BadParameter otherwise."""
    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give a PROMPT or --ids, one of them")
    if ids is not None:
        try:
            found = [int(word) for word in ids.replace(",", " ").split()]
        except ValueError as error:
            raise typer.BadParameter(f"--ids wants numbers like 1,2,3, not {ids!r}") from error
        if wrong := [number for number in found if not 0 <= number <= U32]:
            raise typer.BadParameter(f"--ids has {wrong[0]}, which is no token id")
        return found
    if prompt != "-":
        return str(prompt)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"stdin is not valid UTF-8 ({error.reason} at byte {error.start})"
        ) from error


def _stream(client: RolloutClient, prompt: str | list[int], options: dict[str, Any]) -> None:
    num_tokens, versions, adapters, finish = 0, set[int](), set[str](), ""
    for part in client.generate_stream(prompt, **options):
        shown = part.text if isinstance(prompt, str) else "".join(f"{i} " for i in part.token_ids)
        print(shown, end="", flush=True)
        num_tokens += len(part.token_ids)
        versions.update(part.weight_versions)
        adapters.update(
            f", {span.adapter} version {span.adapter_version}" for span in part.spans if span.adapter
        )
        finish = part.finish_reason
    print()
    labels = ", ".join(map(str, sorted(versions)))
    through = "".join(sorted(adapters))
    say(f"[{num_tokens} tokens, {finish}, weight version {labels or 'none'}{through}]")


def _shown(completion: Completion) -> str:
    return completion.text or " ".join(map(str, completion.token_ids))
