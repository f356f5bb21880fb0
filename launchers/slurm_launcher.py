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
        """Keep what Hydra knows; the task is not run here, but on the nodes."""
        self._config, self._context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit all jobs, or none where a recipe, an option or the partition does not fit."""
        from rlrecipes.config.compose import compose_jobs
        from rlrecipes.runner.submission import submit

        recipes = compose_jobs(self._context.config_loader, self._config, job_overrides, initial_job_idx)
        options = OmegaConf.to_container(self._config.hydra.launcher, resolve=True)
        submit(recipes, options, Path(self._config.hydra.sweep.dir))
        return [JobReturn(overrides=list(job), status=JobStatus.COMPLETED) for job in job_overrides]
