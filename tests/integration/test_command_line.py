"""The command line as a user meets it: what it prints, what it refuses and how, and that refusing leaves no trace."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.nodes import load_plan
from tests.contract.tiny_model import build_model
from tests.integration.command_line import CommandLine

SFT = "recipe=quickstart_sft"
BIN = Path(sys.executable).parent


@pytest.fixture
def shell(tmp_path):
    shell = CommandLine(tmp_path / "work")
    yield shell
    shell.close()


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if "__pycache__" not in path.parts}


def check_refusal(output: str) -> None:
    """One message: it begins with the program's name, every problem has its fix, and nothing else is printed."""
    assert output.startswith("rlrecipes: "), output
    assert "Traceback" not in output and "Error executing" not in output and "internal error" not in output, output
    lines = output.removeprefix("rlrecipes: ").splitlines()
    assert len(lines) % 2 == 0, output
    for problem, fix in zip(lines[::2], lines[1::2], strict=True):
        assert re.match(r"\S.*: \S", problem), output
        assert re.match(r"    fix: \S", fix), output


def refuse(shell: CommandLine, *arguments: str) -> str:
    """Run what must be refused with exit code 2 and leave nothing behind."""
    before = files_of(shell.cwd)
    output = shell.run(*arguments, code=2, timeout_s=60)
    check_refusal(output)
    assert files_of(shell.cwd) == before
    return output


class TestRefusedByTheRecipe:
    def test_an_unknown_verb(self, shell):
        assert "did you mean 'plan'?" in refuse(shell, "pln", SFT)

    @pytest.mark.parametrize("prefix", ["", "+", "++"])
    def test_a_misspelt_key_wherever_it_is_set(self, shell, prefix):
        output = refuse(shell, "train", f"{prefix}algo.group_sze=4")
        assert output.startswith("rlrecipes: algo.group_sze (set in override algo.group_sze=4): ")
        assert "did you mean 'group_size'?" in output

    def test_a_misspelt_key_in_a_users_file(self, shell):
        write(shell, "mine/recipe/mine.yaml", "# @package _global_\nname: mine\noptim:\n  lrr: 1.0\n")
        output = refuse(shell, "train", "--config-dir", "mine", "recipe=mine")
        assert re.search(r"optim\.lrr \(set in \S*mine/recipe/mine\.yaml:4\)", output)
        assert "did you mean 'lr'?" in output

    def test_several_problems_at_once(self, shell):
        output = refuse(
            shell,
            "train",
            "algo=grpoo",
            "model=qwen_tiny",
            "reward=regex",
            "optim.lr=fast",
            "algo.clip_low=-1",
            "seed='1'",
            "algo.kl.placement=los",
            "schedule.num_stps=1",
        )
        assert output.count("fix:") == 8
        for hint in (
            "'grpo'",
            "qwen3_tiny",
            "reasoning_gym",
            "optim.lr",
            "algo.clip_low",
            "seed",
            "'loss'",
            "num_steps",
        ):
            assert hint in output

    @pytest.mark.parametrize("verb", ["plan", "train"])
    def test_a_wrong_group_hides_nothing_and_names_are_judged_before_a_run(self, shell, verb):
        write(shell, "my_rewards.py", "def verify(rollout, *, limit): ...\nraise SystemExit\n")
        output = refuse(
            shell,
            verb,
            "algo=grop",
            "algo.group_size=1",
            "reward.name=my_rewards:verify",
            "reward.options.limits=3",
            "topology.served_models.policy.router.polcy=manual",
            "topology.served_models.policy.server_groups.main.sglang.max_total_token=10",
            "parallel.megatron.num_layers=2",
            "data.tasks.datasets.spel_backward={}",
        )
        assert output.count("fix:") == 7
        for hint in (
            "algo (set in override algo=grop): has no option 'grop'; the rest is judged with 'grpo'",
            "algo.group_size (set in override algo.group_size=1): is 1",
            "reward.options.limits (set in override reward.options.limits=3): ",
            "did you mean 'limit'?",
            "did you mean 'policy'?",
            "did you mean 'max_total_tokens'?",
            "set model.shapes.num_layers",
            "did you mean 'spell_backward'?",
        ):
            assert hint in output

    def test_several_contradictions_at_once(self, shell):
        output = refuse(
            shell,
            "train",
            "model=hf",
            "model.name=m",
            "model.path=no/model",
            "data=jsonl",
            "data.name=d",
            "data.train_path=no.jsonl",
            "data.eval_path=none.jsonl",
            "schedule.num_train_steps=3",
            "algo.group_size=1",
        )
        assert output.count("fix:") == 5
        for where in ("model.path", "data.train_path", "data.eval_path", "schedule.num_train_steps", "algo.group_size"):
            assert f"{where} (set in " in output

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["quickstart_sft"], "did you mean 'recipe=quickstart_sft'?"),
            (["seed=1,2"], "sweep over them with -m"),
            (["algo.clip_low=[1"], "write key=value"),
            (["--config-dir", "nowhere"], "existing directory"),
            (["--config-name", "mine"], "recipe=NAME"),
            (["--save"], "write --save plan.yaml"),
            (["--save", "no/such/place.yaml"], "name a writable file"),
            (["-m", "seed=1,2", "--save", "plan.yaml"], "leave out -m"),
        ],
    )
    def test_what_is_no_command(self, shell, arguments, expected):
        assert expected in refuse(shell, "plan", *arguments)

    @pytest.mark.parametrize("verb", ["train", "eval"])
    def test_a_described_cluster_that_this_machine_is_not(self, shell, verb):
        output = shell.run(verb, SFT, "cluster=h200_8", code=2, timeout_s=60)
        assert "rlrecipes: cluster: h200_8 says 8 GPUs; here are " in output
        assert not (shell.cwd / "runs").exists()

    def test_a_traceback_is_shown_when_asked_for(self, shell, monkeypatch):
        monkeypatch.setenv("RLRECIPES_TRACEBACK", "1")
        output = shell.run("plan", "optim.lr=-1", code=2)
        assert "Traceback (most recent call last)" in output and "compose.py" in output
        assert "\nrlrecipes: optim.lr" in output


