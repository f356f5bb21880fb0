import io
import json
import math

import pytest
from rich.console import Console

from rlrecipes.errors import InputError, RunError
from rlrecipes.tracking.compare import (
    compare_runs,
    draw_comparison,
    group_seeds,
    to_grid,
    to_json,
    to_markdown,
    to_table,
)
from rlrecipes.tracking.curves import choose_headlines, compute_mean, draw_curves, to_series
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.logged_runs import LoggedRun, load_runs
from rlrecipes.tracking.tracker import build_tracker

REWARDS = {"grpo-seed0": (0.1, 0.9, 0.8), "grpo-seed1": (0.2, 0.4, 0.6), "ppo": (0.0, math.inf, 0.3)}


@pytest.fixture
def tracked(mlflow_uri, tmp_path, fast_sink):
    for seed, (name, rewards) in enumerate(REWARDS.items()):
        tracker = build_tracker(tmp_path / name, mlflow_uri, "exp", name)
        command = ["engine", "--random-seed", str(seed), "--model", f"/runs/{name}/initial"]
        plan = {
            "name": name,
            "run_dir": f"/runs/{name}",
            "seed": seed,
            "algo": {"name": name.split("-")[0], "lr": 1e-3},
            "engines": [{"command": command}],
            "provenance": {"seed": f"override {seed}"},
        }
        tracker.log_plan(plan, "", "")
        for step, reward in enumerate(rewards):
            tracker.log_metrics(step, {"reward/mean": reward, "train/loss": -reward, "train/grad_norm": 1.0})
        assert tracker.finish()
    return mlflow_uri


