"""Early stopping of a sweep's bad points. Owns what a point is compared with: the others' metrics at the same step.

Every point judges itself, by the files of the others: it does not matter who started them, when, or on which host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import PrunerConfig
from rlrecipes.errors import Pruned, RunError
from rlrecipes.plan.nodes import Plan
from rlrecipes.tracking.curves import to_series
from rlrecipes.tracking.log import read_records
from rlrecipes.tracking.metrics import find_metric
from rlrecipes.tracking.mlflow_sink import METRICS_FILE
from rlrecipes.tracking.sweeps import SweepRecord, find_point


class Pruner:
    """Judges one point.

    Args:
        config: by what.
        record: of the sweep.
        run_dir: of the point.
    """

    def __init__(self, config: PrunerConfig, record: SweepRecord, run_dir: Path) -> None:
        self._optuna = import_optuna()  # here, since a run must not find out later that it cannot
        self._config = config
        self._record = record
        self._run_dir = run_dir
        self._read: dict[Path, tuple[tuple[int, int], dict[int, float]]] = {}

    def check(self, step: int) -> None:
        """Judge the point after a step; a step without the metric judges nothing.

        The rule is that of Optuna's PercentilePruner, which is Golovin et al. 2017 (Google Vizier), section 3.2.2, with
        the best so far in place of averages. A point need not have ended to be one of the others.

        Args:
            step: completed.

        Raises:
            Pruned: the best it had so far is worse than what enough others had at this step.
        """
        own = self._read_series(self._run_dir)
        if step not in own or step <= self._config.num_warmup_steps:
            return
        points = [Path(point.run_dir) for point in self._record.read()]
        others = [self._read_series(path) for path in points if path != self._run_dir]
        reached = [series for series in others if step in series]
        if len(reached) >= self._config.min_points and self._is_worse(own, reached):
            best = max(own.values()) if self._is_higher_better else min(own.values())
            told = f"{self._config.metric} was {best:.4g} at best, not among the best {self._config.percentile:g}%"
            raise Pruned(f"{told} of what {len(reached)} others had at step {step}")

    @property
    def _is_higher_better(self) -> bool:
        metric = find_metric(self._config.metric)
        return metric is not None and metric.better == "higher"

    def _is_worse(self, own: Mapping[int, float], others: list[dict[int, float]]) -> bool:
        optuna, states = self._optuna, self._optuna.trial.TrialState
        pruner = optuna.pruners.PercentilePruner(self._config.percentile, n_startup_trials=0)
        study = optuna.create_study(direction="maximize" if self._is_higher_better else "minimize", pruner=pruner)
        for series in others:
            value = list(series.values())[-1]
            study.add_trial(optuna.create_trial(state=states.COMPLETE, value=value, intermediate_values=series))
        trial = optuna.create_trial(state=states.RUNNING, intermediate_values=dict(own))
        return bool(pruner.prune(study, trial))

    def _read_series(self, run_dir: Path) -> dict[int, float]:
        """Step -> value; empty where there is no log, or none that can be read."""
        path = run_dir / METRICS_FILE
        try:
            stat = path.stat()
            seen = (stat.st_mtime_ns, stat.st_size)
            if path not in self._read or self._read[path][0] != seen:
                self._read[path] = (seen, self._parse(path))
        except (OSError, RunError):
            return {}
        return self._read[path][1]

    def _parse(self, path: Path) -> dict[int, float]:
        values = to_series(read_records(path), self._config.metric)
        return {step: value for step, value in values.items() if math.isfinite(value)}


def build_pruner(plan: Plan) -> Pruner | None:
    """What stops a run early.

    Args:
        plan: the Plan.

    Returns:
        None where the Plan has none, or is no point of a sweep.
    """
    if plan.pruner is None:
        return None
    found = find_point(Path(plan.runs_dir), plan.tracking.sweep, Path(plan.run_dir))
    return Pruner(plan.pruner, found[0], Path(plan.run_dir)) if found is not None else None


def import_optuna() -> Any:
    """Optuna, saying no more than warnings; to import it takes a second."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