class TestRefusedPlans:
    def test_a_missing_one(self, shell):
        assert "No such file" in refuse(shell, "run", "plan.yaml")

    def test_none(self, shell):
        assert "rlrecipes run plan.yaml" in refuse(shell, "run")

    def test_one_that_is_no_yaml(self, shell):
        write(shell, "plan.yaml", "version: 1\nname: [a\n")
        assert "plan.yaml:3: is not YAML" in refuse(shell, "run", "plan.yaml")

    def test_one_of_another_kind(self, shell):
        write(shell, "plan.yaml", "name: a\n")
        assert "is not a Plan" in refuse(shell, "run", "plan.yaml")

    def test_an_edited_one_with_all_its_problems(self, shell):
        shell.run("plan", SFT, "--save", "plan.yaml")
        text = (shell.cwd / "plan.yaml").read_text()
        spoiled = {
            "\nseed: 0": "\nseed: zero",
            "\nresume:": "\nresum:",
            "    lr: 0.002": "    lr: -1.0",
            "  num_receiving_ranks:": "  num_receving_ranks:",
        }
        for good, bad in spoiled.items():
            assert text.count(good) == 1
            text = text.replace(good, bad)
        write(shell, "plan.yaml", text)
        output = refuse(shell, "run", "plan.yaml")
        for problem in ("seed (set in plan.yaml): is 'zero'", "trainer.optim.lr (set in plan.yaml): is -1.0"):
            assert problem in output
        assert "did you mean 'resume'?" in output and "did you mean 'num_receiving_ranks'?" in output