def test_from_mlflow_to_table_markdown_json_and_picture(tracked, tmp_path):
    runs = load_runs(tracked, experiment="exp")
    assert [run.name for run in runs] == list(REWARDS)
    assert [to_series(run.records, "reward/mean") for run in runs] == [dict(enumerate(r)) for r in REWARDS.values()]
    comparison = compare_runs(runs)
    assert [row.field for row in comparison.params] == ["algo.name", "seed"]
    assert comparison.params[0].values == ("grpo", "grpo", "ppo")
    results = {row.field: row.values for row in comparison.results}
    assert results["reward/mean (last)"] == (0.8, 0.6, 0.3)
    assert results["reward/mean (best)"] == (0.9, 0.6, 0.3), "infinity is no best"
    assert results["status"] == ("finished",) * 3 and results["last step"] == (2, 2, 2)

    markdown = to_markdown(comparison)
    assert "|  | grpo-seed0 | grpo-seed1 | ppo |\n| --- | ---: | ---: | ---: |\n" in markdown
    assert "| reward/mean (best) | 0.9 | 0.6 | 0.3 |" in markdown
    parsed = json.loads(to_json(comparison))
    assert parsed[2]["run"] == "ppo" and parsed[2]["params"] == {"algo.name": "ppo", "seed": "2"}
    console = Console(file=io.StringIO(), width=100)
    console.print(to_table(comparison))
    assert "algo.name" in console.file.getvalue() and "grpo-seed1" in console.file.getvalue()

    assert list(group_seeds(runs)) == ["grpo", "ppo"] and len(group_seeds(runs)["grpo"]) == 2
    assert draw_comparison(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_chosen_by_name_or_id_in_the_order_asked(tracked):
    first = load_runs(tracked, ["grpo-seed1"])[0]
    assert [r.name for r in load_runs(tracked, ["ppo", first.run_id], metrics=["train/loss"])] == ["ppo", "grpo-seed1"]
    assert set(load_runs(tracked, ["ppo"], metrics=["train/loss"])[0].records[0].metrics) == {"train/loss"}


def test_unknown_names_are_input_errors_with_near_ones(tracked, tmp_path):
    with pytest.raises(InputError, match="'grpo-sed0'(?s:.*)did you mean 'grpo-seed0'"):
        load_runs(tracked, ["grpo-sed0"])
    with pytest.raises(InputError, match="did you mean 'exp'"):
        load_runs(tracked, experiment="exb")
    with pytest.raises(InputError, match="did you mean 'reward/mean'"):
        load_runs(tracked, metrics=["reward/meen"])
    with pytest.raises(InputError, match="no such database"):
        load_runs(f"sqlite:///{tmp_path}/absent.db")
    assert not (tmp_path / "absent.db").exists()


def test_a_server_that_does_not_answer_is_a_run_error():
    with pytest.raises(RunError, match="does not answer"):
        load_runs("http://127.0.0.1:1")


def test_after_a_resume_the_later_value_of_a_step_and_of_a_param_count(mlflow_uri, run_dir, fast_sink):
    for tp, rewards in ((1, {0: 0.0, 1: 0.1, 2: 0.2}), (2, {2: 0.7})):
        tracker = build_tracker(run_dir, mlflow_uri, "exp", "run")
        tracker.log_plan({"tp": tp}, "", "")
        tracker.resume(1)
        for step, reward in rewards.items():
            tracker.log_metrics(step, {"reward/mean": reward})
        assert tracker.finish()
    (run,) = load_runs(mlflow_uri)
    assert to_series(run.records, "reward/mean") == {0: 0.0, 1: 0.1, 2: 0.7}
    assert run.params == {"tp": "2"}


def build_run(name, params, values=(), run_id="0123456789"):
    records = tuple(MetricRecord(step, float(step), {"reward/mean": value}) for step, value in enumerate(values))
    return LoggedRun(name, run_id, "FINISHED", params, records)


def test_runs_of_one_name_get_labels_of_their_own():
    comparison = compare_runs([build_run("a", {}, run_id="111111xx"), build_run("a", {}, run_id="222222xx")])
    assert comparison.runs == ("a (111111)", "a (222222)")


def test_seeds_of_one_plan_are_found_whatever_their_directories():
    def run(seed, **params):
        run_dir = f"/runs/a{seed}"
        params |= {"run_dir": run_dir, "seed": str(seed), "engines.0.command": f'["--seed", "{seed}", "{run_dir}/hf"]'}
        return build_run(f"a{seed}", params, [seed])

    assert {label: len(seeds) for label, seeds in group_seeds([run(1), run(2), run(3, lr="1")]).items()} == {
        "a": 2,
        "a3": 1,
    }
    assert [row.field for row in compare_runs([run(1), run(2)]).params] == ["seed"]


def test_what_a_run_lacks_and_long_values_are_shown_so():
    comparison = compare_runs([build_run("a", {"x": "y" * 500}), build_run("b", {}, [0.5])])
    text = to_markdown(comparison)
    assert f"| x | {'y' * 57}... | - |" in text and "| reward/mean (last) | - | 0.5 |" in text
    assert json.loads(to_json(comparison))[0]["params"]["x"] == "y" * 500


def test_many_runs_become_rows():
    header, rows = to_grid(compare_runs([build_run(f"run{i}", {"lr": str(i)}, [i]) for i in range(12)]))
    assert header == ["", "lr", "status", "last step", "reward/mean (last)", "reward/mean (best)"]
    assert len(rows) == 12 and rows[3] == ["run3", "3", "finished", "0", "3", "3"]


def test_markup_and_pipes_in_values_are_taken_literally():
    comparison = compare_runs([build_run("a", {"x": "[red]|"}), build_run("b", {"x": "1"})])
    console = Console(file=io.StringIO(), width=100)
    console.print(to_table(comparison))
    assert "[red]|" in console.file.getvalue() and "[red]\\|" in to_markdown(comparison)


def test_runs_without_params_are_never_seeds_of_one_another():
    groups = group_seeds([build_run("a", {}, run_id="1"), build_run("b", {}, run_id="2")])
    assert list(groups) == ["a", "b"]


def test_the_mean_of_seeds_is_over_the_steps_all_have():
    assert compute_mean([{0: 1.0, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 4.0}]) == {0: 2.0, 1: 3.0}


def test_headlines_keep_their_order_and_leave_out_the_rest():
    names = ["time/step_s", "train/lr", "eval/b/accuracy", "reward/mean", "eval/a/accuracy", "not/known"]
    assert choose_headlines(names) == ["reward/mean", "eval/a/accuracy", "eval/b/accuracy", "time/step_s"]


@pytest.mark.parametrize("num_metrics", [1, 2, 3])
def test_panels_of_any_number_and_gaps_can_be_drawn(tmp_path, num_metrics):
    records = [MetricRecord(s, float(s), {"reward/mean": math.nan if s == 1 else s, "train/lr": 1.0}) for s in range(4)]
    names = ["reward/mean", "train/lr", "sft/loss"][:num_metrics]
    assert draw_curves({"a": [records], "b": [records, records[:2]]}, tmp_path / "c.png", names)
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_nothing_to_draw_writes_nothing(tmp_path):
    assert not draw_curves({"a": [[]]}, tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()
