"""What Ray says of its machines, in the Plan's words."""

from __future__ import annotations

from rlrecipes.plan.hosts import FoundHost
from rlrecipes.plan.nodes import HostNode
from rlrecipes.runner.cluster import to_ray_hosts

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
