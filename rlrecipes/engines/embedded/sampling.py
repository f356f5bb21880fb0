"""How the next token is drawn. Owns the checks on sampling parameters and the draw; refuses to know of requests.

Randomness is counted, not drawn from a stream: the uniform number of a draw is a hash of the request's seed and the
token's position, so a request's tokens do not depend on what else is sampled, nor on retraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

TOP_K_ALL = 1 << 30
GREEDY_TEMPERATURE = 1e-6
"""Below it SGLang samples greedily."""


class MalformedParameterError(TypeError):
    """A parameter has a name or a type that SGLang answers with status 500."""


@dataclass(slots=True)
class SamplingParameters:
    """The sampling parameters of one request under SGLang's names; None stands for the default where SGLang allows it.

    Attributes:
        max_new_tokens: None for as many as fit.
        top_k: 1 is greedy; ``TOP_K_ALL`` keeps all.
        stop: strings that end the answer.
        sampling_seed: None leaves the engine free.
    """

    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stop_regex: None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether logits change before sampling."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.min_new_tokens
            or self.logit_bias
        )


_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed", "stream_interval")
_UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag")
_NAMES = frozenset(field.name for field in fields(SamplingParameters))


def parse_sampling_parameters(raw: object, vocab_size: int) -> SamplingParameters:
    """Read a request's ``sampling_params``.

    Args:
        raw: the JSON value.
        vocab_size: bounds ``logit_bias``.

    Raises:
        MalformedParameterError: not an object, an unknown key, or a value of the wrong type.
        ValueError: a value out of range, or a feature the engine lacks; the text is SGLang's.
    """
    if not isinstance(raw, dict):
        raise MalformedParameterError(f"sampling_params must be an object, got {raw!r}")
    for key in raw.keys() - _NAMES:
        raise MalformedParameterError(f"Unexpected keyword argument {key!r}")
    given = {key: value for key, value in raw.items() if value is not None or key == "max_new_tokens"}
    _check_types(given)
    for key in _UNSUPPORTED:
        if given.pop(key, None):
            raise ValueError(f"{key} is not supported by the embedded engine")
    given["stop"] = _to_strings(given.get("stop", ()))
    given["stop_token_ids"] = _to_token_ids(given.get("stop_token_ids", ()))
    parameters = SamplingParameters(**given)
    _check_ranges(parameters, vocab_size)
    if parameters.temperature < GREEDY_TEMPERATURE:
        parameters.top_k = 1
    if parameters.top_k == 1:
        # SGLang reports a greedy request's logprobs at temperature 1
        parameters.temperature = 1.0
    return parameters


def _check_types(given: dict[str, Any]) -> None:
    for key in _NUMBERS:
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int | float)):
            raise MalformedParameterError(f"{key} must be a number, got {given[key]!r}")
    for key in _INTEGERS:
        if given.get(key) is not None and (isinstance(given[key], bool) or not isinstance(given[key], int)):
            raise MalformedParameterError(f"{key} must be an integer, got {given[key]!r}")


def _to_strings(value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        raise MalformedParameterError(f"stop must be a string or a list of strings, got {value!r}")
    return tuple(item for item in values if item)


def _to_token_ids(value: object) -> frozenset[int]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, int | None) for item in value):
        raise MalformedParameterError(f"stop_token_ids must be a list of integers, got {value!r}")
    return frozenset(item for item in value if item is not None)


def _check_ranges(parameters: SamplingParameters, vocab_size: int) -> None:
    p = parameters
    top_k = TOP_K_ALL if p.top_k == -1 or 0 <= p.temperature < GREEDY_TEMPERATURE else p.top_k
    p.top_k = top_k
    checks = (
        (
            math.isfinite(p.temperature) and p.temperature >= 0.0,
            "temperature must be a non-negative finite number",
            p.temperature,
        ),
        (0.0 < p.top_p <= 1.0, "top_p must be in (0, 1]", p.top_p),
        (0.0 <= p.min_p <= 1.0, "min_p must be in [0, 1]", p.min_p),
        (top_k >= 1, "top_k must be -1 (disable) or at least 1", top_k),
        (-2.0 <= p.frequency_penalty <= 2.0, "frequency_penalty must be in [-2, 2]", p.frequency_penalty),
        (-2.0 <= p.presence_penalty <= 2.0, "presence_penalty must be in [-2, 2]", p.presence_penalty),
        (
            0.0 < p.repetition_penalty <= 2.0,
            "repetition_penalty must be in (0, 2] (1.0 = no penalty)",
            p.repetition_penalty,
        ),
        (p.min_new_tokens >= 0, "min_new_tokens must be in [0, max_new_tokens]", p.min_new_tokens),
    )
    for is_right, message, value in checks:
        if not is_right:
            raise ValueError(f"{message}, got {value}.")
    if p.max_new_tokens is not None:
        if p.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {p.max_new_tokens}.")
        if p.min_new_tokens > p.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}."
            )
    for token in p.logit_bias or ():
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.")


_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def compute_hash[T: (int, np.ndarray)](values: T) -> T:
    """Scramble uint64 values, one or an array: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values + _GOLDEN) & _MASK
    values = ((values ^ (values >> 30)) * _MIX1) & _MASK
    values = ((values ^ (values >> 27)) * _MIX2) & _MASK
    return values ^ (values >> 31)


