"""Which groups are worth training. Owns the table of filters; dropped groups are replaced by the collector."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from rlrecipes.errors import ConfigError
from rlrecipes.rollout.groups import is_answered
from rlrecipes.types import Group

type Filter = Callable[[Group], tuple[bool, str]]
"""Gives whether to keep a scored group, and otherwise the reason, under which drops are counted."""


def has_zero_variance(group: Group) -> bool:
    """Whether all answered rollouts of a group have the same reward, so that their advantages are all zero."""
    return len({rollout.reward for rollout in group.rollouts if is_answered(rollout)}) < 2


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
            near = difflib.get_close_matches(name, FILTERS, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "use one of: " + ", ".join(FILTERS)
            raise ConfigError("rollout.filters", f"there is no filter {name!r}", fix)
    return tuple(FILTERS[name] for name in names)
