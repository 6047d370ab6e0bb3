"""What the paths take, field by field. A field that is not here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainers_adapters.rollout_calls import Sampling

U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
I32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""What the engine's messages have room for, so that what has none is refused by its name."""
Ids = list[U32]

Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""What a caller without images or the like sends."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SamplingBody(Body):
    """What both dialects call alike, with the same defaults."""

    n: int = Field(default=1, ge=1, lt=1 << 32)
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool = False
    logit_bias: dict[U32, float] | None = None
    # Of the text alone; ids are always whole here.
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def sampling(self, **others: Any) -> Sampling:
        """These and `others` as the engine's options, without what was left out: its own defaults hold."""
        values = {name: getattr(self, name) for name in _ALIKE} | others
        return cast(Sampling, {name: value for name, value in values.items() if value is not None})


_ALIKE = SamplingBody.model_fields.keys() - {"skip_special_tokens", "spaces_between_special_tokens"}


# ---------------------------------------------------------------- SGLang's


class SglangSampling(SamplingBody):
    """`sampling_params` of /generate, with SGLang's defaults."""

    max_new_tokens: I32 = 128
    min_new_tokens: U32 = 0
    top_k: I32 = -1
    sampling_seed: U64 | None = None
    no_stop_trim: bool = False  # of the text alone, too

    def to_sampling(self) -> Sampling:
        return self.sampling(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            top_k=max(self.top_k, 0),
            seed=self.sampling_seed,
        )


class SglangGenerate(Body):
    """/generate: one prompt, or a list of them."""

    text: str | list[str] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: SglangSampling | list[SglangSampling] = SglangSampling()
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: U32 = 0
    stream: bool = False
    priority: I32 = 0
    lora_path: str | None = None  # the name of an adapter
    # Callers say that they want none of these.
    image_data: Nothing = None
    return_routed_experts: Literal[False] = False
    return_indexer_topk: Literal[False] = False

    @model_validator(mode="after")
    def _can_be_answered(self) -> SglangGenerate:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        if self.top_logprobs_num and self.logprob_start_len >= 0:
            raise ValueError(
                "top_logprobs_num is of sampled tokens here, not of the prompt's; leave logprob_start_len out"
            )
        for name in ("sampling_params", "rid"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != len(self.prompts):
                raise ValueError(f"{len(self.prompts)} prompts come with {len(value)} {name}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if self.text is not None:
            return list(self.text) if isinstance(self.text, list) else [self.text]
        return list(self.input_ids) if self.is_many else [self.input_ids]  # type: ignore

    @property
    def is_many(self) -> bool:
        """Whether the answer is a list: the prompts came as one."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]


class FromDisk(Body):
    """/update_weights_from_disk. Cached pages of older weights are never matched, and a paused engine stays
    paused, whatever flush_cache and keep_pause say.
    """

    model_path: str
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    recapture_cuda_graph: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: Literal[False] = False
    torch_empty_cache: bool = False


class FromDistributed(Body):
    """/update_weights_from_distributed; the sender is a weight_updater.groups.SenderGroup."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: None = None
    selector: Literal["all"] = "all"
    bucket_bytes: U64 = 0


class InitGroupBody(Body):
    """/init_weights_update_group."""

    master_address: str
    master_port: U32
    rank_offset: U32 = 1
    world_size: U32
    group_name: str = "weight_update_group"
    backend: str = ""


class GroupName(Body):
    group_name: str = "weight_update_group"


class Tags(Body):
    """Memory by tag; none means all."""

    tags: list[str] | None = None


class PauseBody(Body):
    """/pause_generation: abort, retract (free their pages) or in_place (keep them)."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(Body):
    rid: str | list[str] = ""
    abort_all: bool = False


class CheckerBody(Body):
    """/weights_checker. skip_tensor_list: names that compare leaves out."""

    action: str
    selector: Literal["all"] = "all"
    allow_quant_error: bool = False  # compare is exact: no weight is quantised on the way in
    skip_tensor_list: list[str] | None = None


# ---------------------------------------------------------------- vLLM's


class VllmSampling(SamplingBody):
    """`sampling_params` of /inference/v1/generate, with vLLM's defaults."""

    max_tokens: I32 | None = 16
    min_tokens: U32 = 0
    top_k: I32 = 0
    seed: U64 | None = None
    logprobs: U32 | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=1)  # of the prompt's own tokens, no others
    include_stop_str_in_output: bool = False  # of the text alone
    detokenize: bool = True
    use_beam_search: Literal[False] = False
    output_kind: Literal[2] = 2  # the whole, not what is new in it
    routed_experts_prompt_start: int = 0  # from where; none are returned

    def to_sampling(self) -> Sampling:
        return self.sampling(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            top_k=max(self.top_k, 0),
            seed=self.seed,
            top_logprobs=self.logprobs,
            prompt_logprobs=None if self.prompt_logprobs is None else True,
        )


class VllmGenerate(Body):
    """/inference/v1/generate: token ids in, token ids out."""

    token_ids: Ids
    sampling_params: VllmSampling = VllmSampling()
    request_id: str = ""
    model: str | None = None
    stream: Literal[False] = False
    cache_salt: str | None = None  # pages of other weights never match, salted or not
    priority: I32 = 0
    features: None = None


class VllmCompletion(VllmSampling):
    """/v1/completions."""

    prompt: str | Ids | list[str] | list[Ids]
    model: str | None = None
    stream: Literal[False] = False
    echo: Literal[False] = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    user: str | None = None

    @model_validator(mode="after")
    def _text_ends_before_a_stop_string(self) -> VllmCompletion:
        if self.include_stop_str_in_output and self.stop:
            raise ValueError("include_stop_str_in_output: text ends before a stop string here; ids do not")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        many = bool(self.prompt) and not isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", list(self.prompt) if many else [self.prompt])


class WeightDir(Body):
    """/update_weights: a directory of safetensors. update_info would be a transfer of vLLM's own."""

    weight_dir: str | None = None
    weight_version: str | int | None = None
    update_info: Any = None


class AdapterName(Body):
    """/unload_lora_adapter."""

    lora_name: str


class LoadAdapter(AdapterName):
    """/load_lora_adapter: a directory as PEFT saves it, below a weights root of the engine."""

    lora_path: str
    load_inplace: bool = True  # it always replaces one of that name
    pinned: bool = True  # none is ever moved away


class ResetBody(Body):
    """/reset_prefix_cache. reset_running_requests: what runs, or is frozen, is computed anew, too."""

    reset_running_requests: bool = False


class ArealWeights(Body):
    """/areal_update_weights."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = "auto"
    abort_all_requests: bool = False  # the path aborts them whatever this says


class AbortRequests(Body):
    request_ids: list[str] = Field(default_factory=list)
