"""What a recipe may say, typed, frozen and closed. Owns names, types, ranges; refuses cross-field rules (plan/).

One file a conf/ group. Every field's docstring gives its unit and what it does; `docs/config.md` is made from them.
"""

from __future__ import annotations

from rlrecipes.config.schema.algo import (
    CriticConfig,
    DistillationConfig,
    KlConfig,
    OffPolicyConfig,
    OverlongConfig,
    RlConfig,
    SftConfig,
)
from rlrecipes.config.schema.cluster import ClusterConfig, ClusterSource, GpuConfig
from rlrecipes.config.schema.data import DataConfig, RewardConfig, TasksConfig
from rlrecipes.config.schema.model import Family, ModelConfig, ModelShapes
from rlrecipes.config.schema.optim import OptimConfig
from rlrecipes.config.schema.parallel import ParallelConfig
from rlrecipes.config.schema.rollout import (
    EnvironmentConfig,
    EvaluationConfig,
    GenerateConfig,
    RolloutConfig,
    SamplingConfig,
)
from rlrecipes.config.schema.run import RunConfig
from rlrecipes.config.schema.schedule import PrunerConfig, ScheduleConfig, TrackingConfig, WeightSyncConfig
from rlrecipes.config.schema.section import (
    Decay,
    Fraction,
    NativeOptions,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlrecipes.config.schema.topology import (
    EngineKind,
    PlacementKind,
    ServedModelConfig,
    ServerGroupConfig,
    TopologyConfig,
    WorkerType,
)

__all__ = [
    "ClusterConfig",
    "ClusterSource",
    "CriticConfig",
    "DataConfig",
    "Decay",
    "DistillationConfig",
    "EngineKind",
    "EnvironmentConfig",
    "EvaluationConfig",
    "Family",
    "Fraction",
    "GenerateConfig",
    "GpuConfig",
    "KlConfig",
    "ModelConfig",
    "ModelShapes",
    "NativeOptions",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OffPolicyConfig",
    "OptimConfig",
    "OverlongConfig",
    "ParallelConfig",
    "PlacementKind",
    "PositiveFloat",
    "PositiveInt",
    "PrunerConfig",
    "RewardConfig",
    "RlConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Section",
    "ServedModelConfig",
    "ServerGroupConfig",
    "SftConfig",
    "TasksConfig",
    "TopologyConfig",
    "TrackingConfig",
    "WeightSyncConfig",
    "WorkerType",
]
