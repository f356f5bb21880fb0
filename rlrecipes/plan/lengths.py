"""How long prompts and answers are assumed to be: a seeded draw with a long tail. Owns the distribution."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths of answers, cut at a limit, after prompts of one length.

    Attributes:
        median_tokens: of an answer that nothing cuts.
        sigma: standard deviation of the logarithm.
        max_tokens: where answers are cut.
        prompt_tokens: of every prompt.
    """

    median_tokens: float
    sigma: float
    max_tokens: int
    prompt_tokens: int

    @property
    def truncated_fraction(self) -> float:
        """Share of answers that reach the limit."""
        if self.sigma == 0:
            return float(self.median_tokens >= self.max_tokens)
        return 1 - _normal_cdf(math.log(self.max_tokens / self.median_tokens) / self.sigma)

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer, the cut ones at the limit."""
        if self.sigma == 0:
            return min(self.median_tokens, float(self.max_tokens))
        limit = math.log(self.max_tokens / self.median_tokens) / self.sigma
        uncut = self.median_tokens * math.exp(self.sigma**2 / 2) * _normal_cdf(limit - self.sigma)
        return uncut + self.max_tokens * self.truncated_fraction


def _normal_cdf(value: float) -> float:
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


@functools.lru_cache(maxsize=64)
def draw_lengths(distribution: LengthDistribution, num: int, seed: int) -> tuple[int, ...]:
    """Lengths of so many answers, in an order that means nothing.

    They are the distribution's quantiles at (i + 1/2) / num, shuffled by the seed: a batch is as long as one expects,
    and the seed decides only which engine gets which answers.

    Args:
        distribution: what is drawn from.
        num: answers.
        seed: of the order.

    Returns:
        [num] tokens, each 1 to ``max_tokens``.
    """
    median, sigma, limit = distribution.median_tokens, distribution.sigma, distribution.max_tokens
    quantile = _standard_quantiles(num)
    lengths = [max(1, min(limit, round(median * math.exp(sigma * z)))) for z in quantile]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


@functools.lru_cache(maxsize=16)
def _standard_quantiles(num: int) -> Sequence[float]:
    from statistics import NormalDist

    normal = NormalDist()
    return [normal.inv_cdf((i + 0.5) / num) for i in range(num)]
