"""Which groups are worth training. Owns the table of filters; dropped groups are replaced by the collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlrecipes.algos.advantages import compute_zero_variance
from rlrecipes.errors import ConfigError
from rlrecipes.rollout.groups import is_answered
from rlrecipes.suggest import did_you_mean
from rlrecipes.types import Group

type Filter = Callable[[Group], tuple[bool, str]]
"""Gives whether to keep a rewarded group, and otherwise the reason, under which drops are counted."""


def has_zero_variance(group: Group) -> bool:
    """Whether all answered rollouts of a group have the same reward, so that their advantages are all zero."""
    rewards = [rollout.reward for rollout in group.rollouts if is_answered(rollout)]
    group_ids = torch.zeros(len(rewards), dtype=torch.int64)
    return bool(compute_zero_variance(rewards=torch.tensor(rewards, dtype=torch.float64), group_ids=group_ids).all())


def keep_nonzero_variance(group: Group) -> tuple[bool, str]:
    """Keep groups that teach something (the dynamic sampling of DAPO, arXiv 2503.14476, section 3.2)."""
    return (False, "zero_variance") if has_zero_variance(group) else (True, "")


FILTERS: Mapping[str, Filter] = {"nonzero_variance": keep_nonzero_variance}
"""Name -> filter."""


def build_filters(names: Sequence[str]) -> tuple[Filter, ...]:
    """Filters by name, applied in this order.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in FILTERS:
            raise ConfigError("rollout.filters", f"there is no filter {name!r}", did_you_mean(name, FILTERS))
    return tuple(FILTERS[name] for name in names)
