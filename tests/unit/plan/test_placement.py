"""Where processes lie: ranks in order, engines inside nodes, prefill beside decode, nothing twice, and why."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.config.compose import compose
from rlrecipes.config.schema import RunConfig
from rlrecipes.errors import ConfigError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.placement import place
from rlrecipes.plan.resolve import resolve

GROUPS = "topology.served_models.policy.server_groups"


def hosts_of(*gpus):
    return tuple(
        HostNode(name=f"n{number}", num_cpus=8, num_gpus=num_gpus, memory_bytes=1 << 38)
        for number, num_gpus in enumerate(gpus)
    )


def plan_of(*overrides, hosts):
    recipe = compose(["weight_sync=disk", *overrides])  # which reaches engines wherever they lie
    return resolve(recipe.config, hosts, recipe.origins, recipe.problems)


@cache
def composed_text(topology):
    return compose([f"topology={topology}"]).config.model_dump_json()


def composed(topology):
    return json.loads(composed_text(topology))


def places(plan, group):
    (found,) = [node for node in plan.policy.server_groups if node.name == group]
    return [[(device.node, device.gpu) for device in engine.devices] for engine in found.engines]


def test_colocated_engines_fill_the_trainers_gpus():
    plan = plan_of(
        "topology=colocated", "parallel.data_parallel_size=4", f"{GROUPS}.main.gpus_per_engine=2", hosts=hosts_of(8)
    )
    assert [(device.node, device.gpu) for device in plan.trainer.devices] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert places(plan, "main") == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert all("--enable-memory-saver" in engine.command for engine in plan.policy.engines)


def test_without_gpus_ranks_are_spread_and_engines_go_where_fewest_are():
    engines = f"{GROUPS}.main.num_engines=3"
    plan = plan_of("parallel.data_parallel_size=3", engines, "schedule.prompts_per_step=6", hosts=hosts_of(0, 0))
    assert [device.node for device in plan.trainer.devices] == [0, 0, 1]
    assert places(plan, "main") == [[(1, None)], [(0, None)], [(1, None)]]
    alone = plan_of(hosts=hosts_of(0))
    assert places(alone, "main") == [[(0, None)]] and alone.num_used_gpus == {0: 0}


@pytest.mark.parametrize("asked", ["parallel.data_parallel_size=5000", f"{GROUPS}.main.num_engines=5000"])
def test_more_processes_than_a_machine_without_gpus_can_hold_are_refused(asked):
    with pytest.raises(ConfigError, match="needs 5001 processes on CPUs; 4096 is the most on 1 machines"):
        plan_of(asked, "schedule.prompts_per_step=5000", hosts=hosts_of(0))


def test_disaggregated_engines_fill_what_the_trainer_leaves():
    plan = plan_of("topology=disaggregated", "parallel.data_parallel_size=3", hosts=hosts_of(8))
    assert places(plan, "main") == [[(0, gpu)] for gpu in range(3, 8)]
    assert not any("--enable-memory-saver" in engine.command for engine in plan.policy.engines)
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.policy.engines] == ["3", "4", "5", "6", "7"]


def test_an_engine_that_fits_into_a_node_is_not_spread_over_two():
    plan = plan_of(
        "topology=disaggregated",
        "parallel.data_parallel_size=6",
        f"{GROUPS}.main.gpus_per_engine=4",
        f"{GROUPS}.main.num_engines=2",
        hosts=hosts_of(8, 8),
    )
    assert places(plan, "main") == [[(1, 0), (1, 1), (1, 2), (1, 3)], [(1, 4), (1, 5), (1, 6), (1, 7)]]


def test_a_small_engine_takes_the_hole_a_large_one_left():
    plan = plan_of(
        "topology=mixed",
        "parallel.data_parallel_size=6",
        f"{GROUPS}.main.placement=disaggregated",
        f"{GROUPS}.large.gpus_per_engine=4",
        f"{GROUPS}.large.num_engines=1",
        f"{GROUPS}.main.num_engines=1",
        hosts=hosts_of(8, 8),
    )
    assert places(plan, "large") == [[(1, 0), (1, 1), (1, 2), (1, 3)]]
    assert places(plan, "main") == [[(0, 6)]]


def test_an_engine_larger_than_a_node_takes_whole_nodes_and_says_so():
    plan = plan_of(
        "topology=disaggregated",
        "model=qwen3_32b",
        f"{GROUPS}.main.gpus_per_engine=16",
        f"{GROUPS}.main.num_engines=1",
        hosts=hosts_of(8, 8, 8),
    )
    (engine,) = plan.policy.engines
    assert {device.node for device in engine.devices} == {1}
    assert [device.node for follower in engine.followers for device in follower.devices] == [2] * 8
    words = " ".join(engine.followers[0].command)
    assert "--nnodes 2 --node-rank 1 --dist-init-addr {dist_init_addr}" in words
    assert "--tp-size 16" in words
    assert any("spans 2" in note for note in plan.notes)


def test_prefill_and_decode_share_nodes():
    plan = plan_of(
        "topology=pd",
        "parallel.data_parallel_size=8",
        f"{GROUPS}.prefill.gpus_per_engine=2",
        f"{GROUPS}.decode.gpus_per_engine=2",
        f"{GROUPS}.prefill.num_engines=2",
        f"{GROUPS}.decode.num_engines=6",
        hosts=hosts_of(8, 8, 8),
    )
    per_node = Counter(place[0][0] for place in places(plan, "prefill"))
    assert per_node == {1: 1, 2: 1}
    assert "--pd-disaggregation" in plan.policy.router.command
    assert all("{bootstrap_port}" in engine.command for engine in plan.policy.server_groups[0].engines)


def test_open_groups_share_evenly():
    plan = plan_of("topology=pd", hosts=hosts_of(8, 8))
    sizes = {group.name: len(group.engines) for group in plan.policy.server_groups}
    assert sizes == {"prefill": 7, "decode": 8}


def test_weights_are_sent_to_all_but_encoders():
    plan = plan_of("topology=epd", "weight_sync=distributed", hosts=hosts_of(4))
    sizes = {group.worker_type: len(group.engines) for group in plan.policy.server_groups}
    assert sizes == {"prefill": 1, "decode": 1, "encoder": 1}
    assert [route.num_receiving_ranks for route in plan.sync_routes] == [2]


def test_a_placeholder_keeps_its_gpus_free():
    plan = plan_of(
        "topology=mixed",
        f"{GROUPS}.large.worker_type=placeholder",
        f"{GROUPS}.large.num_engines=1",
        hosts=hosts_of(4),
    )
    (large,) = [group for group in plan.policy.server_groups if group.name == "large"]
    assert large.engines == ()
    assert [device.gpu for device in large.reserved] == [1, 2]
    assert plan.num_used_gpus == {0: 3}


@pytest.mark.parametrize("topology", ["colocated", "disaggregated"])
def test_demonstrations_that_nothing_evaluates_keep_no_gpu_for_engines(topology):
    base = ("algo=sft", f"topology={topology}", "parallel.data_parallel_size=8", "model=qwen3_0_6b")
    nothing = ("data.eval_path=null", "schedule.eval_interval=0")
    plan = plan_of(*base, *nothing, "cluster=h100_8", hosts=hosts_of(8))
    assert plan.served_models == ()
    assert [role.name for role in plan.memory.roles] == ["trainer"] and plan.memory.engines == ()
    assert plan.step_time.num_gpus == 8


def test_too_few_gpus_are_told_with_what_wants_them():
    with pytest.raises(ConfigError) as caught:
        plan_of("topology=disaggregated", "parallel.data_parallel_size=8", hosts=hosts_of(8))
    (problem,) = [problem for problem in caught.value.problems if problem.where == "topology"]
    assert "needs 9 GPUs (8 trainer ranks, 0 engine GPUs colocated and 1 of their own)" in problem.problem


def test_enough_gpus_that_lie_badly_are_told_apart():
    large = [f"{GROUPS}.main.gpus_per_engine=3", f"{GROUPS}.main.num_engines=2"]
    with pytest.raises(ConfigError) as caught:
        plan_of("topology=disaggregated", "parallel.data_parallel_size=2", *large, hosts=hosts_of(4, 4))
    assert any("inside a node" in problem.problem for problem in caught.value.problems)


@settings(max_examples=300, deadline=None)
@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    ranks=st.integers(1, 9),
    size=st.integers(1, 10),
    count=st.integers(1, 5),
    topology=st.sampled_from(["colocated", "disaggregated", "mixed", "pd", "pd_colocated"]),
)
def test_whatever_is_asked_no_gpu_is_given_twice(gpus, ranks, size, count, topology):
    group = {"pd": "decode", "pd_colocated": "decode"}.get(topology, "main")
    data = composed(topology)
    data["parallel"]["data_parallel_size"] = ranks
    data["topology"]["served_models"]["policy"]["server_groups"][group] |= {
        "gpus_per_engine": size,
        "num_engines": count,
    }
    config = RunConfig.model_validate_json(json.dumps(data))
    problems = []
    placement = place(config, hosts_of(*gpus), problems)
    assert bool(problems) != bool(placement.trainer)
    if problems:
        return
    kinds = {
        (m, g): group.placement
        for m, model in config.topology.served_models.items()
        for g, group in model.server_groups.items()
    }
    own = [d for (m, g, _), devices in placement.engines.items() if kinds[m, g] == "disaggregated" for d in devices]
    shared = [d for (m, g, _), devices in placement.engines.items() if kinds[m, g] == "colocated" for d in devices]
    for used in (list(placement.trainer) + own, shared + own):
        assert len(used) == len({(device.node, device.gpu) for device in used})
    for devices in placement.engines.values():
        assert all(device.gpu < gpus[device.node] for device in devices)
        if len(devices) <= max(gpus):
            assert len({device.node for device in devices}) == 1