class TestShown:
    def test_a_plan_as_tables(self, shell):
        before = files_of(shell.cwd)
        output = shell.run("plan", SFT, "seed=3")
        for words in (
            "quickstart_sft  plan ",
            "trainer ranks 0 to 1",
            "policy-main-0",
            "policy-router",
            "override seed=3",
        ):
            assert words in output
        assert files_of(shell.cwd) == before

    def test_a_plan_as_the_yaml_that_is_saved_and_loaded_back_equal(self, shell):
        disk = "cluster.disk_bytes=1000000000000"  # what is free changes between two commands
        saved = shell.run("plan", SFT, disk, "--save", "plan.yaml")
        printed = shell.run("plan", SFT, disk, "--format", "yaml")
        assert printed == (shell.cwd / "plan.yaml").read_text()
        plan = load_plan(shell.cwd / "plan.yaml")
        assert plan.to_yaml() == printed
        assert saved.startswith(f"plan {plan.hash} saved")

    def test_the_whole_recipe_through_a_pipe(self, shell):
        recipe = yaml.safe_load(shell.run("train", SFT, "--cfg", "job"))
        assert set(recipe) == set(RunConfig.model_fields)
        assert recipe["name"] == "quickstart_sft"

    @pytest.mark.parametrize("arguments", ["--help", f"plan {SFT} --format yaml"])
    def test_a_pipe_that_closes_early_is_no_error(self, shell, arguments):
        env = os.environ | {"PYTHONUNBUFFERED": ""}  # what is printed then waits for the end, as it does by default
        command = ["bash", "-c", f"{BIN}/rlrecipes {arguments} | true"]
        done = subprocess.run(command, cwd=shell.cwd, env=env, capture_output=True, text=True, check=True)
        assert done.stderr == ""

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ([], "usage: rlrecipes <verb>"),
            (["--version"], "rlrecipes "),
            (["train", "--help"], "quickstart_sft"),
            (["train", "--hydra-help"], "--config-dir"),
            (["train", SFT, "--info", "defaults"], "recipe/quickstart_sft"),
            (["train", "--info", SFT], "Defaults List"),
            (["compare", "--help"], "--curves"),
        ],
    )
    def test_help_and_hydras_flags(self, shell, arguments, expected):
        assert expected in shell.run(*arguments)

    def test_a_users_own_recipe(self, shell):
        text = "# @package _global_\ndefaults:\n  - override /algo: sft\nname: mine\noptim:\n  lr: 0.25\n"
        write(shell, "mine/recipe/own.yaml", text)
        plan = yaml.safe_load(shell.run("plan", "--config-dir", "mine", "recipe=own", "seed=7", "--format=yaml"))
        assert (plan["name"], plan["algo"]["kind"], plan["trainer"]["optim"]["lr"]) == ("mine", "sft", 0.25)
        assert plan["provenance"]["optim.lr"].endswith("mine/recipe/own.yaml:6")


class TestTold:
    """To programs: --format json."""

    @pytest.mark.parametrize("verb", ["plan", "train"])
    def test_problems_of_every_judge_as_json(self, shell, verb):
        wrong = {
            "seed=x": "schema",
            "+sede=1": "schema",
            "algo.group_size=1": "group_has_a_baseline",
            "reward.name=mth": "reward",
            "cluster.partition=gpus": "cluster_facts",
            "parallel.megatron.fp32=true": "native_options",
            "parallel.tensor_model_parallel_size=3": "tp_divides_the_model",
        }
        before = files_of(shell.cwd)
        output = shell.run(verb, *wrong, "--format", "json", code=2)
        problems = json.loads(output)["problems"]
        assert {problem["origin"].removeprefix("override "): problem["rule"] for problem in problems} == {
            word.lstrip("+"): rule for word, rule in wrong.items()
        }
        for problem in problems:
            assert set(problem) == {"where", "problem", "fix", "origin", "rule"}
            assert problem["where"] and problem["problem"] and problem["fix"]
        assert files_of(shell.cwd) == before

    def test_what_is_no_recipe_as_json(self, shell):
        (problem,) = json.loads(shell.run("plan", "algo=grpp", "--format=json", code=2))["problems"]
        assert (problem["where"], problem["rule"]) == ("algo", "composition")
        assert "did you mean 'grpo'?" in problem["fix"]

    def test_a_plan_as_json(self, shell):
        plan = json.loads(shell.run("plan", SFT, "seed=7", "--format", "json"))
        assert (plan["name"], plan["seed"], plan["provenance"]["seed"]) == ("quickstart_sft", 7, "override seed=7")

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["plan", "--format", "xml"], "allowed: html, json, table, yaml"),
            (["plan", SFT, "--format"], "write --format json"),
            (["train", SFT, "--format", "yaml"], "allowed: json, text"),
            (["plan", SFT, "--format", "json", "--format=yaml"], "give it once"),
            (["plan", SFT, "--save", "--format=json"], "write --save plan.yaml"),
        ],
    )
    def test_a_format_that_is_none(self, shell, arguments, expected):
        assert expected in shell.run(*arguments, code=2)


