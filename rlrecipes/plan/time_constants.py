"""The constants of the step-time model by name. Their values, units and sources stand in calibration.yaml."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeConstants:
    """Section ``time`` of calibration.yaml, one field an entry; units stand there."""

    response_median_fraction: float
    response_sigma: float
    prompt_fraction: float
    decode_bandwidth_fraction: float
    decode_flops_fraction: float
    prefill_flops_fraction: float
    decode_step_s: float
    decode_request_s: float
    prefill_batch_s: float
    speculative_tokens: float
    speculative_step_factor: float
    train_flops_fraction: float
    expert_flops_fraction: float
    attention_flops_fraction: float
    layer_launch_s: float
    logprob_bytes_per_logit: float
    cut_logprob_bytes_per_logit: float
    packing_fraction: float
    optimizer_bandwidth_fraction: float
    host_memory_bytes_per_s: float
    nvlink_fraction: float
    nic_fraction: float
    expert_exchange_fraction: float
    collective_s: float
    host_link_bytes_per_s: float
    disk_bytes_per_s: float
    sync_bucket_s: float
    sync_link_fraction: float
    pause_abort_s: float
    pause_in_place_s: float
    checksum_bytes_per_s: float
    engine_release_s: float
