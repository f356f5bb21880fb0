"""Tasks of a SLURM job that wait for each other: for how long, and what they say then."""

from __future__ import annotations

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.slurm_node import Node, NodeError


class Running:
    """A Ray that stays."""

    def poll(self):
        return None


@pytest.fixture
def run_dir(tmp_path):
    recipe = compose(["topology=embedded", "weight_sync=disk"])
    hosts = tuple(HostNode(name=f"n{number}", num_cpus=4, num_gpus=0, memory_bytes=1 << 34) for number in range(3))
    (tmp_path / "slurm" / "meeting").mkdir(parents=True)
    (tmp_path / "slurm" / "plan.yaml").write_text(resolve(recipe.config, hosts, recipe.origins).to_yaml())
    return tmp_path


def node(run_dir, number, monkeypatch, wait_s=0.3):
    monkeypatch.setenv("SLURM_PROCID", str(number))
    return Node(run_dir, run_dir / "slurm" / "meeting", wait_s)


def test_nodes_that_do_not_join_are_named_with_the_end_of_their_logs(run_dir, monkeypatch):
    first = node(run_dir, 0, monkeypatch)
    (run_dir / "slurm" / "meeting" / "node-1").touch()
    (run_dir / "slurm" / "node-2.log").write_text("Failed to connect to GCS at address 10.0.0.1:6379\n")
    with pytest.raises(NodeError) as caught:
        first._wait_for_nodes(Running())
    assert "1 of 3 nodes did not join Ray; waited" in str(caught.value)
    assert "Failed to connect to GCS" in str(caught.value) and "node-1.log" not in str(caught.value)


def test_a_node_without_a_head_ends_and_so_it_does_when_the_first_has_failed(run_dir, monkeypatch, capsys):
    assert node(run_dir, 2, monkeypatch).run() == 1
    assert "has waited 0.3 s for the first node's Ray" in capsys.readouterr().err
    (run_dir / "slurm" / "meeting" / "end").touch()
    assert node(run_dir, 2, monkeypatch, wait_s=600).run() == 1  # at once


def test_the_first_node_does_not_wait_for_one_that_has_failed(run_dir, monkeypatch):
    assert node(run_dir, 1, monkeypatch).run() == 1
    with pytest.raises(NodeError, match="2 of 3 nodes did not join"):
        node(run_dir, 0, monkeypatch, wait_s=600)._wait_for_nodes(Running())