class TestSweeps:
    def test_each_value_has_its_own_plan_and_directory(self, shell):
        before = files_of(shell.cwd)
        output = shell.run("plan", "-m", SFT, "seed=1,2", "--format", "yaml")
        plans = list(yaml.safe_load_all(output))
        assert [plan["seed"] for plan in plans] == [1, 2]
        assert [plan["run_dir"] for plan in plans] == ["runs/quickstart_sft-0", "runs/quickstart_sft-1"]
        assert files_of(shell.cwd) == before

    def test_a_failing_job_stops_the_sweep_with_its_error(self, shell):
        output = shell.run("plan", SFT, "-m", "seed=1,-2,3", "--format", "yaml", code=2)
        plans, _, error = output.partition("rlrecipes: ")
        assert [plan["seed"] for plan in yaml.safe_load_all(plans)] == [1]
        check_refusal("rlrecipes: " + error)
        assert error.startswith("seed (set in override seed=-2): is -2")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_model(path)
    return path


@pytest.fixture
def recipe(shell, model_path):
    """Arguments that work; a test spoils one part."""
    write(shell, "good.jsonl", '{"prompt": "ab", "label": "x"}\n{"prompt": "cd", "label": "y"}\n')
    return [
        "model=hf",
        "model.name=tiny",
        f"model.path={model_path}",
        "data=jsonl",
        "data.name=mine",
        "data.train_path=good.jsonl",
        "data.eval_path=good.jsonl",
        "data.apply_chat_template=false",
        "reward.name=letters:count_vowels",
        "rollout.evaluation.num_prompts=2",
        "tracking=local",
        "name=run",
    ]