def to_stream_seed(seed: int, sibling: int) -> int:
    """Give the seed of one of the ``n`` answers of a request; uint64."""
    return compute_hash((compute_hash(seed & _MASK) + sibling) & _MASK)


def compute_uniforms(stream_seeds: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """Give one number in [0, 1) for each (seed, position).

    Args:
        stream_seeds: [N] uint64.
        positions: [N] int64, of the token to draw.

    Returns:
        [N] float64 in steps of 2^-40.
    """
    bits = compute_hash(stream_seeds ^ compute_hash(positions.astype(np.uint64))) >> 24
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-40)


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw for N rows.

    Attributes:
        temperatures, top_ps, min_ps: [N] float32.
        top_ks: [N] int64; 1 is greedy.
        uniforms: [N] float64 in [0, 1).
        greedy_rows, filtered_rows: int64, rows without chance, and rows with chance and a filter.
    """

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    uniforms: torch.Tensor
    greedy_rows: torch.Tensor
    filtered_rows: torch.Tensor


def build_draw(
    temperatures: np.ndarray,
    top_ps: np.ndarray,
    min_ps: np.ndarray,
    top_ks: np.ndarray,
    uniforms: torch.Tensor,
) -> Draw:
    """Sort rows by what they need; arrays as in ``Draw``."""
    is_greedy = top_ks == 1
    is_filtered = ~is_greedy & ((top_ks < TOP_K_ALL) | (top_ps < 1.0) | (min_ps > 0.0))
    return Draw(
        torch.from_numpy(temperatures),
        torch.from_numpy(top_ps),
        torch.from_numpy(min_ps),
        torch.from_numpy(top_ks),
        uniforms,
        torch.from_numpy(np.flatnonzero(is_greedy)),
        torch.from_numpy(np.flatnonzero(is_filtered)),
    )


def sample(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        logits: [N, vocab] float32.
        draw: how.

    Returns:
        token ids [N] int64, and the logits divided by temperature, whose log-softmax is what SGLang reports: top-k,
        top-p and min-p shape the draw, not the reported logprobs.
    """
    if len(draw.greedy_rows) == len(logits):
        return logits.argmax(dim=-1), logits
    scaled = logits / draw.temperatures.unsqueeze(1)
    probabilities = torch.softmax(scaled, dim=-1)
    if len(draw.filtered_rows) == len(logits):
        return _sample_filtered(probabilities, draw, draw.filtered_rows), scaled
    tokens = _invert(probabilities, draw.uniforms)
    if len(draw.filtered_rows):
        tokens[draw.filtered_rows] = _sample_filtered(probabilities[draw.filtered_rows], draw, draw.filtered_rows)
    if len(draw.greedy_rows):
        tokens[draw.greedy_rows] = logits[draw.greedy_rows].argmax(dim=-1)
    return tokens, scaled


def _invert(masses: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Find where the running sum of non-negative masses [N, K] passes ``uniforms`` of its total; [N] int64."""
    running = masses.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms * running[:, -1]
    picks = torch.searchsorted(running, targets.unsqueeze(1), right=True).squeeze(1)
    return picks.clamp_(max=masses.shape[1] - 1)


def _sample_filtered(probabilities: torch.Tensor, draw: Draw, rows: torch.Tensor) -> torch.Tensor:
    """Keep the ``top_k`` first, those before whom at most ``top_p`` lies, and those over ``min_p`` of the first.

    Only the masses are sorted, by numpy, which is twenty times faster than sorting tokens along; the token is then the
    one with the drawn mass (of equal ones, by id). Rows of NaN, from broken weights, draw the last token.
    """
    probabilities = probabilities.nan_to_num()
    masses = torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)
    before = masses.cumsum(dim=-1, dtype=torch.float64) - masses
    keep = torch.arange(masses.shape[1]).unsqueeze(0) < draw.top_ks[rows].unsqueeze(1)
    keep &= before <= draw.top_ps[rows].unsqueeze(1)
    keep &= masses >= masses[:, :1] * draw.min_ps[rows].unsqueeze(1)
    ranks = _invert(masses * keep, draw.uniforms[rows]).unsqueeze(1)
    drawn = masses.gather(1, ranks)
    places_among_equals = ranks.squeeze(1) - (masses > drawn).sum(dim=-1)
    owners, tokens = (probabilities == drawn).nonzero(as_tuple=True)
    starts = torch.searchsorted(owners, torch.arange(len(rows)))
    return tokens[starts + places_among_equals]


def apply_penalties(
    logits: torch.Tensor, parameters: SamplingParameters, output_ids: Sequence[int], end_ids: frozenset[int]
) -> None:
    """Change one row of logits [vocab] in place, as SGLang does: penalties over generated tokens only.

    Args:
        logits: of one row.
        parameters: its request's.
        output_ids: what it generated so far.
        end_ids: tokens that may not come before ``min_new_tokens``.
    """
    p = parameters
    if output_ids and (p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0):
        ids, counts = torch.unique(torch.tensor(output_ids), return_counts=True)
        penalised = logits[ids] - p.frequency_penalty * counts - p.presence_penalty
        factor = p.repetition_penalty
        logits[ids] = torch.where(penalised < 0, penalised * factor, penalised / factor)
    if len(output_ids) < p.min_new_tokens:
        ends = [token for token in end_ids | p.stop_token_ids if 0 <= token < len(logits)]
        logits[ends] = -math.inf
    for token, bias in (p.logit_bias or {}).items():
        logits[int(token)] += bias
