"""Constants fitted in their logarithms to those of what was measured. Owns which are told apart, and the solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

type LogPredictions = Callable[[Mapping[str, float]], list[float]]
"""Constant -> value, to the logarithms of the predictions; constants that are not named stay as they are."""

_MOVES_AT_LEAST = 0.03
"""Change of an observation's logarithm with a constant's, below which it says nothing of the constant."""
_STEP = 0.01
_MAX_ROUNDS = 30
_CONVERGED = 1e-6


def choose_constants(predict: LogPredictions, candidates: Mapping[str, float]) -> list[str]:
    """Constants that the observations tell apart, those that move them most first.

    Args:
        predict: the observations' predictions.
        candidates: constant -> value.
    """
    base = predict({})
    columns = {name: _column(predict, name, value, base) for name, value in candidates.items()}
    chosen: list[str] = []
    while columns and len(chosen) < len(base):
        name = max(columns, key=lambda candidate: _norm(columns[candidate]))
        direction = columns.pop(name)
        size = _norm(direction)
        if size < _MOVES_AT_LEAST:
            break
        chosen.append(name)
        for other, column in columns.items():
            share = sum(a * b for a, b in zip(column, direction, strict=True)) / size**2
            columns[other] = [a - share * b for a, b in zip(column, direction, strict=True)]
    return chosen


def solve_constants(predict: LogPredictions, start: Mapping[str, float], measured: Sequence[float]) -> dict[str, float]:
    """Least squares by Gauss and Newton, halving steps that lead astray; fractions end at 1.

    Args:
        predict: the observations' predictions.
        start: constant -> value, those to fit.
        measured: logarithms of the observations.

    Returns:
        Constant -> value.
    """
    values = dict(start)
    if not values:
        return values
    base = predict(values)
    error = [m - p for m, p in zip(measured, base, strict=True)]
    for _ in range(_MAX_ROUNDS):
        columns = [_column(predict, name, value, base, values) for name, value in values.items()]
        move = _solve(columns, error)
        for _ in range(8):
            tried = _move(values, move)
            tried_base = predict(tried)
            new = [m - p for m, p in zip(measured, tried_base, strict=True)]
            if _norm(new) <= _norm(error):
                break
            move = [part / 2 for part in move]
        else:
            return values
        values, base, error = tried, tried_base, new
        if max(map(abs, move)) < _CONVERGED:
            break
    return values


def _column(
    predict: LogPredictions, name: str, value: float, base: Sequence[float], others: Mapping[str, float] | None = None
) -> list[float]:
    """How the predictions' logarithms move with the constant's."""
    moved = predict({**(others or {}), name: value * math.exp(_STEP)})
    return [(new - old) / _STEP for new, old in zip(moved, base, strict=True)]


def _move(values: Mapping[str, float], move: Sequence[float]) -> dict[str, float]:
    moved = {name: value * math.exp(part) for (name, value), part in zip(values.items(), move, strict=True)}
    return {name: min(value, 1.0) if name.endswith("_fraction") else value for name, value in moved.items()}


def _norm(vector: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


def _solve(columns: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Normal equations, eliminated in order; the columns are few and independent."""
    size = len(columns)
    rows = [
        [sum(a * b for a, b in zip(columns[i], columns[j], strict=True)) for j in range(size)]
        + [sum(a * b for a, b in zip(columns[i], target, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        rows[i][i] += 1e-12
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = max(-2.0, min(2.0, (rows[i][size] - known) / rows[i][i]))
    return found
