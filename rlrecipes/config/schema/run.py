"""A whole recipe: one section a conf/ group."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrecipes.config.schema.algo import RlConfig, SftConfig
from rlrecipes.config.schema.cluster import ClusterConfig
from rlrecipes.config.schema.data import DataConfig, RewardConfig
from rlrecipes.config.schema.model import ModelConfig
from rlrecipes.config.schema.optim import OptimConfig
from rlrecipes.config.schema.parallel import ParallelConfig
from rlrecipes.config.schema.rollout import RolloutConfig
from rlrecipes.config.schema.schedule import PrunerConfig, ScheduleConfig, TrackingConfig, WeightSyncConfig
from rlrecipes.config.schema.section import NonNegativeInt, Section
from rlrecipes.config.schema.topology import ServedModelConfig, TopologyConfig


class RunConfig(Section):
    """A whole recipe."""

    name: str
    """Name of the run; also of its directory."""
    seed: NonNegativeInt
    """Seed of shuffling and sampling."""
    deterministic: bool
    """Whether a rerun gives the same numbers bit for bit (CPU, same layout); slower."""
    runs_dir: str
    """Where run directories and the MLflow file live."""
    run_dir: str
    """Directory of this run; a run that finds its checkpoint there resumes."""
    resume: Literal["auto", "never", "required", "accept_changes"]
    """auto: from the run directory when it holds a checkpoint of the same recipe. never: refuse a used directory.
    required: refuse an unused one. accept_changes: resume although the recipe changed."""
    calibration: str | None
    """File of constants that predictions of memory and time use, from `rlrecipes calibrate`; null: the shipped one."""
    model: ModelConfig
    algo: Annotated[RlConfig | SftConfig, Field(discriminator="kind")]
    topology: TopologyConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    schedule: ScheduleConfig
    weight_sync: WeightSyncConfig
    optim: OptimConfig
    tracking: TrackingConfig
    pruner: PrunerConfig | None
    """Stops bad points of a sweep early; null: none. Outside of a sweep it does nothing."""

    @property
    def asked_models(self) -> dict[str, ServedModelConfig]:
        """The served models that the run asks; SFT that evaluates nothing asks none, and keeps no GPU for one."""
        is_asking = isinstance(self.algo, RlConfig) or self.data.eval_path is not None
        return self.topology.served_models if is_asking else {}
