"""Who serves what, and where (conf/topology)."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema.section import NativeOptions, PositiveFloat, PositiveInt, Section


class ServerGroupConfig(Section):
    """Engines of one model with the same worker type and layout."""

    worker_type: Literal["regular"]
    """What the engines do."""
    engine: Literal["embedded", "sglang"]
    """embedded: the CPU server shipped here. sglang: the real one."""
    num_engines: PositiveInt
    """Server processes."""
    gpus_per_engine: PositiveInt
    """Tensor-parallel size of one engine."""
    python: str | None
    """Interpreter whose environment holds the engine; null: the run's own."""
    start_timeout_s: PositiveFloat
    """Longest wait until the engine is healthy."""
    sglang: NativeOptions
    """Options of the server under its own names (underscores for dashes), e.g. max_total_tokens."""
    env: dict[str, str]
    """Environment variables of the engine."""


class ServedModelConfig(Section):
    """One model behind one router."""

    path: str | None
    """HF directory; null: the trained model."""
    is_updated: bool
    """Whether weight syncs reach it."""
    router: NativeOptions
    """Options of sglang-router under its own names, e.g. policy."""
    server_groups: dict[str, ServerGroupConfig]
    """Named groups of engines."""


class TopologyConfig(Section):
    """Who serves what, and where (conf/topology)."""

    device: Literal["cpu", "cuda"]
    """What trainers and engines compute on."""
    placement: Literal["colocated", "disaggregated"]
    """colocated: engines share the trainer's devices. disaggregated: they have their own."""
    served_models: dict[str, ServedModelConfig]
    """Named models; `policy` is the one being trained."""
