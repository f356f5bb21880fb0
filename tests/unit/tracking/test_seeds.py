import math
import random
import statistics

import pytest
from scipy import stats

from rlrecipes.tracking.seeds import summarise


def test_worked_by_hand():
    summary = summarise([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0])
    assert summary.mean == pytest.approx(15.125)
    assert summary.interquartile_mean == 3.5, "of 2, 3, 4, 5: a quarter is left out at each end"
    assert summary.low < summary.mean < summary.high and summary.low >= 0.0 and summary.high <= 100.0


def test_fewer_than_four_seeds_lose_none():
    assert summarise([0.1, 0.2, 0.9]).interquartile_mean == pytest.approx(0.4)
    assert summarise([0.1, 0.2, 0.3, 0.9]).interquartile_mean == pytest.approx(0.25)


def test_one_seed_has_no_interval_and_none_no_summary():
    one = summarise([0.5, math.nan, math.inf])
    assert (one.values, one.mean, one.low, one.high, one.interquartile_mean) == ((0.5,), 0.5, None, None, 0.5)
    assert summarise([]) is None and summarise([math.nan]) is None


def test_equal_seeds_have_an_interval_without_width():
    equal = summarise([0.5, 0.5, 0.5])
    assert (equal.mean, equal.low, equal.high) == (0.5, 0.5, 0.5)


def test_the_interval_is_the_same_each_time_and_near_the_one_of_theory():
    source = random.Random(3)
    values = [source.gauss(2.0, 1.0) for _ in range(200)]
    summary = summarise(values)
    assert summary == summarise(values)
    half = stats.t.ppf(0.975, 199) * statistics.stdev(values) / math.sqrt(200)
    assert summary.high - summary.low == pytest.approx(2 * half, rel=0.05)
    assert (summary.high + summary.low) / 2 == pytest.approx(summary.mean, abs=0.02)
