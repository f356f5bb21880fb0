"""What Ray says of its machines, in the Plan's words; and which of them a Plan means."""

from __future__ import annotations

from itertools import count

from rlrecipes.config.compose import compose
from rlrecipes.plan.hosts import FoundHost
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.cluster import match_nodes, to_ray_hosts
from rlrecipes.runner.machines import NODE_LABEL

NUMBERS = count()
# As ray.nodes() of 2.60 gave it, less its ports and paths; the machine beside it had left.
NODES = [
    {
        "NodeID": "56b7b427eccfcd9e96c1d5b4746f0ca1c8605720140b9d6e06c8e9f9",
        "Alive": True,
        "NodeManagerAddress": "192.0.2.2",
        "NodeManagerHostname": "vm",
        "DeathReason": 0,
        "Resources": {
            "object_store_memory": 80000000.0,
            "node:__internal_head__": 1.0,
            "accelerator_type:H200": 1.0,
            "GPU": 4.0,
            "memory": 17549433856.0,
            "node:192.0.2.2": 1.0,
            "CPU": 3.0,
        },
        "Labels": {},
    },
    {"NodeID": "0", "Alive": False, "NodeManagerHostname": "gone", "Resources": {}},
]


def test_living_machines_with_what_ray_may_give_away():
    host = HostNode(name="vm", num_cpus=3, num_gpus=4, memory_bytes=17629433856)
    assert to_ray_hosts(NODES) == [FoundHost(host, ("H200",))]


def test_a_head_that_gives_nothing_away():
    (host,) = to_ray_hosts([NODES[0] | {"Resources": {"node:192.0.2.2": 1.0}}])
    assert host == FoundHost(HostNode(name="vm", num_cpus=0, num_gpus=0, memory_bytes=0))


def plan_over(*names):
    words = ["topology=disaggregated", "parallel.data_parallel_size=2", "weight_sync=disk"]
    recipe = compose([*words, "schedule.prompts_per_step=4"])
    hosts = tuple(HostNode(name=name, num_cpus=8, num_gpus=2, memory_bytes=1 << 38) for name in names)
    return resolve(recipe.config, hosts, recipe.origins)


def node(name, num_gpus, label=None, is_alive=True):
    labels = {} if label is None else {NODE_LABEL: str(label)}
    number = f"{next(NUMBERS)}"
    return {
        "NodeID": number,
        "NodeManagerHostname": name,
        "Alive": is_alive,
        "Resources": {"GPU": num_gpus},
        "Labels": labels,
    }


def test_machines_of_a_plan_are_found_by_name_then_by_their_gpus():
    own, big, small = node("b", 2), node("other", 8), node("small", 1)
    assert match_nodes(plan_over("a", "b"), [own, small, big]) == {1: own, 0: big}
    assert match_nodes(plan_over("a", "b"), [own, small]) == {1: own}
    twice = [node("a", 2), node("a", 2)]
    assert match_nodes(plan_over("a", "a"), twice) == {0: twice[0], 1: twice[1]}


def test_nodes_that_were_started_for_a_plan_are_found_by_their_number():
    first, second = node("x", 2, 0), node("y", 2, 1)
    assert match_nodes(plan_over("y", "x"), [second, node("z", 8), first]) == {0: first, 1: second}
    assert match_nodes(plan_over("y", "x"), [node("y", 2, 1, is_alive=False), first]) == {0: first}
