"""The Plan refuses exactly the native fields that the trainer sets itself, so that none is found out by a rank."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig

from rlrecipes.config.compose import compose
from rlrecipes.engines.megatron.model import _architecture_fields, _default_fields, _parallel_fields
from rlrecipes.plan.inventory import load_inventory
from rlrecipes.plan.native import MEGATRON_OWNED
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


def test_what_the_trainer_sets_is_refused_and_what_it_defaults_is_not():
    recipe = compose()
    plan = resolve(recipe.config, HOSTS, recipe.origins)
    assert (_architecture_fields(plan.model) | _parallel_fields(plan.trainer)).keys() <= MEGATRON_OWNED.keys()
    defaults = _default_fields(plan.trainer)
    assert not defaults.keys() & MEGATRON_OWNED.keys()
    options = load_inventory("megatron").groups["TransformerConfig"]
    assert [name for name, value in defaults.items() if options[name].find_problem(value)] == []


def test_every_field_that_the_plan_lets_through_exists():
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")}
    assert load_inventory("megatron").groups["TransformerConfig"].keys() == fields