class TestRefusedWhenInputsAreRead:
    """By `train` and `eval` before any process starts."""

    def refuse(self, warm, shell, *arguments: str, left: frozenset[str] = frozenset()) -> str:
        before = files_of(shell.cwd)
        output = warm.run(shell.cwd, *arguments, code=2)
        said, message, rest = output.partition("rlrecipes: ")
        assert said == "" or re.fullmatch(r"run: plan \w+, run directory \S+\n(  note: .*\n)*", said), output
        check_refusal(message + rest)
        assert files_of(shell.cwd) - before == left
        return output

    def test_a_malformed_line(self, warm, shell, recipe):
        write(shell, "bad.jsonl", '{"prompt": "ab", "label": "x"}\n{"prompt": oops}\n[1]\n')
        output = self.refuse(warm, shell, "eval", *recipe, "data.eval_path=bad.jsonl")
        assert "bad.jsonl:2: not JSON" in output and "bad.jsonl:3: " in output

    def test_a_prompt_that_is_too_long(self, warm, shell, recipe):
        write(shell, "bad.jsonl", json.dumps({"prompt": "a" * 9, "label": "x"}) + "\n")
        overrides = ["data.eval_path=bad.jsonl", "data.max_prompt_tokens=8", "rollout.evaluation.num_prompts=1"]
        output = self.refuse(warm, shell, "eval", *recipe, *overrides)
        assert "bad.jsonl:1: " in output and "9" in output and "8" in output

    def test_an_empty_file(self, warm, shell, recipe):
        write(shell, "bad.jsonl", "")
        assert "bad.jsonl" in self.refuse(warm, shell, "eval", *recipe, "data.eval_path=bad.jsonl")

    def test_fewer_rows_than_evaluated(self, warm, shell, recipe):
        output = self.refuse(warm, shell, "eval", *recipe, "rollout.evaluation.num_prompts=3")
        assert "set rollout.evaluation.num_prompts=2 or less" in output

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("maths", "did you mean 'math'?"),
            ("no_such_module:verify", "there is no module 'no_such_module'"),
            ("letters:count_vowel", "did you mean 'count_vowels'?"),
            ("wrong:no_rollout", "takes 0 positional arguments; it is called with (rollout)"),
            ("wrong:needs_more", "give it in reward.options"),
            ("broken:verify", "cannot be imported: ZeroDivisionError"),
        ],
    )
    def test_a_reward_that_is_none(self, warm, shell, recipe, name, expected):
        write(shell, "wrong.py", "def no_rollout(*, a=1): ...\ndef needs_more(rollout, *, threshold): ...\n")
        write(shell, "broken.py", "def verify(rollout): ...\n1 / 0\n")
        assert expected in self.refuse(warm, shell, "eval", *recipe, f"reward.name={name}")

    def test_a_malformed_line_of_the_training_file(self, warm, shell, recipe):
        write(shell, "bad.jsonl", '{"prompt": "ab"\n')
        left = frozenset({"runs", "runs/run", "runs/run/.lock"})
        output = self.refuse(warm, shell, "train", *recipe, "data.train_path=bad.jsonl", left=left)
        assert "bad.jsonl:1: not JSON" in output

    def test_a_checkpoint_that_is_not_there(self, warm, shell, recipe):
        assert "holds no checkpoint" in self.refuse(warm, shell, "train", *recipe, "resume=required")

    def test_a_directory_that_another_process_uses(self, warm, shell, recipe):
        write(shell, "runs/run/.lock", "")
        with (shell.cwd / "runs" / "run" / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert "another process runs in runs/run" in self.refuse(warm, shell, "train", *recipe)

    def test_a_directory_that_cannot_be_made(self, warm, shell, recipe):
        assert "choose a writable place" in self.refuse(warm, shell, "train", *recipe, "runs_dir=good.jsonl")


def test_a_model_is_evaluated_by_the_engine(shell, recipe):
    overrides = ["rollout.sampling.max_new_tokens=8", "rollout.evaluation.num_samples_per_prompt=2"]
    output = shell.run("eval", *recipe, *overrides, timeout_s=120)
    values = {name: float(value) for name, value in re.findall(r"^(eval/\S+): (\S+)$", output, re.MULTILINE)}
    assert 0.0 <= values["eval/mine/accuracy"] <= 1.0
    assert any(name.startswith("eval/mine/pass_at") for name in values)
    assert shell.leftovers() == []
    assert not {name for name in files_of(shell.cwd) if "checkpoint" in name or "metrics" in name}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    from rlrecipes.tracking.tracker import build_tracker
    from rlrecipes.tracking.uploader import build_client

    root = tmp_path_factory.mktemp("compare") / "runs"
    root.mkdir()
    build_client(f"sqlite:///{root / 'mlflow.db'}")  # its tables take longer on a busy host than a run waits at its end
    for name, lr, gain in (("slow", 0.1, 0.1), ("fast", 0.2, 0.4)):
        tracker = build_tracker(root / name, f"sqlite:///{root / 'mlflow.db'}", "rlrecipes", name)
        tracker.log_plan({"name": name, "trainer": {"optim": {"lr": lr}}, "seed": 5}, "name: x\n", "")
        for step in range(3):
            tracker.log_metrics(step, {"reward/mean": gain * step, "train/loss": 1.0 - gain * step})
        assert tracker.finish()
    return root


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory):
    """Three points, each in a directory of its own: two seeds, and another learning rate."""
    from rlrecipes.config.compose import compose
    from rlrecipes.plan.nodes import HostNode
    from rlrecipes.plan.resolve import resolve
    from rlrecipes.tracking.tracker import build_tracker

    root = tmp_path_factory.mktemp("sweep")
    host = HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34)
    for seed, lr in ((1, 0.25), (2, 0.25), (3, 0.5)):
        run_dir = root / str(seed) / "run"
        recipe = compose([f"seed={seed}", f"optim.lr={lr}", "name=run", f"run_dir={run_dir}", "tracking=local"])
        tracker = build_tracker(run_dir, None, "", "run")
        (run_dir / "plan.yaml").write_text(resolve(recipe.config, (host,), recipe.origins).to_yaml())
        tracker.resume(-1)
        tracker.log_metrics(1, {"reward/mean": float(seed), "time/step_s": 1.0})
        assert tracker.finish()
    return root


