"""`hydra/sweeper=optuna`: hands a sweep to rlrecipes.runner.study. Hydra imports it at every start."""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class OptunaSweeper(Sweeper):
    """Asks Optuna for points and tells it what came of them.

    Args:
        options: conf/hydra/sweeper/optuna.yaml's.
    """

    def __init__(self, **options: Any) -> None:
        pass  # they are read from the configuration, where they are plain data

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra knows."""
        self._config, self._loader, self._task = config, hydra_context.config_loader, task_function
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the study."""
        from rlrecipes.config.compose import NAME_POINT, compose_jobs, read_search_space
        from rlrecipes.errors import ConfigError
        from rlrecipes.runner.study import run_study

        points = getattr(self._task, NAME_POINT, None)
        if points is None:
            raise ConfigError("hydra/sweeper", "is optuna; only `train -m` has points to try", "leave it out")

        def register(words: list[str]) -> Any:
            (recipe,) = compose_jobs(self._loader, self._config, [words], 0, lambda _: {})
            return points.register(recipe)

        options = OmegaConf.to_container(self._config.hydra.sweeper, resolve=True)
        run_study(read_search_space(arguments), options, points.record, register, self._launcher.launch)
