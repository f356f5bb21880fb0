"""The JSON bodies the server reads, under SGLang's names and defaults. Owns types; refuses meaning.

Unknown keys are ignored, because routers add some.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictInt, StrictStr, field_validator

Ids = list[StrictInt]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class GenerateBody(Body):
    """Of /generate. A field given as a list has one entry a prompt."""

    text: StrictStr | list[StrictStr] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: Any = None
    rid: StrictStr | list[StrictStr] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: Ids | list[Ids] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    extra_key: StrictStr | list[StrictStr] | None = None


class StreamOptions(Body):
    """Of the OpenAI endpoints."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OpenAIBody(Body):
    """What /v1/completions and /v1/chat/completions share."""

    model: str = "default"
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class CompletionBody(OpenAIBody):
    """Of /v1/completions."""

    prompt: Ids | list[Ids] | StrictStr | list[StrictStr]
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("max_tokens must be positive")
        return value


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


def _to_lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class Message(Body):
    """One turn of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[
        Literal["user", "system", "assistant", "tool", "function", "developer", "latest_reminder"],
        BeforeValidator(_to_lower),
    ]
    content: str | list[TextPart] | None = None


class ChatBody(OpenAIBody):
    """Of /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    input_ids: Ids | None = None


class AbortBody(Body):
    """Of /abort_request."""

    rid: StrictStr | None = None
    abort_all: bool = False


class PauseBody(Body):
    """Of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    """Of /continue_generation."""


class UpdateBody(Body):
    """What the three weight updates share."""

    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: StrictStr | None = None


class UpdateFromDiskBody(UpdateBody):
    """Of /update_weights_from_disk."""

    model_path: StrictStr


class UpdateFromTensorBody(UpdateBody):
    """Of /update_weights_from_tensor: one base64 pickle for each tensor-parallel rank."""

    serialized_named_tensors: list[StrictStr]


class UpdateFromDistributedBody(UpdateBody):
    """Of /update_weights_from_distributed."""

    names: list[StrictStr]
    dtypes: list[StrictStr]
    shapes: list[Ids]
    group_name: StrictStr = "weight_update_group"


class InitGroupBody(Body):
    """Of /init_weights_update_group."""

    master_address: StrictStr
    master_port: int
    rank_offset: int
    world_size: int
    group_name: StrictStr = "weight_update_group"
    backend: StrictStr = "nccl"


class DestroyGroupBody(Body):
    """Of /destroy_weights_update_group."""

    group_name: StrictStr = "weight_update_group"


class WeightVersionBody(Body):
    """Of /update_weight_version."""

    new_version: StrictStr
    abort_all_requests: bool = True


class CheckWeightsBody(Body):
    """Of /weights_checker."""

    action: str = "checksum"


class MemoryBody(Body):
    """Of /release_memory_occupation and /resume_memory_occupation."""

    tags: list[StrictStr] | None = None
