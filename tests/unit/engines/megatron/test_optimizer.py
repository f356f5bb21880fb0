from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rlrecipes.config.schema import OptimConfig
from rlrecipes.engines.megatron.optimizer import build_scheduler, compute_finite_norm
from rlrecipes.errors import TrainerError


def compute_rates(style: str, num_warmup: int, num_steps: int) -> list[float]:
    optim = OptimConfig.model_validate(
        {
            "lr": 1.0,
            "min_lr": 0.2,
            "lr_decay_style": style,
            "num_warmup_train_steps": num_warmup,
            "adam_beta1": 0.9,
            "adam_beta2": 0.9,
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
            "clip_grad": 0.0,
        }
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
    scheduler = build_scheduler(optim, num_steps, optimizer)  # type: ignore[arg-type]
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


def test_warm_up_starts_above_zero_and_meets_the_peak() -> None:
    assert compute_rates("constant", 3, 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_decay_ends_at_the_least_rate_where_the_next_step_would_be() -> None:
    assert compute_rates("linear", 0, 4) == pytest.approx([1, 0.8, 0.6, 0.4])
    assert compute_rates("cosine", 2, 6) == pytest.approx(
        [1 / 3, 2 / 3, *(0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(4))]
    )


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_trains_whatever_the_schedule(style: str) -> None:
    assert compute_rates(style, 0, 1) == [1.0]
    assert compute_rates(style, 5, 1) == pytest.approx([1 / 6])


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error(norm: float) -> None:
    with pytest.raises(TrainerError, match="no weight was changed"):
        compute_finite_norm(lambda: norm)
