"""What differs between two Plans, or between any two trees of plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MISSING = "(absent)"
RECORD = ("notes", "changes", "choices", "provenance", "memory", "step_time")
"""Parts of a Plan that tell of it: how it came about, and what is predicted."""
_EXECUTION = (
    "cluster",
    "hosts",
    "version",
    "resume",
    "runs_dir",
    "run_dir",
    "tracking",
    "pruner",
    "served_models",
    "sync_routes",
    "weight_sync",
    "schedule.num_steps",
    "schedule.eval_interval",
    "schedule.should_eval_before",
    "schedule.save_interval",
    "schedule.num_kept_checkpoints",
    "schedule.should_export_hf",
    "rollout.max_concurrent_requests",
    "rollout.request_timeout_s",
    "rollout.max_failed_fraction",
    "rollout.evaluation",
    "reward.timeout_s",
    "trainer.tensor_model_parallel_size",
    "trainer.pipeline_model_parallel_size",
    "trainer.virtual_pipeline_model_parallel_size",
    "trainer.context_parallel_size",
    "trainer.data_parallel_size",
    "trainer.expert_model_parallel_size",
    "trainer.expert_tensor_parallel_size",
    "trainer.recompute_granularity",
    "trainer.recompute_method",
    "trainer.recompute_num_layers",
    "trainer.recompute_modules",
    "trainer.optimizer_cpu_offload",
    "trainer.sequence_parallel",
    "trainer.max_tokens_per_micro_batch",
    "trainer.num_threads",
    "trainer.num_train_steps_total",
    "trainer.critic.num_train_steps_total",
    "trainer.devices",
    "trainer.megatron",
)
"""Parts that say how a run is executed or how long, not what is learned."""


def flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of plain data under dotted paths; lists count as leaves.

    Args:
        data: nested mappings.
        prefix: of every path.
    """
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, data


def compute_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Paths whose values differ.

    Args:
        left: plain data.
        right: plain data.

    Returns:
        Path -> (left's value, right's value), ``MISSING`` where a side lacks it, in order of path.
    """
    first, second = dict(flatten(left)), dict(flatten(right))
    paths = sorted(first.keys() | second.keys())
    pairs = {path: (first.get(path, MISSING), second.get(path, MISSING)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def changes_learning(path: str) -> bool:
    """Whether a value of the Plan decides what is learned, rather than how the run is executed.

    Args:
        path: dotted.
    """
    return not any(path == free or path.startswith(free + ".") for free in (*RECORD, *_EXECUTION))


def to_portable(data: Mapping[str, Any]) -> dict[str, Any]:
    """A Plan with paths told from its run directory, which may have been moved or be spelt otherwise.

    Args:
        data: plain data of the Plan, ``run_dir`` and ``runs_dir`` among it.
    """
    text = json.dumps(data)
    for directory in (data.get("run_dir"), data.get("runs_dir")):
        if directory:
            text = text.replace(json.dumps(directory + "/")[:-1], '"{}/')
    portable: dict[str, Any] = json.loads(text)
    return portable
