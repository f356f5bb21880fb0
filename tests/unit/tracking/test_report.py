"""What a report says, from files alone. How it looks is integration/test_report_page.py's."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from rlrecipes.tracking import report
from rlrecipes.tracking.attempts import log_end, log_start
from rlrecipes.tracking.log import MetricLog, MetricRecord
from rlrecipes.tracking.memory_report import compare_memory
from rlrecipes.tracking.panels import MAX_POINTS, PanelBuilder, thin
from rlrecipes.tracking.phases import tell_phases
from rlrecipes.tracking.report import write_report
from rlrecipes.tracking.rollouts import RolloutLog, build_record
from rlrecipes.tracking.tracker import RunStatus, build_tracker
from rlrecipes.types import RolloutStatus
from tests.unit.tracking.test_rollouts import build_group

GIB = 1 << 30
PLAN = {
    "name": "speller",
    "schedule": {"num_steps": 4},
    "choices": {"algo": "grpo", "served_model@policy": "x"},
    "changes": {"optim.lr": 0.001},
    "provenance": {"optim.lr": "override optim.lr=1e-3"},
    "cluster": {"gpu_hour_price": 2.0},
    "trainer": {"devices": [{"node": 0, "gpu": 0}, {"node": 0, "gpu": 1}]},
    "served_models": [],
    "memory": {
        "usable_bytes": 80 * GIB,
        "roles": [
            {"parts": {"rollout": {"engine.weights": 10 * GIB}, "train": {"a": 20 * GIB}, "update": {"a": 30 * GIB}}},
            {"parts": {"rollout": {"engine.weights": 11 * GIB, "engine.kv_cache": 5 * GIB}}},
        ],
    },
    "step_time": {"rollout_s": 6.0, "logprobs_s": 1.0, "train_s": 3.0, "weight_sync_s": 0.5, "checkpoint_s": 9.0},
}
STEP = {
    "rollout/num_rollouts": 8.0,
    "train/num_tokens": 100.0,
    "rollout/time_s": 5.0,
    "time/logprobs_s": 1.0,
    "train/time_s": 2.0,
    "weight_sync/time_s": 1.0,
    "time/step_s": 10.0,
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "system/gpu_memory_rollout_bytes": 20.0 * GIB,
    "system/gpu_memory_train_bytes": 27.0 * GIB,
    "system/gpu_memory_bytes": 27.0 * GIB,
    "system/memory_bytes": 3.0 * GIB,
}


def write_run(run_dir, plan=PLAN, status="FAILED", reason="engine policy-main-0 died"):
    run_dir.mkdir(parents=True)
    if plan is not None:
        (run_dir / "plan.yaml").write_text(yaml.safe_dump(plan))
    log_start(run_dir, 0)
    log_start(run_dir, 2)
    log = MetricLog(run_dir / "metrics.jsonl")
    rollouts = RolloutLog(run_dir / "rollouts.jsonl")
    for step in range(1, 5):
        log.append(step, STEP | {"reward/mean": step / 8, "train/entropy": float("nan")})
        failed = build_group(step, [0.0], RolloutStatus.FAILED, "timeout after 30 s")
        rollouts.append(build_record(step, "train", "words", [build_group(step, [0.0, 1.0, 0.5]), failed], {"same": 1}))
    log.append(4, {"eval/words/accuracy": 0.5, "time/eval_s": 3.0})
    rollouts.append(build_record(4, "eval", "words", [build_group(i, [i / 10]) for i in range(10)]))
    log.close()
    if status is not None:
        log_end(run_dir, status, reason)
    return run_dir


def read_page(run_dir):
    text = (run_dir / "report.html").read_text()
    shown = re.sub(r"<[^>]+>", " ", text[text.index("<main>") : text.index("</main>")])
    data = re.search(r'id="data">(.*?)</script>', text).group(1)
    return re.sub(r"\s+", " ", shown), json.loads(data)


def test_a_report_tells_everything_a_run_directory_holds(tmp_path):
    run_dir = write_run(tmp_path / "run")
    assert write_report(run_dir)
    shown, data = read_page(run_dir)
    assert "speller failed" in shown and "engine policy-main-0 died" in shown and "algo=grpo" in shown
    assert "4 of 4 steps" in shown and "32 rollouts trained on" in shown and "43.0 s at work" in shown
    assert "0.02 GPU hours, 2 GPUs" in shown and "0.05 cost, 2 a GPU hour" in shown
    assert "0.125 to 0.500, best 0.500 reward/mean" in shown
    assert "rollout 5 46.5% 6" in shown and "rest of the step 1 9.3%" in shown and "evaluation 3 7.0%" in shown
    assert "rollout 16.00 20.00 +25.0%" in shown and "train 30.00 27.00 -10.0%" in shown and "3.0 GiB" in shown
    assert "0 killed" in shown and "2 " in shown and "2 starts" in shown
    assert "failed or aborted in training 4 timeout after 30 s" in shown
    assert "groups dropped by a filter 4 same" in shown
    assert "optim.lr 0.001 override optim.lr=1e-3" in shown
    assert "21 of 26 rollouts" in shown, "three of each of four steps, nine of the evaluation"
    assert len(data["rollouts"]) == 21 and data["rollouts"][0]["step"] == 4
    assert [panel["name"] for panel in data["staleness"]] == ["staleness/mean", "staleness/max"]
    entropy = next(panel for panel in data["metrics"] if panel["name"] == "train/entropy")
    assert entropy["traces"][0]["y"] == [None] * 4, "JSON has no not-a-number"
    reward = next(panel for panel in data["panels"] if panel["name"] == "reward/mean")
    assert reward["traces"][0]["x"]["rollouts"] == [8, 16, 24, 32] and reward["traces"][0]["x"]["step"] == [1, 2, 3, 4]


def test_a_report_of_metrics_alone_says_what_is_missing(tmp_path):
    run_dir = tmp_path / "run"
    log = MetricLog(run_dir / "metrics.jsonl")
    log.append(1, {"sft/loss": 2.0, "time/step_s": 1.0})
    assert write_report(run_dir)
    shown, data = read_page(run_dir)
    assert "running, or killed" in shown and "The Plan predicts no memory" in shown and "No GPU was watched" in shown
    assert "Nothing was sampled" in shown and "None was kept" in shown and data["rollouts"] == []


def test_nothing_measured_writes_nothing(tmp_path):
    MetricLog(tmp_path / "metrics.jsonl").close()
    assert not write_report(tmp_path) and not write_report(tmp_path / "absent")
    assert not (tmp_path / "report.html").exists()


def test_a_failed_run_leaves_its_report_and_a_report_that_fails_leaves_the_run(tmp_path, caplog, monkeypatch):
    tracker = build_tracker(tmp_path / "run", None, "exp", "run")
    tracker.resume(-1)
    tracker.log_metrics(1, {"reward/mean": 1.0})
    tracker.finish(RunStatus.FAILED, "trainer rank 0 died")
    assert "trainer rank 0 died" in read_page(tmp_path / "run")[0]

    def fail(*arguments, **keywords):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(report, "write_page", fail)
    tracker = build_tracker(tmp_path / "run", None, "exp", "run")
    assert tracker.finish()
    assert [record.getMessage() for record in caplog.records] == ["the report is not written: ZeroDivisionError: no"]


def test_texts_of_models_and_data_cannot_leave_their_place(tmp_path):
    run_dir = tmp_path / "<img src=x onerror=alert(1)>"
    write_run(run_dir, plan=PLAN | {"name": "<script>alert(1)</script>"}, reason="</pre><script>alert(2)</script>")
    record = build_record(4, "eval", "</script><script>alert(3)</script>", [build_group(0, [1.0])])
    RolloutLog(run_dir / "rollouts.jsonl").append(record)
    write_report(run_dir)
    text = (run_dir / "report.html").read_text()
    page = text[: text.index("</main>")]
    assert "<script>" not in page and "<img" not in page and "&lt;script&gt;alert(2)" in page
    data = text[text.index('id="data">') : text.index("</script>")]
    assert "<" not in data, "nothing in the data can end it"
    assert text.count("</script>") == 3
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy.replace("&#39;", "'")


def test_many_rollouts_are_thinned_by_step_evaluations_first(tmp_path):
    records = [build_record(step, "train", "w", [build_group(step, [0.0, 1.0, 0.5])]) for step in range(1000)]
    records += [build_record(step, "eval", "w", [build_group(i, [0.1]) for i in range(9)]) for step in (500, 999)]
    chosen = report._choose_rollouts(records)
    assert len(chosen) <= report.MAX_ROLLOUTS and len(chosen) > report.MAX_ROLLOUTS // 2
    assert sum(each["purpose"] == "eval" for each in chosen) == 18
    assert chosen[0]["step"] == 999 and {each["step"] for each in chosen if each["purpose"] == "train"} > {999, 987}
    many = [build_record(step, "eval", "w", [build_group(i, [0.1]) for i in range(9)]) for step in range(300)]
    assert len(report._choose_rollouts([*records[:10], *many])) <= report.MAX_ROLLOUTS


def test_phases_share_the_whole_time():
    records = [
        MetricRecord(0, 0, {"weight_sync/time_s": 2.0, "time/eval_s": 4.0}),
        MetricRecord(1, 1, {"rollout/time_s": 3.0, "train/time_s": 1.0, "time/step_s": 6.0}),
        MetricRecord(1, 2, {"time/checkpoint_s": 8.0}),
    ]
    phases = tell_phases(records, None)
    assert [row[:3] for row in phases.rows] == [
        ("rollout", "3", "15.0%"),
        ("train", "1", "5.0%"),
        ("weight sync", "2", "10.0%"),
        ("rest of the step", "2", "10.0%"),
        ("evaluation", "4", "20.0%"),
        ("checkpoint", "8", "40.0%"),
    ]
    assert phases.columns == ["phase", "seconds a step", "share of the run"] and phases.steps == [0, 1]
    assert phases.bars[-1] == {"name": "checkpoint", "values": [0.0, 8.0]}


def test_memory_measured_without_a_prediction_and_the_other_way_round():
    measured = [MetricRecord(1, 0, {"system/gpu_memory_train_bytes": 2.0 * GIB, "system/gpu_memory_bytes": 2.0 * GIB})]
    assert compare_memory(measured, None)[0] == [("train", "", "2.00", "")]
    predicted = {"usable_bytes": GIB, "roles": [{"parts": {"train": {"a": GIB}}}]}
    assert compare_memory([], predicted)[0] == [("train", "1.00", "", "")]


def test_long_curves_are_thinned_and_keep_their_ends():
    kept = thin(range(12_345))
    assert len(kept) <= MAX_POINTS + 1 and (kept[0], kept[-1]) == (0, 12_344)
    assert thin([1, 2, 3]) == [1, 2, 3] and thin([]) == []


def test_seeds_have_a_mean_over_steps_and_over_what_was_spent():
    seeds = [
        [MetricRecord(1, 0, {"reward/mean": value, "rollout/num_rollouts": count})]
        for value, count in ((0.2, 8.0), (0.4, 16.0))
    ]
    traces = PanelBuilder({"a": seeds, "b": [seeds[0]]}).build("reward/mean")["traces"]
    assert [(t["label"], t["kind"], t["number"]) for t in traces] == [
        ("a", "seed", 0),
        ("a", "seed", 0),
        ("a, mean of 2", "mean", 0),
        ("b", "alone", 1),
    ]
    assert traces[2]["y"] == [0.3] and traces[2]["x"]["rollouts"] == [12.0]


@pytest.mark.parametrize("word", ["run", "absent"])
def test_a_report_can_be_written_anew(tmp_path, word):
    write_run(tmp_path / "run", status=None)
    command = [sys.executable, "-m", "rlrecipes.tracking.report", str(tmp_path / word)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if word == "run" else 2), done.stderr
    assert "report.html" in done.stdout if word == "run" else "no measured metrics.jsonl" in done.stderr
