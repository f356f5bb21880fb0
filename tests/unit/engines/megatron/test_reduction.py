"""What a train step tells of its micro-batches, in one process: parts of the loss add up to it, the rest are means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrecipes.engines.megatron import reduction
from rlrecipes.engines.megatron.forward import build_train_step


class Reader:
    def read(self, inputs: Any, out: torch.Tensor) -> tuple[Any, ...]:
        return inputs.batch, out


def compute_halves(batch: Any, out: torch.Tensor) -> Any:
    return out, {"policy_loss": out / 2, "entropy": out, "ratio_max": out}


def test_parts_of_the_loss_are_weighted_like_it_and_other_metrics_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(size=lambda: 1)
    alone = SimpleNamespace(
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_group=lambda: one,
        get_pipeline_model_parallel_world_size=lambda: 1,
    )
    monkeypatch.setattr(reduction, "parallel_state", alone)
    step, found = build_train_step(Reader(), compute_halves), []
    # One response of three tokens and one of a single token, aggregated per sequence; nan stands where nothing counts.
    for values, weights in (([2.0, 4.0, 6.0], [1 / 6] * 3), ([10.0, float("nan")], [0.5, 0.0])):
        out, given = torch.tensor(values), torch.tensor(weights)
        batch = {"loss_mask": given > 0, "loss_weights": given}
        inputs = SimpleNamespace(batch=batch, token_ids=None, position_ids=None, packed=None, positions=None)
        found.append(step(iter([inputs]), lambda *_, out=out, **__: out)[1](out)[2])
    metrics = reduction.reduce_metrics(found)
    assert metrics == pytest.approx(
        {"loss": 7.0, "num_tokens": 4.0, "policy_loss": 3.5, "entropy": 22 / 4, "ratio_max": 10.0}
    )
