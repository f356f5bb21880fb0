import io
import json
import math

import pytest
from rich.console import Console

from rlrecipes.errors import InputError, RunError
from rlrecipes.tracking.compare import compare_runs, draw_comparison, group_seeds
from rlrecipes.tracking.comparison_page import write_comparison
from rlrecipes.tracking.comparison_text import to_grid, to_json, to_markdown, to_table
from rlrecipes.tracking.curves import choose_headlines, compute_mean, draw_curves, to_series
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.logged_runs import LoggedRun, load_children, load_runs
from rlrecipes.tracking.tracker import build_tracker
from rlrecipes.tracking.uploader import build_client

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
    assert [variant.label for variant in comparison.variants] == ["grpo", "ppo"]
    assert [(row.field, row.values) for row in comparison.params] == [("algo.name", ("grpo", "ppo"))]
    results = {row.field: row.values for row in comparison.results}
    assert results["seeds"] == ("0, 1", "2") and results["status"] == ("finished",) * 2
    assert results["last step"] == (2.0, 2.0)
    assert [one.mean for one in results["reward/mean (last)"]] == pytest.approx([0.7, 0.3])
    assert results["reward/mean (last)"][0].values == (0.8, 0.6)
    assert [one.mean for one in results["reward/mean (best)"]] == pytest.approx([0.75, 0.3]), "infinity is no best"
    assert results["reward/mean (last)"][1].low is None, "one seed says nothing of others"

    markdown = to_markdown(comparison)
    assert "|  | grpo | ppo |\n| --- | ---: | ---: |\n" in markdown
    assert "| reward/mean (last) | 0.7 (0.6 to 0.8) | 0.3 |" in markdown
    assert "| reward/mean (last), interquartile mean | 0.7 | 0.3 |" in markdown and "95% interval" in markdown
    parsed = json.loads(to_json(comparison))
    assert parsed[1]["label"] == "ppo" and parsed[1]["params"] == {"algo.name": "ppo"}
    assert [run["seed"] for run in parsed[0]["runs"]] == ["0", "1"]
    assert parsed[0]["results"]["reward/mean (last)"]["interquartile_mean"] == pytest.approx(0.7)
    console = Console(file=io.StringIO(), width=100)
    console.print(to_table(comparison))
    assert "algo.name" in console.file.getvalue() and "0.7 (0.6 to 0.8)" in console.file.getvalue()
    assert draw_comparison(comparison, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_chosen_by_name_or_id_in_the_order_asked(tracked):
    first = load_runs(tracked, ["grpo-seed1"])[0]
    assert [r.name for r in load_runs(tracked, ["ppo", first.run_id], metrics=["train/loss"])] == ["ppo", "grpo-seed1"]
    assert set(load_runs(tracked, ["ppo"], metrics=["train/loss"])[0].records[0].metrics) == {"train/loss"}
    assert [r.name for r in load_runs(tracked, ["ppo"], metrics=[])] == ["ppo"]


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
    """What the first attempt did beyond the second's last step was taken back."""
    for tp, rewards in ((1, {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}), (2, {2: 0.7})):
        tracker = build_tracker(run_dir, mlflow_uri, "exp", "run")
        tracker.log_plan({"tp": tp}, "", "")
        tracker.resume(1)
        for step, reward in rewards.items():
            tracker.log_metrics(step, {"reward/mean": reward})
        assert tracker.finish()
    (run,) = load_runs(mlflow_uri)
    assert to_series(run.records, "reward/mean") == {0: 0.0, 1: 0.1, 2: 0.7}
    assert [record.step for record in run.records] == [0, 1, 2]
    assert run.params == {"tp": "2"}


def build_run(name, params, values=(), run_id="0123456789"):
    records = tuple(MetricRecord(step, float(step), {"reward/mean": value}) for step, value in enumerate(values))
    return LoggedRun(name, run_id, "FINISHED", params, records)


def test_runs_of_one_name_get_labels_of_their_own():
    comparison = compare_runs([build_run("a", {}, run_id="111111xx"), build_run("a", {}, run_id="222222xx")])
    assert [variant.label for variant in comparison.variants] == ["a (111111)", "a (222222)"]


def test_seeds_of_one_plan_are_found_whatever_their_directories():
    def run(seed, **params):
        run_dir = f"/runs/a{seed}"
        params |= {"run_dir": run_dir, "seed": str(seed), "engines.0.command": f'["--seed", "{seed}", "{run_dir}/hf"]'}
        return build_run(f"a{seed}", params, [seed])

    variants = group_seeds([run(1), run(2), run(3, lr="1")])
    assert {variant.label: variant.seeds for variant in variants} == {"a": ("1", "2"), "a3": ("3",)}
    assert compare_runs([run(1), run(2)]).params == ()


def test_what_a_run_lacks_and_long_values_are_shown_so():
    comparison = compare_runs([build_run("a", {"x": "y" * 500}), build_run("b", {}, [0.5])])
    text = to_markdown(comparison)
    assert f"| x | {'y' * 57}... | - |" in text and "| reward/mean (last) | - | 0.5 |" in text
    assert "| last step | - | 0 |" in text and "in brackets" not in text
    assert json.loads(to_json(comparison))[0]["params"]["x"] == "y" * 500


def test_many_variants_become_rows():
    header, rows = to_grid(compare_runs([build_run(f"run{i}", {"lr": str(i)}, [i]) for i in range(12)]))
    results = ["", "lr", "status", "last step", "reward/mean (last)", "reward/mean (best)"]
    assert header == [*results, "steps to reward/mean >= 0", "steps in all"]
    assert len(rows) == 12 and rows[3] == ["run3", "3", "finished", "0", "3", "3", "0", "0"]


def test_markup_and_pipes_in_values_are_taken_literally():
    comparison = compare_runs([build_run("a", {"x": "[red]|"}), build_run("b", {"x": "1"})])
    console = Console(file=io.StringIO(), width=100)
    console.print(to_table(comparison))
    assert "[red]|" in console.file.getvalue() and "[red]\\|" in to_markdown(comparison)


def test_runs_without_params_are_never_seeds_of_one_another():
    groups = group_seeds([build_run("a", {}, run_id="1"), build_run("b", {}, run_id="2")])
    assert [variant.label for variant in groups] == ["a", "b"]


def spend(name, rewards, seed=0, **params):
    """A run whose steps take 8 rollouts, 100 tokens and half an hour."""
    spent = {"rollout/num_rollouts": 8.0, "train/num_tokens": 100.0, "time/step_s": 1800.0}
    records = [MetricRecord(i, float(i), {"reward/mean": reward} | spent) for i, reward in enumerate(rewards, start=1)]
    return LoggedRun(name, name, "FINISHED", {"algo": "grpo", "seed": str(seed), **params}, tuple(records))


def test_what_it_took_to_reach_what_all_reached():
    devices = {"trainer.devices.0.node": "0", "trainer.devices.0.gpu": "0", "engines.0.devices.0.node": "0"}
    devices |= {"engines.0.devices.0.gpu": "1", "trainer.devices.1.node": "1", "trainer.devices.1.gpu": "0"}
    devices |= {"router.devices.0.node": "0", "router.devices.0.gpu": "null", "cluster.gpu_hour_price": "2.5"}
    fast = [spend("fast0", [0.4, 0.6, 0.9], 0, **devices), spend("fast1", [0.2, 0.6, 0.7], 1, **devices)]
    slow = spend("slow", [0.1, 0.2, 0.3, 0.55, 0.5], lr="1")
    rows = {row.field: row.values for row in compare_runs([*fast, slow]).efficiency}
    reached = "to reward/mean >= 0.55"
    assert rows[f"steps {reached}"] == (2, 4) and rows[f"rollouts {reached}"] == (16, 32)
    assert rows[f"tokens {reached}"] == (200, 400) and rows[f"hours {reached}"] == (1.0, 2.0)
    assert rows[f"GPU hours {reached}"] == (3.0, None) and rows[f"cost {reached}"] == (7.5, None)
    assert rows["hours in all"] == (1.5, 2.5) and rows["cost in all"] == (11.25, None)


def test_a_metric_to_be_lowered_is_reached_from_above():
    rows = {
        r.field: r.values for r in compare_runs([spend("a", [3.0, 1.0]), spend("b", [2.0, 1.5], lr="1")]).efficiency
    }
    assert "steps to reward/mean >= 2" in rows
    runs = [
        LoggedRun(n, n, "FINISHED", {"lr": n}, tuple(MetricRecord(i, i, {"sft/loss": v}) for i, v in enumerate(values)))
        for n, values in (("a", (3.0, 1.0)), ("b", (2.0, 1.5)))
    ]
    rows = {row.field: row.values for row in compare_runs(runs).efficiency}
    assert rows["steps to sft/loss <= 1.5"] == (1, 1)


def test_one_variant_has_nothing_to_reach():
    fields = [row.field for row in compare_runs([spend("a", [0.1, 0.2])]).efficiency]
    assert fields == ["steps in all", "rollouts in all", "tokens in all", "hours in all"]


def test_runs_nested_in_a_sweep_are_found_by_their_parent(tracked):
    client = build_client(tracked)
    runs = {run.name: run.run_id for run in load_runs(tracked)}
    parent = client.create_run(client.get_run(runs["ppo"]).info.experiment_id, run_name="sweep")
    for name in ("grpo-seed0", "ppo"):
        client.set_tag(runs[name], "mlflow.parentRunId", parent.info.run_id)
    for word in ("sweep", parent.info.run_id):
        assert sorted(run.name for run in load_children(tracked, word)) == ["grpo-seed0", "ppo"]
    with pytest.raises(InputError, match="no run is nested in 'ppo'"):
        load_children(tracked, "ppo")


def test_a_price_is_no_difference():
    runs = [
        spend("a", [0.1], **{"cluster.gpu_hour_price": "1"}),
        spend("b", [0.1], 1, **{"cluster.gpu_hour_price": "2"}),
    ]
    assert [variant.seeds for variant in group_seeds(runs)] == [("0", "1")]


def test_a_seed_that_measured_nothing_leaves_the_others_their_numbers():
    runs = [
        spend("a0", [0.1, 0.5]),
        LoggedRun("a1", "a1", "FAILED", {"algo": "grpo", "seed": "1"}, ()),
        spend("b", [0.4], lr="1"),
    ]
    comparison = compare_runs(runs)
    results = {row.field: row.values for row in comparison.results}
    assert results["status"][0] == "1 finished, 1 failed" and results["reward/mean (last)"][0].values == (0.5,)
    assert {row.field: row.values for row in comparison.efficiency}["steps to reward/mean >= 0.4"] == (2, 1)


def test_the_page_to_send_holds_everything_and_escapes_it(tmp_path):
    runs = [spend("<script>a", [0.1, 0.5], lr="</script><b>"), spend("b", [0.2, 0.4]), spend("b1", [0.2, 0.4], 1)]
    write_comparison(compare_runs(runs), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    body = text[: text.index('id="data"')]
    assert "&lt;script&gt;a" in body and "&lt;/script&gt;&lt;b&gt;" in body and "<b>" not in body
    assert "reward/mean (last), interquartile mean" in body and "steps to reward/mean &gt;= 0.4" in body
    assert text.count("</script>") == 3, "the data, plotly and the page's own"


def test_a_metric_nobody_logged_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'reward/mean'"):
        compare_runs([spend("a", [0.1])], ["reward/meen"])


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


def test_of_a_step_logged_twice_the_later_value_counts_also_where_it_is_smaller():
    logged = [(1, 0.5), (2, 0.9), (2, 0.3), (1, 0.7)]
    records = [MetricRecord(step, float(when), {"reward/mean": value}) for when, (step, value) in enumerate(logged)]
    assert list(to_series(records, "reward/mean").items()) == [(1, 0.7), (2, 0.3)]
