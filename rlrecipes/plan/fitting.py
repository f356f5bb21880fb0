"""Constants of the step-time model fitted to what runs measured. Owns which metric identifies which constants.

Every constant is fitted in its logarithm, to the logarithms of measured over predicted times. One that hardly moves
what was measured, or moves it as another does, is kept and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

from rlrecipes.plan.least_squares import choose_constants, solve_constants
from rlrecipes.plan.lengths import LengthDistribution
from rlrecipes.plan.rollout_time import compute_distribution, compute_rollout_time
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.sync_time import compute_checkpoint_time, compute_sync_time
from rlrecipes.plan.time_constants import TimeConstants
from rlrecipes.plan.train_time import compute_train_time

METRICS = {
    "rollout_s": "rollout/time_s",
    "longest_tokens_per_s": "rollout/longest_tokens_per_s",
    "logprobs_s": "time/logprobs_s",
    "train_s": "train/time_s",
    "weight_sync_s": "weight_sync/time_s",
    "checkpoint_s": "time/checkpoint_s",
}
"""What is predicted -> the metric that measures it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a run's prompts and answers were, means over its steps.

    Attributes:
        prompt_tokens: mean of a prompt.
        mean_tokens: of an answer.
        max_tokens: longest answer of a step.
        truncated_fraction: answers cut at the limit.
        num_rollouts: of a step.
    """

    prompt_tokens: float
    mean_tokens: float
    max_tokens: float
    truncated_fraction: float
    num_rollouts: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run measured.

    Attributes:
        name: of the run.
        inputs: of its steps; None where no GPU is described or others ran the engines.
        observed: key of ``METRICS`` -> median over its steps.
        lengths: of its rollouts; None where it had none.
        max_new_tokens: limit of an answer.
        max_prompt_tokens: limit of a prompt.
    """

    name: str
    inputs: StepInputs | None
    observed: Mapping[str, float]
    lengths: Lengths | None
    max_new_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Residual:
    """One observation before and after the fit; seconds, or tokens a second."""

    run: str
    name: str
    measured: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of it.

    Attributes:
        constants: old ones with the fitted in their place.
        fitted: names of those, in order.
        kept: name -> why it was not fitted.
        residuals: of every observation.
    """

    constants: TimeConstants
    fitted: tuple[str, ...]
    kept: Mapping[str, str]
    residuals: tuple[Residual, ...]


type Prediction = Callable[[StepInputs, TimeConstants], Mapping[str, float]]


def _predict_rollout(inputs: StepInputs, constants: TimeConstants) -> dict[str, float]:
    rollout = compute_rollout_time(inputs, constants)
    return {"rollout_s": rollout.duration_s, "longest_tokens_per_s": rollout.longest_tokens_per_s}


def _predict_train(inputs: StepInputs, constants: TimeConstants) -> dict[str, float]:
    train = compute_train_time(inputs, constants, compute_distribution(inputs, constants))
    return {"logprobs_s": train.logprobs_s, "train_s": train.train_s}


def _predict_sync(inputs: StepInputs, constants: TimeConstants) -> dict[str, float]:
    return {"weight_sync_s": sum(compute_sync_time(inputs, constants).values())}


def _predict_checkpoint(inputs: StepInputs, constants: TimeConstants) -> dict[str, float]:
    return {"checkpoint_s": compute_checkpoint_time(inputs, constants)}


PARTS: tuple[tuple[Prediction, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        _predict_rollout,
        ("rollout_s", "longest_tokens_per_s"),
        ("decode_bandwidth_fraction", "decode_step_s", "decode_request_s"),
    ),
    (_predict_train, ("train_s", "logprobs_s"), ("train_flops_fraction", "layer_launch_s")),
    (_predict_sync, ("weight_sync_s",), ("checksum_bytes_per_s", "sync_bucket_s", "sync_link_fraction")),
    (_predict_checkpoint, ("checkpoint_s",), ("disk_bytes_per_s",)),
)
"""How observations are predicted, which, and the constants that they may tell of."""


def fit_lengths(lengths: Lengths, max_new_tokens: int) -> LengthDistribution:
    """The log-normal with a run's mean length, and its share of cut answers or, where none is cut, its longest one.

    Args:
        lengths: measured.
        max_new_tokens: where answers were cut.
    """
    normal = NormalDist()
    if lengths.truncated_fraction > 1 / max(lengths.num_rollouts, 2):
        anchor, quantile = float(max_new_tokens), 1 - min(lengths.truncated_fraction, 1 - 1e-6)
    else:
        anchor, quantile = lengths.max_tokens, 1 - 0.5 / max(lengths.num_rollouts, 2)
    z = normal.inv_cdf(quantile)
    low, high = 0.0, 4.0
    found = LengthDistribution(lengths.mean_tokens, 0.0, max_new_tokens, max(1, round(lengths.prompt_tokens)))
    for _ in range(60):  # the mean falls as sigma rises, the anchor being held
        sigma = (low + high) / 2
        found = replace(found, median_tokens=anchor * math.exp(-sigma * z), sigma=sigma)
        low, high = (sigma, high) if found.mean_tokens > lengths.mean_tokens else (low, sigma)
    return found


def fit(measurements: Sequence[Measurement], constants: TimeConstants) -> Fit:
    """Fit whatever the runs tell of.

    Args:
        measurements: of at least one run.
        constants: to start from; what is not fitted stays.
    """
    fitted: list[str] = []
    kept: dict[str, str] = {}
    own = {m.name: _with_lengths(m, constants) for m in measurements}
    new, names = _fit_lengths(measurements, constants)
    fitted += names
    for predict, observed, candidates in PARTS:
        part = _Part(measurements, own, predict, observed)
        chosen = part.choose(candidates, new)
        kept |= {name: part.explain(name) for name in candidates if name not in chosen}
        new = part.solve(chosen, new)
        fitted += chosen
    residuals = [
        residual
        for predict, observed, _ in PARTS
        for residual in _Part(measurements, own, predict, observed).compare(constants, new)
    ]
    return Fit(new, tuple(fitted), kept, tuple(residuals))


def _with_lengths(measurement: Measurement, constants: TimeConstants) -> TimeConstants:
    """The constants with a run's own lengths in their place."""
    if measurement.lengths is None:
        return constants
    found = fit_lengths(measurement.lengths, measurement.max_new_tokens)
    return replace(
        constants,
        response_median_fraction=found.median_tokens / measurement.max_new_tokens,
        response_sigma=found.sigma,
        prompt_fraction=measurement.lengths.prompt_tokens / measurement.max_prompt_tokens,
    )


