"""A sweep whose points Optuna asks for, one batch after another. Owns the study beside the sweep's points.

<runs_dir>/sweeps/NAME/study.log has every trial, so that the same command goes on: trials that were running run again,
with the run they had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlrecipes.config.compose import SearchSpace
from rlrecipes.config.schema.section import NonNegativeInt, PositiveInt, Section
from rlrecipes.config.validation import read_options
from rlrecipes.errors import ConfigError
from rlrecipes.runner.pruning import import_optuna
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.curves import to_series
from rlrecipes.tracking.log import read_records
from rlrecipes.tracking.metrics import find_metric, iterate_metrics
from rlrecipes.tracking.mlflow_sink import METRICS_FILE
from rlrecipes.tracking.sweeps import Point, PointState, SweepRecord

_WHERE = "hydra.sweeper"
_STUDY = "study.log"
_WORDS = "words"


class StudyConfig(Section):
    """What conf/hydra/sweeper/optuna.yaml may say."""

    metric: str
    """What is made better: its last value."""
    direction: Literal["maximize", "minimize"]
    num_points: PositiveInt
    """In all, those of earlier calls too."""
    at_once: PositiveInt
    """Points of a batch."""
    sampler: Literal["tpe", "random"]
    seed: NonNegativeInt


def run_study(
    space: SearchSpace,
    options: Any,
    record: SweepRecord,
    register: Callable[[list[str]], Point],
    launch: Callable[[list[list[str]], int], Any],
) -> None:
    """Ask for points, run them, tell what came of them, until there are as many as are wanted.

    Args:
        space: what is searched.
        options: of the sweeper, plain data.
        record: of the sweep.
        register: gives the point of an override list.
        launch: runs a batch of override lists; takes the number of the first.

    Raises:
        ConfigError: an option is wrong, or nothing is to be searched.
    """
    config = _read_options(options, space)
    study = _build_study(config, record.directory / _STUDY)
    states = import_optuna().trial.TrialState
    waiting = [(trial.number, trial.user_attrs[_WORDS]) for trial in study.get_trials(states=(states.RUNNING,))]
    while True:
        left = config.num_points - len(study.trials) + len(waiting)
        while len(waiting) < min(config.at_once, left):
            trial = study.ask(_build_distributions(space))
            words = space.to_words(trial.params)
            trial.set_user_attr(_WORDS, words)
            waiting.append((trial.number, words))
        batch, waiting = waiting[: config.at_once], waiting[config.at_once :]
        if not batch:
            return
        judged = [(number, words) for number, words in batch if _is_registered(study, number, words, register)]
        if judged:
            launch([words for _, words in judged], judged[0][0])
        for number, words in judged:
            _tell(study, number, record.find(words), config.metric)


def _read_options(options: Any, space: SearchSpace) -> StudyConfig:
    if not space.dimensions:
        fix = "give at least one: optim.lr=interval(1e-5,1e-3), algo=grpo,gspo"
        raise ConfigError("hydra/sweeper", "is optuna, and no value is searched", fix)
    if options.get("metric") is None:
        fix = f"give {_WHERE}.metric=eval/TASK/accuracy; docs/metrics.md has all"
        raise ConfigError(f"{_WHERE}.metric", "is not given", fix)
    config = read_options(StudyConfig, options, _WHERE)
    if find_metric(config.metric) is None:
        known = [metric.name for metric in iterate_metrics()]
        raise ConfigError(f"{_WHERE}.metric", f"{config.metric!r} is no metric", did_you_mean(config.metric, known))
    return config


def _build_study(config: StudyConfig, path: Path) -> Any:
    optuna = import_optuna()
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    path.parent.mkdir(parents=True, exist_ok=True)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    storage = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True, direction=config.direction)
    # A continued study must not draw again what it drew.
    study.sampler = samplers[config.sampler](seed=config.seed + len(study.trials))
    return study


def _build_distributions(space: SearchSpace) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    found: dict[str, Any] = {}
    for key, dimension in space.dimensions.items():
        if isinstance(dimension, tuple):
            found[key] = CategoricalDistribution(dimension)
        else:
            found[key] = FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
    return found


def _is_registered(study: Any, number: int, words: list[str], register: Callable[[list[str]], Point]) -> bool:
    try:
        register(words)
    except ConfigError as error:
        print(f"trial {number} is refused: {error}", flush=True)
        study.tell(number, state=import_optuna().trial.TrialState.FAIL)
        return False
    return True


def _tell(study: Any, number: int, point: Point, metric: str) -> None:
    if point.state not in (PointState.FINISHED, PointState.FAILED, PointState.PRUNED):
        return  # a signal came first; it runs again
    value = _read_last(Path(point.run_dir), metric) if point.state is PointState.FINISHED else None
    if value is None:
        states = import_optuna().trial.TrialState
        study.tell(number, state=states.PRUNED if point.state is PointState.PRUNED else states.FAIL)
        if point.state is PointState.FINISHED:
            print(f"{point.run_name} logged no {metric}", flush=True)
        return
    study.tell(number, value)
    best = study.best_trial
    print(f"{point.run_name}: {metric} {value:.4g}; best so far {best.value:.4g} (trial {best.number})", flush=True)


def _read_last(run_dir: Path, metric: str) -> float | None:
    values = list(to_series(read_records(run_dir / METRICS_FILE), metric).values())
    return values[-1] if values else None
