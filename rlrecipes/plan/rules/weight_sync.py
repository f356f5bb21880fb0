"""How weights reach the engines, and whether they can."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.rule import Found, list_models, rule


@rule("weight_sync.transport", fix="use weight_sync=tensor, or placement=disaggregated")
def nccl_joins_gpus_that_nobody_shares(config: RunConfig) -> Iterator[Found]:
    """NCCL cannot join two processes of one GPU."""
    if config.topology.device != "cuda" or config.weight_sync.transport != "distributed":
        return
    for where, _, model in list_models(config):
        shared = [key for key, group in model.server_groups.items() if group.placement == "colocated"]
        if model.is_updated and shared:
            fix = f"use weight_sync=tensor, or placement=disaggregated in {where}.server_groups"
            yield Found("weight_sync.transport", "NCCL cannot join two processes that share a GPU", fix)


RULES = (nccl_joins_gpus_that_nobody_shares,)
