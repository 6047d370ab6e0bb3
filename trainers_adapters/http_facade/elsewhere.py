"""Paths that trainers know and this engine does not serve: each answers with the way that does the same.

Their bodies are not even read, since some are pickles.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from trainers_adapters.http_facade.engine import not_here

router = APIRouter()

PUSH = (
    "push with trainers_adapters.push_weights(source, client, path='ipc', 'tensor' or 'distributed') over "
    "gRPC, or name a directory with /update_weights_from_disk or /update_weights"
)
ADAPTER = (
    "push the adapter (trainers_adapters.AdapterSource, docs/lora.md) over gRPC, or name its directory with "
    "/load_lora_adapter"
)
IDS = "render the chat with the model's tokenizer and send ids to /generate or /inference/v1/generate"
ONE_MANIFEST = (
    "an update agrees on all of its tensors before a byte moves, and this call brings bytes without them"
)

ELSEWHERE: dict[str, tuple[str, str]] = {
    # Pickles
    "/update_weights_from_tensor": ("it carries pickled tensors, and nothing is unpickled here", PUSH),
    "/load_lora_adapter_from_tensors": ("it carries pickled tensors, and nothing is unpickled here", ADAPTER),
    "/collective_rpc": (
        "it runs any method with pickled arguments, and nothing is unpickled here",
        "every call that a trainer needs has a path, or a gRPC method, of its own; " + PUSH,
    ),
    # Transfers without a manifest, or of other programs' own
    "/init_weight_transfer_engine": (ONE_MANIFEST, PUSH),
    "/start_weight_update": (ONE_MANIFEST, PUSH),
    "/finish_weight_update": (ONE_MANIFEST, PUSH),
    "/begin_weight_update": (ONE_MANIFEST, PUSH),
    "/end_weight_update": (ONE_MANIFEST, PUSH),
    "/init_broadcaster": (ONE_MANIFEST, PUSH),
    "/areal_init_weights_update_group": (ONE_MANIFEST, PUSH),
    "/areal_set_update_weight_meta": (ONE_MANIFEST, PUSH),
    "/areal_update_weights_xccl": (ONE_MANIFEST, PUSH),
    "/pull_weights": ("this engine fetches no weights by itself", PUSH),
    "/fetch_weights": ("this engine fetches no weights by itself", PUSH),
    "/get_remote_instance_transfer_engine_info": ("nobody may write into this engine's memory", PUSH),
    "/parallelism_config": ("this engine has one rank, and nobody may write into its memory", PUSH),
    "/post_process_weights": (
        "derived state is computed anew by every commit",
        "leave the call out: there is nothing to do after an update",
    ),
    "/update_weight_version": (
        "a weight version changes by the commit of an update alone",
        "give weight_version to the update itself",
    ),
    # Adapters by other ways than a directory
    "/load_lora_adapter_from_distributed": ("adapters do not come by broadcast here", ADAPTER),
    "/areal_update_weights_lora": ("adapters are loaded by other paths here", ADAPTER),
    # Generation
    "/v1/chat/completions": ("chats are not rendered here", IDS),
    "/v1/chat/completions/render": ("chats are not rendered here", IDS),
    "/tokenize": ("text is tokenised only where it is a prompt", IDS),
    "/detokenize": ("text is written only beside the ids that were sampled", IDS),
    "/skyrl/v1/generate": (
        "routed experts are not returned",
        "use /inference/v1/generate (enable_return_routed_experts=false)",
    ),
    # Profiles
    "/start_profile": ("this path takes no profiles", "use a profiler on the engine's process"),
    "/stop_profile": ("this path takes no profiles", "use a profiler on the engine's process"),
}
"""By path: why it is not served, and what does the same."""


def _answer(path: str) -> Callable[[], Awaitable[None]]:
    async def elsewhere() -> None:
        why, instead = ELSEWHERE[path]
        raise not_here(f"{path}: {why}", instead)

    return elsewhere


for _path in ELSEWHERE:
    router.add_api_route(_path, _answer(_path), methods=["GET", "POST"])
