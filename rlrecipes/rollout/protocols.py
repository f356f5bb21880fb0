"""What rollout needs of its neighbours. Owns these shapes only; the rooms that fill them do not know this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlrecipes.types import Completion, Group, Prompt, Rollout, SamplingParams, TokenScores


class GenerateClient(Protocol):
    """The way to the engines of one model (``engines/sglang/serving.py``)."""

    async def generate(
        self,
        *,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        routing_key: str | None,
    ) -> Completion:
        """Generate one answer.

        Args:
            input_ids: the prompt.
            sampling: how to sample; its ``seed`` is this request's.
            request_id: names the request in the engine's logs.
            routing_key: requests with the same key go to one engine where the router can.

        Raises:
            EngineError: no engine answered, or not as it should.
        """


class ScoreClient(Protocol):
    """The way to the engines of a model that judges tokens (``engines/sglang/serving.py``)."""

    async def score(
        self, *, input_ids: Sequence[int], start: int, num_top: int, request_id: str, routing_key: str | None
    ) -> TokenScores:
        """What the model says of ``input_ids[start:]``.

        Args:
            input_ids: all tokens, context first.
            start: first token that is scored, at least 1.
            num_top: likeliest tokens to name at each place; 0 for none.
            request_id: names the request in the engine's logs.
            routing_key: requests with the same key go to one engine where the router can.

        Raises:
            EngineError: no engine answered, or not as it should.
        """


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that rollout uses."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""


class ObservationEncoder(Protocol):
    """Observations as token ids (``data/observations.py``)."""

    def check(self) -> None:
        """Find out whether sampled ids can stay as they are; told before anything starts.

        Raises:
            ConfigError: they cannot.
        """

    def encode(self, text: str, answer_ids: Sequence[int]) -> tuple[int, ...]:
        """What follows an answer's ids when a text is shown to the policy, up to where it answers again.

        Args:
            text: of the observation.
            answer_ids: the answer before it.

        Raises:
            ValueError: the text cannot be shown.
        """


class GenerateFunction(Protocol):
    """Runs one rollout, all its turns."""

    async def __call__(self, prompt: Prompt, sibling: int) -> Rollout:
        """Run one rollout; what goes wrong in it is data (status FAILED and a reason), never an exception."""


class PromptSource(Protocol):
    """An endless stream of prompts (``data/jsonl.py``)."""

    def prompt(self, index: int) -> Prompt:
        """Prompt at a position; a pure function of it."""


class Reward(Protocol):
    """Rewards rollouts (``rewards/verifier_reward.py``)."""

    async def reward_group(self, group: Group) -> Group:
        """The same rollouts in the same order, each with a reward."""


class GroupBuffer(Protocol):
    """A bounded queue of groups that survives a restart (``data/buffer.py``)."""

    max_groups: int

    def __len__(self) -> int: ...

    def put(self, group: Group) -> None:
        """Append a group."""

    def take(self, num_groups: int) -> list[Group]:
        """Remove the oldest groups, which stay in ``state()`` until ``confirm_trained()``."""

    def confirm_trained(self) -> None:
        """Forget the groups taken."""

    def state(self) -> dict[str, Any]:
        """All groups not yet trained, as JSON-able data."""

    def restore(self, state: dict[str, Any]) -> None:
        """Replace the content by what ``state()`` gave."""
