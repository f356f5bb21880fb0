"""What several seeds say together: mean, interval and interquartile mean. Owns the statistics; knows no runs.

Point estimates of few runs mislead; intervals over seeds and the interquartile mean are what Agarwal et al. 2021 (Deep
Reinforcement Learning at the Edge of the Statistical Precipice, arXiv 2108.13264, section 4) put in their place. They
resample within each task; a metric here is one task, so seeds alone are resampled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
NUM_RESAMPLES = 5000
"""The interval's ends then move by less than the second digit that people read."""
TRIMMED_FRACTION = 0.25
"""Of the seeds, from each end, before the interquartile mean; fewer than four seeds lose none."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One number of each seed, and what they say together.

    Attributes:
        values: one a seed; not-a-number and infinities are left out.
        mean: of the values.
        low, high: 95% interval of the mean, by the percentile bootstrap; None of one seed, which tells of no other.
        interquartile_mean: of the values between the quartiles.
    """

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    interquartile_mean: float


def summarise(values: Sequence[float]) -> Summary | None:
    """Summarise one number of each seed.

    Args:
        values: one a seed, in any order.

    Returns:
        The summary; None where no value is finite. The same values give the same interval: the bootstrap is seeded.
    """
    finite = tuple(value for value in values if math.isfinite(value))
    if not finite:
        return None
    if len(finite) == 1:
        return Summary(finite, finite[0], None, None, finite[0])
    import numpy as np
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal values have an interval without width, which is right
        found = stats.bootstrap(
            (np.asarray(finite),),
            np.mean,
            n_resamples=NUM_RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    return Summary(
        finite,
        float(np.mean(finite)),
        float(found.confidence_interval.low),
        float(found.confidence_interval.high),
        float(stats.trim_mean(finite, TRIMMED_FRACTION)),
    )