class TestCompare:
    def test_a_table_and_the_curves(self, warm, shell, runs_dir):
        output = warm.run(shell.cwd, "compare", "slow", "fast", "--runs-dir", str(runs_dir), "--curves", "both.png")
        assert "slow" in output and "fast" in output and "trainer.optim.lr" in output
        assert "seed" not in output
        assert (shell.cwd / "both.png").read_bytes().startswith(b"\x89PNG")

    def test_markdown(self, warm, shell, runs_dir):
        output = warm.run(shell.cwd, "compare", "--runs-dir", str(runs_dir), "--format", "markdown")
        assert "| slow | fast |" in re.sub(" +", " ", output)

    def test_json(self, warm, shell, runs_dir):
        output = warm.run(
            shell.cwd, "compare", "--runs-dir", str(runs_dir), "--format", "json", "--metric", "reward/mean"
        )
        assert "0.8" in json.dumps(json.loads(output))

    def test_a_sweep_of_directories_without_mlflow(self, warm, shell, sweep_dir):
        words = ["compare", "--sweep", str(sweep_dir)]
        output = warm.run(shell.cwd, *words, "--format", "json", "--curves", "c.png", "--html", "page.html")
        first, second = json.loads(output)
        assert [first["label"], second["label"]] == ["run (1/run)", "run (3/run)"]
        assert [run["seed"] for run in first["runs"]] == ["1", "2"] and len(second["runs"]) == 1
        assert second["params"] == {"trainer.optim.lr": "0.5"}
        assert first["results"]["reward/mean (last)"]["values"] == [1.0, 2.0]
        assert "steps to reward/mean >= 1.5" in first["efficiency"]
        assert files_of(shell.cwd) > {"c.png", "page.html"}
        output = warm.run(shell.cwd, "compare", str(sweep_dir / "1" / "run"), "run", "--runs-dir", str(sweep_dir / "3"))
        assert "trainer.optim.lr" in output and "seed" in output and "page" not in output

    def test_a_sweep_that_is_none(self, warm, shell, sweep_dir):
        for words, told in (
            ([str(shell.cwd)], "holds no run"),
            (["nowhere"], "no such database"),
            ([str(sweep_dir), "run"], "give runs or a sweep"),
        ):
            output = warm.run(shell.cwd, "compare", "--sweep", *words, code=2)
            check_refusal(output)
            assert told in output
        output = warm.run(shell.cwd, "compare", "--sweep", str(sweep_dir), "--html", "absent/page.html", code=2)
        assert "absent/page.html" in output and "name a writable file" in output

    def test_an_unknown_run(self, warm, shell, runs_dir):
        output = warm.run(shell.cwd, "compare", "fsat", "--runs-dir", str(runs_dir), code=2)
        check_refusal(output)
        assert "did you mean 'fast'" in output
        assert not (shell.cwd / "curves.png").exists()

    def test_no_database(self, warm, shell):
        output = warm.run(shell.cwd, "compare", code=2)
        check_refusal(output)
        assert "no such database" in output and "train a run first" in output
        assert files_of(shell.cwd) == {"letters.py", "sitecustomize.py"}

    def test_an_unknown_format(self, shell):
        assert "--format" in refuse(shell, "compare", "--format", "xml")


def write(shell: CommandLine, name: str, text: str) -> None:
    path = shell.cwd / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_problems_of_values_and_of_rules_are_told_together(tmp_path):
    shell = CommandLine(tmp_path)
    output = shell.run("plan", "optim.lr=-1", "+algo.group_sze=4", "schedule.num_train_steps=3", code=2)
    for where in ("optim.lr", "algo.group_sze", "schedule.num_train_steps"):
        assert where in output
