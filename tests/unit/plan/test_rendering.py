"""What people see of a plan: who is where, folded where nodes look alike, and nothing that the Plan does not hold."""

from __future__ import annotations

import io

from rich.console import Console

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.rendering import print_plan, to_html
from rlrecipes.plan.rendering.gpu_map import read_roles
from rlrecipes.plan.resolve import resolve

GROUPS = "topology.served_models.policy.server_groups"


def plan_of(*overrides, num_nodes=1, num_gpus=8):
    hosts = tuple(
        HostNode(name=f"n{number}", num_cpus=8, num_gpus=num_gpus, memory_bytes=1 << 38) for number in range(num_nodes)
    )
    recipe = compose(list(overrides))
    return resolve(recipe.config, hosts, recipe.origins, choices=recipe.choices)


def text_of(plan):
    console = Console(file=io.StringIO(), width=200, no_color=True)
    print_plan(plan, console)
    return console.file.getvalue()


def rows_of(text):
    lines = text.splitlines()
    start = lines.index(next(line for line in lines if line.strip() == "GPUs"))
    end = next(number for number, line in enumerate(lines) if line.strip() == "processes")
    return [line.split() for line in lines[start + 2 : end]]


def test_the_map_shows_every_gpu_once_with_all_its_roles():
    rows = rows_of(text_of(plan_of("topology=colocated", "parallel.data_parallel_size=2", num_gpus=4)))
    assert rows[0] == ["n0", "TA", "TA", ".", "."]
    assert rows[1][:4] == ["T", "=", "trainer,", "2"]
    assert rows[2][:4] == ["A", "=", "policy", "main:"]


def test_nodes_that_look_alike_are_one_row():
    text = text_of(plan_of("topology=disaggregated", "parallel.data_parallel_size=8", num_nodes=40))
    assert rows_of(text)[0] == ["n0", *"TTTTTTTT"]
    assert rows_of(text)[1][:5] == ["n1", "to", "n39", "(39", "nodes)"]
    assert "policy-main-0 to policy-main-311" in text


def test_prefill_decode_and_placeholders_have_letters_of_their_own():
    held = [f"{GROUPS}.large.worker_type=placeholder", f"{GROUPS}.large.num_engines=1"]
    roles = read_roles(plan_of("topology=mixed", *held))
    assert [(role.label, len(role.devices)) for role in roles] == [("T", 1), ("A", 1), ("B", 2)]
    roles = read_roles(plan_of("topology=pd"))
    assert [role.name.split(",")[0] for role in roles] == [
        "trainer",
        "policy prefill: prefill",
        "policy decode: decode",
    ]


def test_a_plan_on_cpu_has_no_map():
    assert read_roles(plan_of()) == []
    assert "GPUs" not in text_of(plan_of())


def test_choices_are_told_by_name_and_overrides_one_by_one():
    text = text_of(plan_of("algo=dapo", "topology=pd", "optim.lr=3e-6"))
    assert "algo=dapo" in text
    assert "topology=pd" in text
    assert "override optim.lr=3e-6" in text
    assert "algo.overlong.buffer_tokens" not in text  # stands in the option's file


def test_html_says_the_same_and_needs_nothing_else():
    plan = plan_of("topology=pd")
    page = to_html(plan)
    assert page.startswith("<!DOCTYPE html>")
    assert plan.hash in page
    assert "policy-prefill-0" in page
    assert "src=" not in page
    assert "href=" not in page


def test_memory_and_time_are_drawn_where_the_gpus_are_known():
    recipe = compose(["recipe=qwen3_4b"])
    hosts = (HostNode(name="n0", num_cpus=8, num_gpus=8, memory_bytes=1 << 41),)
    plan = resolve(recipe.config, hosts, recipe.origins, choices=recipe.choices)
    lines = text_of(plan).splitlines()
    peaks = {role.name: role.peak_bytes for role in plan.memory.roles}
    (row,) = [line for line in lines if line.split()[:1] == ["rollout"] and "░" in line]
    (host,) = [line for line in lines if "host memory of 2048.0, the fullest of 1" in line]
    assert f" {plan.memory.hosts[0].needed_bytes / (1 << 30):.1f} " in host
    assert f"{peaks['trainer+policy/main'] / (1 << 30):.1f}" in row
    assert 0.9 < row.count("█") / 30 / (peaks["trainer+policy/main"] / plan.memory.usable_bytes) < 1.1
    drawn = {line.split()[0]: line.count("█") for line in lines if "█" in line and "░" not in line}
    assert drawn["rollout"] > drawn["train"] > 0
    assert sum(drawn.values()) <= 44
    assert any(plan.step_time.bottleneck in line for line in lines)
    assert "memory of a GPU" not in text_of(plan_of("topology=pd"))  # nobody said what its GPUs are
