"""The loop around the trainer (conf/schedule, conf/weight_sync, conf/tracking, conf/pruner)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrecipes.config.schema.section import Count, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ScheduleConfig(Section):
    """How long, and how often what (conf/schedule)."""

    num_steps: PositiveInt
    """Steps of the run."""
    prompts_per_step: Count
    """Prompts collected per step (SFT: samples)."""
    num_train_steps: Count
    """Optimizer updates per step; must divide prompts_per_step."""
    eval_interval: NonNegativeInt
    """Steps between evaluations; 0: only before and after."""
    should_eval_before: bool
    """Whether to evaluate before the first step."""
    save_interval: PositiveInt
    """Steps between checkpoints; the last step always saves."""
    num_kept_checkpoints: PositiveInt
    """Older ones are removed."""
    should_export_hf: bool
    """Whether the end writes an HF directory, <run_dir>/hf."""


class WeightSyncConfig(Section):
    """How weights reach the engines (conf/weight_sync)."""

    transport: Literal["tensor", "distributed", "disk"]
    """tensor: shared memory of one host. distributed: a process group. disk: an HF directory both see."""
    bucket_bytes: PositiveInt
    """Most bytes of one message."""
    pause_mode: Literal["abort", "in_place"]
    """What a sync does to running requests. abort: they end with what they have. in_place: they go on afterwards, with
    the prefix cache of the old weights. SGLang's third, retract, is left out: its cache cannot be flushed then."""
    verify_interval: NonNegativeInt
    """Syncs between checksum comparisons of every tensor, trainer against engine; 0: never."""
    timeout_s: PositiveFloat
    """Longest time for one sync."""


class PrunerConfig(Section):
    """Early stopping of a sweep's bad points (conf/pruner)."""

    metric: str
    """What points are judged by, of docs/metrics.md; at every step that logs it."""
    percentile: Annotated[float, Field(gt=0, lt=100)]
    """A point goes on while the best it had is among this percentage of what the others had at the same step; 50: while
    it is not worse than their median."""
    min_points: PositiveInt
    """Others that must have come to the step; a point that has fewer goes on."""
    num_warmup_steps: NonNegativeInt
    """Steps that every point may do."""


class TrackingConfig(Section):
    """Where metrics go beside <run_dir>/metrics.jsonl (conf/tracking)."""

    is_mlflow_enabled: bool
    """Whether MLflow gets them too."""
    tracking_uri: str | None
    """MLflow server; null: sqlite in runs_dir."""
    experiment: str
    """MLflow experiment."""
    sweep: str | None
    """Sweep that the run is a point of; set by the sweep."""
    registered_model: Annotated[str, Field(pattern=r"^[^/:]*[^/:\s][^/:]*$")] | None
    """Name in MLflow's model registry under which the exported model becomes a new version when the run ends; null:
    none. Its files are uploaded."""
