"""Math answers by value. Owns what counts as the same number; refuses algebra."""

from __future__ import annotations

import re
from fractions import Fraction

from rlrecipes.rewards.extraction import Extraction, check_extraction, extract_answer
from rlrecipes.rewards.verifiers import Verifier
from rlrecipes.types import Rollout

_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")


def build_math_verifier(*, extraction: Extraction = "last_boxed", marker: str = "") -> Verifier:
    """Build a verifier giving 1.0 when the answer equals the label, as a number or else as normalised text.

    Args:
        extraction: where the answer stands in the response.
        marker: for ``after_marker``.

    Raises:
        ConfigError: a bad option.
    """
    check_extraction(extraction, marker)

    def verify(rollout: Rollout) -> float:
        if rollout.prompt.label is None:
            raise ValueError("the prompt has no label")
        answer = extract_answer(rollout.text, extraction=extraction, marker=marker)
        return float(answer is not None and is_same_answer(answer, rollout.prompt.label))

    return verify


def is_same_answer(answer: str, label: str) -> bool:
    """Whether two answers are the same number, exactly, or the same text once normalised.

    Args:
        answer: the model's.
        label: the right one.
    """
    answer, label = _normalise(answer), _normalise(label)
    if answer == label:
        return True
    answer_number, label_number = _to_number(answer), _to_number(label)
    return answer_number is not None and answer_number == label_number


def _normalise(text: str) -> str:
    text = re.sub(r"\\left|\\right|\\[!,;: ]|\\?\$|\s", "", text)
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    return _THOUSANDS.sub("", text).replace("\\%", "%").rstrip(".").lower()


def _to_number(text: str) -> Fraction | None:
    is_percent = text.endswith("%")
    # Fraction would spend minutes on 1e999999999, and no label is that long.
    if len(text) > 64 or re.search(r"e[+-]?\d{4}", text):
        return None
    try:
        number = Fraction(text.removesuffix("%"))
    except (ValueError, ZeroDivisionError):
        return None
    return number / 100 if is_percent else number
