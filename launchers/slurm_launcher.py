"""`hydra/launcher=slurm`: hands composed recipes to rlrecipes.runner.submission. Hydra imports it at every start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class SlurmLauncher(Launcher):
    """Every job of a sweep, or the one of a plain run, as a SLURM job.

    Args:
        options: conf/hydra/launcher/slurm.yaml's.
    """

    def __init__(self, **options: Any) -> None:
        pass  # they are read from the configuration, where they are plain data

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra knows; the task is not run here: the nodes run the Plan that `train` would."""
        self._config, self._context = config, hydra_context
        self._task = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit all jobs, or none where a recipe, an option or the partition does not fit."""
        from rlrecipes.config.compose import CAN_SUBMIT, NAME_POINT, compose_jobs
        from rlrecipes.errors import ConfigError
        from rlrecipes.runner.submission import submit

        asked = getattr(self._task, CAN_SUBMIT, False)
        if not asked:
            raise ConfigError("hydra/launcher", "is slurm; only `train` is submitted", "leave it out, or use train")
        name_point, loader = getattr(self._task, NAME_POINT, None), self._context.config_loader
        recipes = compose_jobs(loader, self._config, job_overrides, initial_job_idx, name_point)
        options = OmegaConf.to_container(self._config.hydra.launcher, resolve=True)
        if recipes:  # of a sweep that goes on all may have finished
            submit(recipes, options, Path(self._config.hydra.sweep.dir), should_submit=asked == "submit")
        return [JobReturn(overrides=list(job), status=JobStatus.COMPLETED) for job in job_overrides]
