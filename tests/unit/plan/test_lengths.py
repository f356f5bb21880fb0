"""Assumed lengths: moments by an independent draw, seeds decide the order alone."""

from __future__ import annotations

import random

import pytest

from rlrecipes.plan.lengths import LengthDistribution, draw_lengths


@pytest.mark.parametrize(("median", "sigma", "limit"), [(2048, 0.8, 8192), (100, 0.3, 4096), (5000, 1.2, 4096)])
def test_mean_and_truncation_are_those_of_a_clipped_log_normal(median, sigma, limit):
    distribution = LengthDistribution(median, sigma, limit, 1)
    draw = random.Random(0)
    sample = [min(limit, median * draw.lognormvariate(0, sigma)) for _ in range(200_000)]
    assert distribution.mean_tokens == pytest.approx(sum(sample) / len(sample), rel=0.01)
    cut = sum(tokens == limit for tokens in sample) / len(sample)
    assert distribution.truncated_fraction == pytest.approx(cut, abs=0.004)
    lengths = draw_lengths(distribution, 4096, seed=3)
    assert sum(lengths) / len(lengths) == pytest.approx(distribution.mean_tokens, rel=0.01)
    assert 1 <= min(lengths) <= max(lengths) <= limit


def test_the_seed_shuffles_and_no_more():
    distribution = LengthDistribution(50, 0.8, 400, 1)
    first, again, other = (draw_lengths(distribution, 256, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_without_spread_every_answer_has_the_median():
    distribution = LengthDistribution(50, 0.0, 400, 1)
    assert set(draw_lengths(distribution, 8, 0)) == {50}
    assert (distribution.mean_tokens, distribution.truncated_fraction) == (50, 0)
