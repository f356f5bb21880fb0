"""What is looked at before a process starts: served models whose tokens mean something else, and who can be asked."""

import socket
from types import SimpleNamespace

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.errors import DataError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.nvml import Gpu, GpuUse
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.build import ServedClients, build_inputs, build_plan_reward, build_system_sampler

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


def write_model(path, alphabet, *more_tokens):
    path.mkdir()
    (path / "config.json").write_text("{}")
    build_char_tokenizer(alphabet=alphabet, extra_special_tokens=more_tokens).save_pretrained(path)
    return path


def read_inputs(tmp_path, teacher):
    (tmp_path / "train.jsonl").write_text('{"prompt": "ab", "label": "ba"}\n')
    words = ["algo=opd", "algo.distillation.teacher_model=teacher", "topology=embedded_teacher"]
    words += [f"topology.served_models.teacher.path={teacher}", f"run_dir={tmp_path}/run"]
    words += [
        "data=jsonl",
        "data.name=mine",
        "data.max_prompt_tokens=16",
        "data.apply_chat_template=false",
        f"data.train_path={tmp_path}/train.jsonl",
        "schedule.eval_interval=0",
    ]
    recipe = compose([*words, "reward.name=math", "reward.options={extraction: whole}"])
    plan = resolve(recipe.config, HOSTS, recipe.origins, recipe.problems)
    policy = tmp_path / "run" / "initial"
    policy.mkdir(parents=True)
    build_char_tokenizer(alphabet="abcd").save_pretrained(policy)
    clients = ServedClients(plan)
    return build_inputs(plan, build_plan_reward(plan, clients), clients)


def test_a_teacher_with_more_tokens_will_do(tmp_path):
    assert read_inputs(tmp_path, write_model(tmp_path / "teacher", "abcd", "<more>")).prompts is not None


def test_a_teacher_whose_tokens_mean_something_else_is_told(tmp_path):
    with pytest.raises(DataError) as caught:
        read_inputs(tmp_path, write_model(tmp_path / "teacher", "abdc"))
    (problem,) = caught.value.problems
    assert problem.where == "topology.served_models.teacher.path"
    assert "token 'c' is 3 there and 2 in the policy's vocabulary" in problem.problem
    assert problem.fix == "take a teacher with the policy's vocabulary"


def test_served_models_are_known_before_they_can_be_asked(tmp_path):
    recipe = compose(["topology=embedded_teacher", f"topology.served_models.teacher.path={tmp_path}"])
    (tmp_path / "config.json").write_text("{}")
    clients = ServedClients(resolve(recipe.config, HOSTS, recipe.origins))
    assert list(clients) == ["policy", "teacher"]
    assert "teacher" in clients
    assert "judge" not in clients
    with pytest.raises(KeyError):
        clients["teacher"]


def test_the_runs_gpus_of_this_machine_are_watched(monkeypatch, tmp_path):
    gpus = [Gpu("H200", f"GPU-{index}", index) for index in (4, 5, 6)]
    monkeypatch.setattr("rlrecipes.runner.build.read_visible_gpus", lambda: gpus)
    monkeypatch.setattr("rlrecipes.runner.build.read_busy_fraction", lambda index: index / 10)
    monkeypatch.setattr("rlrecipes.runner.build.read_gpu_use", lambda index: GpuUse(100, index, ()))
    trainer = SimpleNamespace(devices=[SimpleNamespace(node=0, gpu=1), SimpleNamespace(node=1, gpu=0)])
    engine = SimpleNamespace(devices=[SimpleNamespace(node=0, gpu=2)])
    hosts = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    plan = SimpleNamespace(trainer=trainer, served_models=[SimpleNamespace(engines=[engine])], run_dir=str(tmp_path))
    plan.hosts, plan.cluster = hosts, SimpleNamespace(source="slurm")
    metrics = build_system_sampler(plan).take()
    assert metrics["system/gpu_memory_bytes"] == 6 and metrics["system/gpu_use_fraction"] == pytest.approx(0.55)
    plan.cluster.source = "ray"  # a driver may run on any machine, or on none of the run's
    assert "system/gpu_memory_bytes" not in build_system_sampler(plan).take()
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    assert build_system_sampler(plan).take()["system/gpu_memory_bytes"] == 4
    plan.trainer = SimpleNamespace(devices=[SimpleNamespace(node=1, gpu=None)])
    assert "system/gpu_memory_bytes" not in build_system_sampler(plan).take()
