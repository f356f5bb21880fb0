"""Runs whose models are served in other ways: several models, engines of others, several groups, a router alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from rlrecipes.config.compose import compose
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.engines.megatron.initial import run_write_random_model
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from tests.integration.command_line import SMALL

pytestmark = pytest.mark.timeout(600)
RUN = [word for word in SMALL if not word.startswith(("algo.kl", "model."))]
KL = ["algo.kl.placement=loss", "algo.kl.coef=0.01"]
OPD = ["algo=opd", "algo.distillation.coef=0.1", "algo.distillation.is_alone=false"]
POLICY = "topology.served_models.policy"
_DIGITS = "".join(letter for letter in map(chr, range(0x660, 0x1100)) if letter.isdecimal())
"""Digits of many scripts, all of them numbers to Python: a model that babbles says some."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(path: Path, seed: int, more_letters: str = "", chat_template: str | None = None) -> Path:
    """A small random model that knows the policy's tokens."""
    recipe = compose([*SMALL, f"model.init_seed={seed}"])
    host = HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34)
    node = resolve(recipe.config, (host,), recipe.origins).model
    tokenizer = build_char_tokenizer(alphabet=node.alphabet + more_letters, chat_template=chat_template)
    path.mkdir()
    tokenizer.save_pretrained(path)
    # Untied: with tied weights a random model says its last token again and again.
    changes = {"vocab_size": max(len(tokenizer), node.shapes.vocab_size), "untie_embeddings_and_output_weights": True}
    shapes = node.shapes.model_copy(update=changes)
    run_write_random_model(node.model_copy(update={"shapes": shapes}), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "student": write_model(root / "student", 1),
        "teacher": write_model(root / "teacher", 2),
        "judge": write_model(root / "judge", 3, _DIGITS, _TEMPLATE),
    }


def student(models):
    return ["model=hf", "model.name=small", f"model.path={models['student']}"]


def frozen(name, path, engine="embedded"):
    """A further served model, as a user adds one on the command line."""
    where = f"topology.served_models.{name}"
    return [
        f"+served_model@{where}=frozen",
        f"+server_group@{where}.server_groups.main={engine}",
        f"{where}.path={path}",
    ]


@contextmanager
def engine_of_others(model_path, cwd):
    """An engine started by hand."""
    command = [sys.executable, "-m", "rlrecipes.engines.embedded.server", "--model-path", str(model_path)]
    command += ["--port", "0", "--dtype", "float32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, cwd=cwd) as process:
        try:
            line = next((line for line in process.stdout if "http://" in line), "")
            assert line, f"the engine ended with code {process.wait()}"
            yield re.search(r"http://\S+", line).group()
            assert process.poll() is None, "an engine of others was stopped"
        finally:
            process.kill()


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or b"null")


def checksums(url):
    return call(f"{url}/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


def find_engine(process, name):
    """The engine process of a served model: the newest child of the guard that its log file's name tells."""
    found = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "rlrecipes.engines.embedded.server" in child.cmdline() and "guard.py" not in " ".join(child.cmdline())
    ]
    (engine,) = [child for child in found if any(name in word for word in child.cmdline())]
    return engine


@pytest.mark.slow
def test_a_served_teacher_and_reference_teach_what_held_ones_do(models, shell):
    """Same weights, same rollouts: a run cannot tell who scored its tokens."""
    common = ["schedule.num_steps=2", *RUN, *OPD, *KL, *student(models)]
    shell.run("train", "name=held", *common, f"algo.distillation.teacher_path={models['teacher']}")
    served = [
        "topology=embedded_teacher",
        f"topology.served_models.teacher.path={models['teacher']}",
        "algo.distillation.teacher_model=teacher",
        *frozen("reference", models["student"]),
        "algo.kl.reference_model=reference",
    ]
    shell.run("train", "name=served", *common, *served)
    held, asked = shell.metrics("held"), shell.metrics("served")
    for step in (1, 2):
        assert asked[step]["train/ref_kl"] == pytest.approx(held[step]["train/ref_kl"], abs=1e-6)
        assert asked[step]["train/loss"] == pytest.approx(held[step]["train/loss"], abs=1e-5)
        assert asked[step]["train/grad_norm"] == pytest.approx(held[step]["train/grad_norm"], rel=1e-4)
        assert asked[step]["rollout/failed_fraction"] == 0
    assert held[1]["train/grad_norm"] > 0
    assert asked[2]["train/ref_kl"] > 0
    assert shell.leftovers() == []
    assert not (shell.cwd / "runs" / "served" / "routers.json").exists()


