"""What engines are told that take turns with the trainer, and what the others are not; and who hands them weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import WeightSyncError
from rlrecipes.plan.nodes import DeviceNode, HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.run import find_trainer_ranks

HOSTS = (HostNode(name="here", num_cpus=8, num_gpus=4, memory_bytes=1 << 38),)
HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
TURNS = ["topology.should_offload_engines=true", "topology.should_offload_trainer=true"]
JUDGE = "topology.served_models.judge"


def plan_of(*overrides):
    recipe = compose(list(overrides))
    return resolve(recipe.config, HOSTS, recipe.origins, recipe.problems)


def tell(plan):
    """Model -> flags of its engines' memory, and whether health checks may generate."""
    return {
        model.name: (
            [word for word in engine.command if word in ("--enable-memory-saver", "--enable-weights-cpu-backup")],
            engine.env.get(HEALTH),
        )
        for model in plan.served_models
        for engine in model.engines
    }


def test_an_engine_that_sleeps_can_give_its_memory_back_and_is_not_asked_for_its_health(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    judge = [
        f"+served_model@{JUDGE}=frozen",
        f"+server_group@{JUDGE}.server_groups.main=sglang",
        f"{JUDGE}.path={tmp_path}",
    ]
    plan = plan_of("topology=colocated", "parallel.data_parallel_size=2", *judge)
    assert tell(plan) == {
        "policy": (["--enable-memory-saver"], "false"),
        "judge": (["--enable-memory-saver", "--enable-weights-cpu-backup"], "false"),  # nobody sends it weights
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ("topology=colocated", "topology.should_offload_engines=false"),
        ("topology=disaggregated", *TURNS),
        ("topology=embedded", *TURNS),
    ],
)
def test_others_are_told_nothing(overrides):
    assert tell(plan_of(*overrides)) == {"policy": ([], None)}


def test_on_a_cpu_there_is_no_memory_saver(tmp_path):
    group = "topology.served_models.policy.server_groups.main"
    (tmp_path / "python").write_text("")
    plan = plan_of("topology=sglang_cpu", *TURNS, f"{group}.python={tmp_path / 'python'}")
    assert tell(plan) == {"policy": ([], "false")}


def test_an_engine_of_sglang_keeps_idle_connections_longer_than_the_router_does():
    engines = [plan_of(f"topology={name}").policy.engines[0] for name in ("colocated", "embedded")]
    kept = [engine.env.get("SGLANG_TIMEOUT_KEEP_ALIVE") for engine in engines]
    assert float(kept[0]) > 50
    assert kept[1] is None


def test_every_rank_of_an_engine_has_the_trainer_rank_on_its_gpu():
    plan = plan_of(
        "topology=colocated",
        "parallel.data_parallel_size=4",
        "topology.served_models.policy.server_groups.main.gpus_per_engine=2",
    )
    engines = [SimpleNamespace(url="http://e", devices=engine.devices) for engine in plan.policy.engines]
    assert [find_trainer_ranks(plan, engine) for engine in engines] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("devices", [(), (DeviceNode(node=0, gpu=0), DeviceNode(node=0, gpu=3))])
def test_an_engine_elsewhere_is_told_before_anything_is_sent(devices):
    plan = plan_of("topology=colocated", "parallel.data_parallel_size=2")
    with pytest.raises(WeightSyncError, match=r"http://e.*\n?.*do not reach it"):
        find_trainer_ranks(plan, SimpleNamespace(url="http://e", devices=devices))
