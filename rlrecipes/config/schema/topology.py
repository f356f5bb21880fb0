"""Who serves what, and where (conf/topology)."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema.section import Count, NativeOptions, NonNegativeInt, PositiveFloat, Section

WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
EngineKind = Literal["embedded", "sglang", "external"]
PlacementKind = Literal["colocated", "disaggregated"]


class ServerGroupConfig(Section):
    """Engines of one model with the same worker type and layout."""

    worker_type: WorkerType
    """What the engines do. regular: all of it. prefill and decode: one half each, side by side. encoder: images only.
    placeholder: nothing, its GPUs stay free."""
    engine: EngineKind
    """embedded: the CPU server shipped here. sglang: the real one. external: somebody else runs them, at `urls`."""
    placement: PlacementKind
    """colocated: on the trainer's GPUs, from the first that no group before it took. disaggregated: on GPUs of its
    own."""
    num_engines: Count | None
    """Engines; null: as many as fill the GPUs, shared evenly among the groups that say null: of colocated ones the
    trainer's, of disaggregated ones those that nobody else takes. External engines are counted by their urls."""
    gpus_per_engine: Count
    """TP x PP of one engine."""
    pipeline_parallel_size: Count
    """PP of one engine."""
    attention_data_parallel_size: Count
    """Replicas of attention inside one engine (SGLang's dp_size with DP attention); 1: none."""
    expert_parallel_size: Count
    """EP of one engine."""
    urls: tuple[str, ...]
    """Of external engines, http://host:port."""
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
    num_joining_engines: NonNegativeInt
    """Engines that others start and register at the router; the run waits for so many."""
    join_timeout_s: PositiveFloat
    """How long."""
    server_groups: dict[str, ServerGroupConfig]
    """Named groups of engines."""


class TopologyConfig(Section):
    """Who serves what, and where (conf/topology)."""

    device: Literal["cpu", "cuda"]
    """What trainers and engines compute on."""
    should_offload_trainer: bool
    """Whether the trainer gives its GPU memory back while colocated engines work."""
    should_offload_engines: bool
    """Whether colocated engines give theirs back while the trainer works."""
    served_models: dict[str, ServedModelConfig]
    """Named models; `policy` is the one being trained."""
