"""Constants of the memory model fitted to what was measured on GPUs. Owns what is compared with what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlrecipes.plan.least_squares import choose_constants, solve_constants
from rlrecipes.plan.memory import compute_memory
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.memory_nodes import Phase
from rlrecipes.plan.step_inputs import StepInputs

type Owner = Literal["trainer", "engine", "both"]
"""Whose memory an observation is: with both, of a GPU that they share."""
type Moment = Literal["context"] | Phase
"""A phase; or a process that has touched its GPU and no more."""


@dataclass(frozen=True, slots=True)
class MemoryObservation:
    """The most that one GPU held."""

    phase: Moment
    owner: Owner
    num_bytes: float


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """What one run measured.

    Attributes:
        name: of the run.
        inputs: of its steps.
        observed: in any order.
    """

    name: str
    inputs: StepInputs
    observed: tuple[MemoryObservation, ...]


@dataclass(frozen=True, slots=True)
class MemoryResidual:
    """One observation and its predictions, in bytes."""

    run: str
    phase: Moment
    owner: Owner
    measured: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """What came of it.

    Attributes:
        constants: old ones with the fitted in their place.
        fitted: names of those, in order.
        residuals: of every observation.
    """

    constants: MemoryConstants
    fitted: tuple[str, ...]
    residuals: tuple[MemoryResidual, ...]


def predict_memory(
    inputs: StepInputs, constants: MemoryConstants, observed: Sequence[MemoryObservation]
) -> list[float]:
    """What the model says of observations of one run, in bytes: of the GPUs with a trainer, or of an engine alone.

    Args:
        inputs: of the run.
        constants: of the model.
        observed: what is asked for.

    Raises:
        ValueError: the run has nothing of the kind.
    """
    roles = compute_memory(inputs, constants).roles
    found = []
    for one in observed:
        if one.phase == "context":
            found.append(constants.cuda_context_bytes)
            continue
        owners = ("trainer", "engine") if one.owner == "both" else (one.owner,)
        parts = [
            sum(value for name, value in role.parts[one.phase].items() if name.startswith(owners))
            for role in roles
            if all(any(name.startswith(owner) for name in role.parts[one.phase]) for owner in owners)
        ]
        if not parts:
            raise ValueError(f"no GPU of the run holds {one.owner} in phase {one.phase}")
        found.append(float(parts[0]))
    return found


def fit_memory(measurements: Sequence[MemoryMeasurement], constants: MemoryConstants) -> MemoryFit:
    """Fit whatever the runs tell of, to the logarithms of measured over predicted bytes.

    Args:
        measurements: of at least one run.
        constants: to start from; what is not fitted stays.
    """
    measured = [math.log(one.num_bytes) for run in measurements for one in run.observed]

    def predict(changes: Mapping[str, float]) -> list[float]:
        tried = replace(constants, **changes)
        return [math.log(value) for run in measurements for value in predict_memory(run.inputs, tried, run.observed)]

    candidates = dataclasses.asdict(constants)
    chosen = choose_constants(predict, candidates)
    found = replace(constants, **solve_constants(predict, {name: candidates[name] for name in chosen}, measured))
    residuals = (
        MemoryResidual(run.name, one.phase, one.owner, one.num_bytes, before, after)
        for run in measurements
        for one, before, after in zip(
            run.observed,
            predict_memory(run.inputs, constants, run.observed),
            predict_memory(run.inputs, found, run.observed),
            strict=True,
        )
    )
    return MemoryFit(found, tuple(chosen), tuple(residuals))
