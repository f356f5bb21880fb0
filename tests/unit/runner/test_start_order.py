"""Who starts first: an engine takes a share of the memory that it finds free, so trainers must not be taking theirs."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner import run

HOSTS = (HostNode(name="here", num_cpus=8, num_gpus=4, memory_bytes=1 << 38),)
STAY = ["topology.should_offload_engines=false", "topology.should_offload_trainer=false"]


class Part:
    """Serving, trainers and stop request at once; notes what it is told to do."""

    colocated_engines = updated_engines = machines = ()
    is_joined = False

    def __init__(self, told):
        self.told = told

    async def wait_until_ready(self):
        self.told.append("engines are ready")

    async def start(self):
        self.told.append("trainers start")

    @contextlib.asynccontextmanager
    async def naming_deaths(self):
        yield

    async def run(self, work, *arguments, **keywords):
        return await work if asyncio.iscoroutine(work) else []

    async def close(self):
        pass

    async def launch(self):
        pass

    def install(self):
        pass


class Engines(Part):
    def launch(self):
        self.told.append("engines are launched")


@pytest.mark.parametrize(
    ("overrides", "are_engines_first"),
    [
        (["topology=colocated"], True),
        (["topology=colocated", *STAY], True),
        (["topology=pd_colocated", "parallel=dp2"], True),
        (["topology=disaggregated"], False),
        (["topology=embedded"], False),
    ],
)
def test_trainers_wait_for_engines_on_their_gpus(monkeypatch, overrides, are_engines_first):
    recipe = compose(["schedule.prompts_per_step=4", *overrides])
    plan, told = resolve(recipe.config, HOSTS, recipe.origins), []
    monkeypatch.setattr(run, "Serving", lambda *arguments: Engines(told))
    monkeypatch.setattr(run, "TrainerGroup", lambda *arguments: Part(told))
    monkeypatch.setattr(run, "RayCluster", lambda *arguments: Part(told))

    async def execute():
        async with AsyncExitStack() as stack:
            await run._start_processes(plan, None, stack, Part(told), print)

    asyncio.run(execute())
    both = ["engines are ready", "trainers start"]
    assert told == ["engines are launched", *(both if are_engines_first else reversed(both))]