@pytest.mark.slow
def test_several_models_and_the_death_of_one(models, shell):
    """Policy, teacher and judge; a teacher's engine killed mid-run stops the run, which goes on when asked again."""
    words = [
        "name=run",
        "topology=embedded_teacher",
        f"topology.served_models.teacher.path={models['teacher']}",
        "algo.distillation.teacher_model=teacher",
        *frozen("reward", models["judge"]),
        *student(models),
        *RUN,
        *OPD,
        "algo.distillation.form=topk",
        "algo.distillation.top_k=4",
        "reward=served_judge",
        "reward.name=served_judge",
        "reward.options.prompt_template='{response}'",
        "reward.options.max_new_tokens=8",
        r"reward.options.pattern='(\d)'",
    ]
    process = shell.start("train", "schedule.num_steps=1000", *words)
    shell.wait_for_step("run", 2, process)
    find_engine(process, str(models["teacher"])).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "engine teacher-main-0: ended with exit code 137" in output
    assert "Traceback" not in output
    assert shell.leftovers() == []
    reached = max(shell.metrics("run"))
    output = shell.run("train", f"schedule.num_steps={reached + 1}", *words)
    assert "resuming runs/run" in output
    metrics = shell.metrics("run")
    assert metrics[reached + 1]["train/teacher_topk_kl"] > 0
    assert metrics[reached + 1]["rollout/failed_fraction"] < 0.5
    assert 0 < metrics[reached + 1]["reward/max"] <= 0.9
    assert metrics[reached + 1]["reward/std"] > 0
    assert shell.leftovers() == []


def test_engines_that_others_run_are_used_and_left_alone(models, shell):
    """The policy's gets the weights, the teacher's keeps its own."""
    with ExitStack() as stack:
        ours = stack.enter_context(engine_of_others(models["student"], "/"))
        theirs = stack.enter_context(engine_of_others(models["teacher"], "/"))
        before = checksums(ours), checksums(theirs)
        words = [
            "topology=external",
            "topology.device=cpu",
            f"{POLICY}.server_groups.main.urls=[{ours}]",
            *frozen("teacher", models["teacher"], "external"),
            f"topology.served_models.teacher.server_groups.main.urls=[{theirs}]",
            "algo.distillation.teacher_model=teacher",
            "weight_sync=disk",
        ]
        run = [word for word in RUN if word != "deterministic=true"]
        shell.run("train", "name=run", "schedule.num_steps=1", *run, *OPD, *student(models), *words)
        metrics = shell.metrics("run")
        assert [metrics[step]["weight_sync/is_verified"] for step in (0, 1)] == [1.0, 1.0]
        after = checksums(ours), checksums(theirs)
        assert after[0] != before[0]
        assert after[1] == before[1]
        versions = [call(f"{url}/model_info")["weight_version"] for url in (ours, theirs)]
        assert versions == ["1", "default"]
        sampling = {"max_new_tokens": 2, "temperature": 0}
        assert call(f"{ours}/generate", {"input_ids": [5], "sampling_params": sampling})["output_ids"]
        assert shell.leftovers() == []


@pytest.mark.slow
def test_an_engine_of_others_with_another_model_is_told(models, shell):
    with engine_of_others(models["judge"], "/") as url:
        words = ["topology=external", "topology.device=cpu", f"{POLICY}.server_groups.main.urls=[{url}]"]
        run = [word for word in RUN if word != "deterministic=true"]
        output = shell.run("train", "name=run", "schedule.num_steps=1", *run, *student(models), *words, code=1)
        assert f"engine {url}" in output
        assert "shape" in output
        assert "Traceback" not in output
        assert shell.leftovers() == []


@pytest.mark.slow
def test_engines_join_at_the_router_beside_groups_of_the_runs_own(models, shell):
    """Two groups, an engine that registers itself, a placeholder, a second updated model: engines get the weights."""
    words = [
        *[f"+server_group@{POLICY}.server_groups.{name}=embedded" for name in ("second", "kept")],
        f"{POLICY}.server_groups.kept.worker_type=placeholder",
        f"{POLICY}.num_joining_engines=1",
        f"{POLICY}.join_timeout_s=120",
        "+served_model@topology.served_models.mirror=policy",
        "+server_group@topology.served_models.mirror.server_groups.main=embedded",
    ]
    with engine_of_others(models["student"], "/") as url:
        process = shell.start("train", "name=run", "schedule.num_steps=1", *RUN, *student(models), *words)
        router = wait_for_router(shell.cwd / "runs" / "run" / "routers.json", "policy", process)
        try:
            assert call(f"{router}/workers", {"url": url})
        finally:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
        assert f"register each: POST {router}/workers" in output
        metrics = shell.metrics("run")
        assert metrics[1]["weight_sync/is_verified"] == 1.0
        assert call(f"{url}/model_info")["weight_version"] == "1"
        logs = {path.stem for path in (shell.cwd / "runs" / "run" / "logs").glob("*.log")}
        engines = {"policy-main-0", "policy-second-0", "mirror-main-0"}
        assert logs == engines | {"policy-router", "mirror-router", "trainer-0"}
        assert shell.leftovers() == []


def wait_for_router(path, name, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and name in (urls := json.loads(path.read_text())):
            return urls[name]
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")
