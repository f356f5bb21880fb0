"""The Plan refuses exactly the native fields that the trainer sets itself, so that none is found out by a rank."""

from __future__ import annotations

import dataclasses

import torch

from rlrecipes.config.compose import compose
from rlrecipes.engines.megatron import configuration
from rlrecipes.plan.inventory import load_inventory
from rlrecipes.plan.native import MEGATRON_OWNED
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


def test_what_the_trainer_sets_is_refused_and_what_it_defaults_is_not():
    recipe = compose()
    plan = resolve(recipe.config, HOSTS, recipe.origins)
    trainer = plan.trainer.model_copy(update={"optimizer_cpu_offload": True})
    taken = configuration._architecture_fields(plan.model) | configuration._parallel_fields(trainer)
    taken |= configuration._optimizer_fields(trainer, plan.trainer.optim, torch.float32)
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
    taken |= configuration._expert_fields(plan.model.shapes.model_copy(update=experts))
    assert taken.keys() <= MEGATRON_OWNED.keys()
    groups = load_inventory("megatron").groups
    for group, defaults in {
        "TransformerConfig": configuration._default_fields(trainer),
        "OptimizerConfig": configuration._optimizer_default_fields(trainer),
    }.items():
        assert defaults and not defaults.keys() & MEGATRON_OWNED.keys()
        assert [name for name, value in defaults.items() if groups[group][name].find_problem(value)] == []


def test_every_field_that_the_plan_lets_through_exists():
    groups = load_inventory("megatron").groups
    assert groups.keys() == {kind.__name__ for kind in configuration._KINDS}
    for kind in configuration._KINDS:
        fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
        assert groups[kind.__name__].keys() == fields


def test_every_refused_field_is_one_of_megatron():
    known = {name for group in load_inventory("megatron").groups.values() for name in group}
    assert MEGATRON_OWNED.keys() <= known
