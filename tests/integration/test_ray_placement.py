"""A Ray cluster whose machines are missing or in use: the wait is bounded, and says what cannot be placed and why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.test_ray_nodes import ray_address  # noqa: F401

HOLD = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
group = ray.util.placement_group([{"GPU": 3}])
ray.get(group.ready())
print("held", flush=True)
sys.stdin.read()
"""
SETTLE = """
import asyncio, sys
from rlrecipes.config.compose import compose
from rlrecipes.errors import RecipeError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner import cluster

cluster._NODES_TIMEOUT_S = cluster._PLACEMENT_TIMEOUT_S = 2
address, num_hosts = sys.argv[1], int(sys.argv[2])
host = HostNode(name="elsewhere", num_cpus=3, num_gpus=2, memory_bytes=1 << 38)
words = [f"parallel.data_parallel_size={2 * num_hosts}", "weight_sync=disk", "schedule.prompts_per_step=8"]
config = compose(["topology=colocated", "cluster=ray", f"cluster.address={address}", *words]).config
plan = resolve(config, (host,) * num_hosts, {})

async def settle():
    one = cluster.RayCluster(plan)
    await one.launch()
    try:
        await one.settle()
        print("placed", sorted(one.machines))
    finally:
        await one.close()

try:
    asyncio.run(settle())
except RecipeError as error:
    print(error)
"""


def settle(address, num_hosts):
    command = [sys.executable, "-c", SETTLE, address, str(num_hosts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_that_are_missing_or_in_use_are_told(ray_address):  # noqa: F811
    assert "placed [0]" in settle(ray_address, 1)
    said = settle(ray_address, 2)
    assert "has no node for machine 1 (elsewhere) (2 GPUs) after 2 s; there are: " in said and "3 CPU, 4 GPU" in said
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, ray_address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and "held" in holder.stdout.readline()
        said = settle(ray_address, 1)
        assert "cannot place these in 2 s: machine 0 (elsewhere) needs 1 CPU, 2 GPU; free are 3 CPU, 1 GPU" in said
    finally:
        holder.communicate(timeout=60)
    assert "placed [0]" in settle(ray_address, 1)
