"""The constants of the memory model by name. Their values, units and sources stand in calibration.yaml."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryConstants:
    """Section ``memory`` of calibration.yaml, one field an entry; units stand there."""

    cuda_context_bytes: float
    trainer_start_bytes: float
    trainer_workspace_bytes: float
    nccl_group_bytes: float
    logprob_chunk_bytes: float
    activation_overhead_fraction: float
    expert_imbalance_fraction: float
    engine_graph_request_bytes: float
    engine_start_bytes: float
    engine_workspace_bytes: float
    headroom_fraction: float
