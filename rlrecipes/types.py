"""The records that travel the road of one sample. Owns their shapes; refuses behaviour, torch and configuration.

Lengths that must agree are checked when a record is built, so a misaligned sample cannot exist. Sequences of numbers
are tuples before batching and numpy arrays after it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlrecipes.errors import ContractError

if TYPE_CHECKING:
    import numpy as np

FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = "stop", "length", "abort"
"""Values of ``Completion.finish_reason``, as SGLang names them."""


def _check_aligned(record: str, **lengths: int) -> None:
    if len(set(lengths.values())) > 1:
        raise ContractError(
            f"types.{record}",
            "lengths differ: " + ", ".join(f"{name}={length}" for name, length in lengths.items()),
            "give one entry per token in each of these fields",
        )


@functools.cache
def list_optional_arrays(record: type[Sample | MicroBatch]) -> tuple[str, ...]:
    """Names of the arrays of a record that are None until something computes them.

    Args:
        record: Sample or MicroBatch.
    """
    return tuple(each.name for each in fields(record) if each.default is None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked.

    Attributes:
        index: position in the endless stream of prompts (epoch after epoch); unique within a run.
        token_ids: the prompt as the engine receives it, chat template applied.
        text: the same before tokenizing, for people and verifiers.
        label: what a verifier compares with; None when the reward needs none.
        metadata: whatever the source carries beside; reaches rewards untouched.
        source: name of the dataset it came from.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples; every field is sent with every request, so no server-side default decides anything.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: > 0 divides the logits; 0 is greedy.
        top_p: in (0, 1]; 1 keeps all.
        top_k: at least 1, or -1 to keep all.
        min_new_tokens: no stop before so many.
        stop: strings that end the answer.
        stop_token_ids: tokens that end it, beside the end-of-sequence token.
        ignore_eos: whether the end-of-sequence token does not end it.
        seed: of this request; None leaves the engine free.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a served model says of tokens that another one generated: log softmax of its logits, at temperature 1.

    Attributes:
        logprobs: [N] nats, of the tokens themselves.
        topk_ids: [N][K] its likeliest tokens at each place, likeliest first; () where they were not asked for.
        topk_logprobs: [N][K] nats, of these; () likewise.
        weight_version: of its weights.
    """

    logprobs: tuple[float, ...]
    topk_ids: tuple[tuple[int, ...], ...] = ()
    topk_logprobs: tuple[tuple[float, ...], ...] = ()
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of one engine.

    Attributes:
        token_ids: the generated ids, the stop token included when there was one.
        rollout_logprobs: [len(token_ids)] nats, by the engine: log softmax of logits / temperature over the whole
            vocabulary, before top_p and top_k cut it (SGLang reports these, and the router lets no request through
            that asks for others). Where they meet the trainer's, the trainer takes the log-mass of the kept tokens off
            (engines/megatron/forward.py).
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_version: of the weights that generated it (of its last token, when a sync fell inside).
        num_prompt_tokens: tokens of the request's prompt.
        num_cached_tokens: how many of them the engine's prefix cache held.
        duration_s: wall-clock seconds from request to answer.
        reference, teacher: of the generated ids, where such a model is served; None otherwise.
    """

    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    duration_s: float = 0.0
    reference: TokenScores | None = None
    teacher: TokenScores | None = None

    def __post_init__(self) -> None:
        scores = {name: getattr(self, name) for name in ("reference", "teacher")}
        lengths = {name: len(each.logprobs) for name, each in scores.items() if each is not None}
        _check_aligned(
            "Completion", token_ids=len(self.token_ids), rollout_logprobs=len(self.rollout_logprobs), **lengths
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation and the model's answer to it.

    Attributes:
        observation_ids: tokens the model was shown and did not generate (the prompt in the first turn, a tool's
            answer later); never trained.
        completion: what the model generated next.
    """

    observation_ids: tuple[int, ...]
    completion: Completion


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution for one prompt, all its turns.

    Attributes:
        prompt: what was asked.
        sibling: 0 .. group size - 1; with ``prompt.index`` it names the rollout.
        turns: in order; empty only when status is FAILED or ABORTED.
        text: the last turn's answer, decoded, for verifiers and people.
        status: how it ended.
        reward: set by the reward stage; None before it.
        reason: why it failed or was aborted; empty otherwise.
        reward_parts: named parts of the reward, for metrics.
    """

    prompt: Prompt
    sibling: int
    turns: tuple[Turn, ...]
    text: str
    status: RolloutStatus
    reward: float | None = None
    reason: str = ""
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in order: what was shown and what was generated."""
        return tuple(token for turn in self.turns for token in (*turn.observation_ids, *turn.completion.token_ids))

    @property
    def num_response_tokens(self) -> int:
        """Generated tokens over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling rollouts of one prompt, all rewarded.

    Attributes:
        prompt: the prompt they share.
        rollouts: one or more, ordered by ``sibling``.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if not self.rollouts or any(r.prompt.index != self.prompt.index for r in self.rollouts):
            raise ContractError(
                "types.Group",
                f"the group of prompt {self.prompt.index} is empty or holds another prompt's rollout",
                "build a group from the rollouts of one prompt",
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One flat token sequence ready to train.

    ``token_ids``, ``loss_mask`` and every ``*_logprobs`` are aligned token by token: entry t speaks of token t, and
    entry 0 is never trained (nothing predicts it). Example, prompt ``[5, 6]``, response ``[7, 8]``::

        token_ids        = (5,   6,   7,    8)
        loss_mask        = (0,   0,   1,    1)
        rollout_logprobs = (0.0, 0.0, -0.3, -1.2)

    Attributes:
        token_ids: prompt and response.
        loss_mask: True where the token was generated by the policy and is trained.
        rollout_logprobs: nats; 0.0 where ``loss_mask`` is False. None for samples no engine generated (SFT).
        prompt_index: ``Prompt.index``; samples with the same one belong to one group.
        sibling: ``Rollout.sibling``; samples with the same (prompt_index, sibling) come from one rollout.
        reward: of the rollout.
        weight_version: the oldest that generated a token of it; -1 when no engine did.
        status: of the rollout.
        old_logprobs, ref_logprobs: by the trainer, before the update and by the reference; None until computed.
        advantages: per token; None until computed.
        teacher_logprobs: by the teacher that the policy is distilled from; None without one.
        teacher_topk_ids, teacher_topk_logprobs: [token, K], the teacher's likeliest tokens; None without them.
        staleness: per token, weight versions since it was drawn; None unless the loss weighs it.
        old_values: by the critic before the update: of the state before each token; None without a critic.
        returns: what the critic learns, per token; None without a critic.
        loss_weights: per token; the share of this token in the train step's loss. None until computed.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...] | None
    prompt_index: int
    sibling: int
    reward: float = 0.0
    weight_version: int = -1
    status: RolloutStatus = RolloutStatus.COMPLETED
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_topk_ids: np.ndarray | None = None
    teacher_topk_logprobs: np.ndarray | None = None
    staleness: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    loss_weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        names = ("token_ids", "loss_mask", "rollout_logprobs", *list_optional_arrays(Sample))
        lengths = {name: len(array) for name in names if (array := getattr(self, name)) is not None}
        _check_aligned("Sample", **lengths)
        if self.loss_mask and self.loss_mask[0]:
            raise ContractError(
                "types.Sample.loss_mask", "token 0 is trained but nothing predicts it", "mask the first token"
            )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed samples for one forward pass of one data-parallel rank.

    All arrays but ``cu_seqlens`` have length T = ``cu_seqlens[-1]`` and are aligned to the position that *predicts*:
    entry t speaks of token t + 1 of the same sample, so the last entry of each sample is masked.

    Attributes:
        token_ids: [T] int64.
        position_ids: [T] int64, restarting at 0 in each sample.
        cu_seqlens: [S + 1] int32, where each of the S samples starts; padding samples (all masked) come last.
        target_ids: [T] int64, the next token; 0 where there is none.
        loss_mask: [T] bool.
        loss_weights: [T] float32, see ``Sample.loss_weights``; 0 where masked.
        advantages, staleness, old_values, returns, old_logprobs, rollout_logprobs, ref_logprobs: [T] float32 or None,
            0 where masked.
        teacher_topk_ids, teacher_topk_logprobs: [T, K] int64 and float32 or None, 0 where masked.
        sample_indices: which of the train batch's samples these are, in order; padding has none.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    target_ids: np.ndarray
    loss_mask: np.ndarray
    loss_weights: np.ndarray
    sample_indices: tuple[int, ...]
    advantages: np.ndarray | None = None
    teacher_topk_ids: np.ndarray | None = None
    teacher_topk_logprobs: np.ndarray | None = None
    staleness: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    rollout_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        required = ("token_ids", "position_ids", "target_ids", "loss_mask", "loss_weights")
        names = (*required, *list_optional_arrays(MicroBatch))
        lengths = {name: len(array) for name in names if (array := getattr(self, name)) is not None}
        _check_aligned("MicroBatch", **{"cu_seqlens[-1]": int(self.cu_seqlens[-1])} | lengths)
