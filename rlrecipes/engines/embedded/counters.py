"""What the scheduler counts for /v1/loads. Owns the sums; refuses to look at requests."""

from __future__ import annotations

import time
from typing import Any

THROUGHPUT_WINDOW_S = 1.0


class Counters:
    """Sums since the start, under the names of SGLang's load report."""

    def __init__(self) -> None:
        self._num_generated = 0
        self._mark = (time.perf_counter(), 0)
        self._throughput = 0.0
        self._hit_fraction = 0.0
        self._num_uncached = 0
        self._prefill_busy_us = 0
        self._decode_moments = [0.0] * 6

    def count_generated(self, num_tokens: int) -> None:
        """Count sampled tokens."""
        self._num_generated += num_tokens
        since_s, at = self._mark
        elapsed_s = time.perf_counter() - since_s
        if elapsed_s > THROUGHPUT_WINDOW_S:
            self._throughput = (self._num_generated - at) / elapsed_s
            self._mark = (time.perf_counter(), self._num_generated)

    def count_admitted(self, num_new: int, num_cached: int) -> None:
        """Count a request that got memory: tokens to compute and tokens found in the prefix cache."""
        self._num_uncached += num_new
        self._hit_fraction = num_cached / (num_new + num_cached)

    def count_step(self, is_decode: bool, num_rows: int, duration_s: float) -> None:
        """Count a step; of decode steps the sums that a line through (rows, duration) needs."""
        duration_us = int(duration_s * 1e6)
        if not is_decode:
            self._prefill_busy_us += duration_us
            return
        terms = (1, num_rows, duration_us, num_rows * num_rows, num_rows * duration_us, num_rows)
        self._decode_moments = [total + term for total, term in zip(self._decode_moments, terms, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Give the sums."""
        return {
            "gen_throughput": round(self._throughput, 2),
            "cache_hit_rate": round(self._hit_fraction, 4),
            "utilization": 0.0,  # of a limit that SGLang has no setting for
            "total_prefill_uncached_tokens": self._num_uncached,
            "total_prefill_busy_us": self._prefill_busy_us,
            "decode_moments": self._decode_moments if self._decode_moments[0] else None,
        }