_LENGTHS = ("response_median_fraction", "response_sigma", "prompt_fraction")


def _fit_lengths(
    measurements: Sequence[Measurement], constants: TimeConstants
) -> tuple[TimeConstants, tuple[str, ...]]:
    """Means over the runs that had rollouts, each as heavy as its steps are."""
    own = [(_with_lengths(m, constants), m.lengths.num_rollouts) for m in measurements if m.lengths is not None]
    if not own:
        return constants, ()
    weights = [weight for _, weight in own]
    means = {name: fmean((getattr(one, name) for one, _ in own), weights) for name in _LENGTHS}
    return replace(constants, **means), _LENGTHS


class _Part:
    """Observations of one kind over all runs."""

    def __init__(
        self,
        measurements: Sequence[Measurement],
        own: Mapping[str, TimeConstants],
        predict: Prediction,
        observed: Sequence[str],
    ) -> None:
        self._predict = predict
        self._runs = [(m, m.inputs, own[m.name]) for m in measurements if m.inputs is not None]
        self._seen = [
            (m.name, name, m.observed[name])
            for m, inputs, constants in self._runs
            for name, value in predict(inputs, constants).items()
            if name in observed and value > 0 and m.observed.get(name, 0.0) > 0
        ]

    def _log_predictions(self, constants: TimeConstants) -> list[float]:
        values: dict[tuple[str, str], float] = {}
        for measurement, inputs, own in self._runs:
            lengths = {name: getattr(own, name) for name in _LENGTHS}
            for name, value in self._predict(inputs, replace(constants, **lengths)).items():
                values[measurement.name, name] = value
        return [math.log(values[run, name]) for run, name, _ in self._seen]

    def choose(self, candidates: Sequence[str], constants: TimeConstants) -> list[str]:
        """Constants that the observations tell apart, those that move them most first."""
        values = {name: getattr(constants, name) for name in candidates}
        return choose_constants(lambda changes: self._log_predictions(replace(constants, **changes)), values)

    def explain(self, name: str) -> str:
        """Why a constant was kept."""
        if not self._seen:
            return "no run measured what it is part of"
        return "what was measured does not tell it from the others"

    def solve(self, names: Sequence[str], constants: TimeConstants) -> TimeConstants:
        """The constants with these fitted."""
        values = {name: getattr(constants, name) for name in names}
        measured = [math.log(value) for _, _, value in self._seen]
        found = solve_constants(lambda changes: self._log_predictions(replace(constants, **changes)), values, measured)
        return replace(constants, **found)

    def compare(self, before: TimeConstants, after: TimeConstants) -> list[Residual]:
        """Every observation with both predictions."""
        old, new = self._log_predictions(before), self._log_predictions(after)
        return [
            Residual(run, name, value, math.exp(b), math.exp(a))
            for (run, name, value), b, a in zip(self._seen, old, new, strict=True)
        ]
