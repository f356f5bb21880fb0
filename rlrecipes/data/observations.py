"""What the policy is shown between two of its answers, as token ids. Owns the rule that sampled ids stay as they are.

The policy is trained on the ids that it sampled, so the ids of a turn are all ids before it and the observation's. With
a chat template these are what the template adds behind an answer. A template that rewrites earlier answers (as those do
that take the thinking out) would show the policy something else when it is used than it was trained on, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlrecipes.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WHERE = "rollout.generate.observation_role"
_QUESTION, _ANSWER, _OBSERVATION = "question", "answer", "observation"
_THOUGHT = "<think>\nthought\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class ObservationEncoder:
    """Encodes observations.

    Attributes:
        tokenizer: a transformers tokenizer.
        apply_chat_template: whether they go through its chat template.
        role: theirs, under the chat template.
    """

    tokenizer: PreTrainedTokenizerFast
    apply_chat_template: bool
    role: str

    def check(self) -> None:
        """Look whether the chat template leaves answers as they are, thought before them included.

        Raises:
            ConfigError: it does not, or refuses the role.
        """
        if not self.apply_chat_template:
            return
        start = self._render([])
        for answer in reversed(_list_answers(start)):
            shown = start
            for number in (1, 2):
                expected, shown = shown + answer, self._render([(answer, _OBSERVATION)] * number)
                if not shown.startswith(expected):
                    raise self._rewritten(answer, shown[len(start) :])
            if shown != start + 2 * (answer + self._find_addition(_OBSERVATION)):
                raise self._rewritten(answer, shown[len(start) :])

    def encode(self, text: str, answer_ids: Sequence[int]) -> tuple[int, ...]:
        """What follows an answer's ids, up to where the policy answers again.

        Args:
            text: of the observation.
            answer_ids: the answer before it; the token that ends it is not said twice.

        Raises:
            ValueError: there is nothing in it, or text that the tokenizer does not know.
        """
        tokenizer = self.tokenizer
        added = self._find_addition(text) if self.apply_chat_template else text
        ids: list[int] = tokenizer(added, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise ValueError(f"its observation {text!r} has text that the tokenizer does not know")
        is_end = bool(ids and answer_ids) and ids[0] == answer_ids[-1]
        if is_end and not tokenizer.decode([ids[0]], skip_special_tokens=True):
            ids = ids[1:]
        if not ids:
            raise ValueError("its observation is empty")
        return tuple(ids)

    def _find_addition(self, text: str) -> str:
        """What the template puts behind an answer when an observation follows."""
        start = self._render([])
        answer = _list_answers(start)[-1]
        return self._render([(answer, text)])[len(start + answer) :]

    def _render(self, turns: Sequence[tuple[str, str]]) -> str:
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": _QUESTION}]
        for answer, observation in turns:
            messages += [{"role": "assistant", "content": answer}, {"role": self.role, "content": observation}]
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            problem = f"the chat template refuses messages of {self.role} after an answer: {error}"
            raise ConfigError(_WHERE, problem, "use the other role, or data.apply_chat_template=false") from error
        return text

    def _rewritten(self, answer: str, shown: str) -> ConfigError:
        problem = (
            f"is {self.role}: behind a message of it the chat template does not leave an answer as it was sampled"
            f" ({answer!r} becomes {shown!r})"
        )
        fix = "use the other role, a model whose template keeps earlier answers, or data.apply_chat_template=false"
        return ConfigError(_WHERE, problem, fix)


def _list_answers(start: str) -> list[str]:
    """Answers as a model gives them after the template's opening, with thought before them where it may think."""
    opening = start.rstrip()
    if opening.endswith("<think>"):
        return [_THOUGHT.removeprefix("<think>\n") + _ANSWER]
    return [_ANSWER] if opening.endswith("</think>") else [_ANSWER, _THOUGHT + _ANSWER]
