"""Optimizer and its schedule (conf/optim)."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema.section import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class OptimConfig(Section):
    """Adam and its schedule (conf/optim)."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"]
    """Shape of the decay."""
    num_warmup_train_steps: NonNegativeInt
    """Train steps of linear warm-up from 0."""
    adam_beta1: Decay
    """First moment's decay."""
    adam_beta2: Decay
    """Second moment's decay."""
    adam_eps: PositiveFloat
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat
    """Largest global gradient norm; 0: no clipping."""
