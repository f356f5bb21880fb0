import json

import pytest

from rlrecipes.tracking.attempts import log_end, log_start, read_attempts
from rlrecipes.tracking.rollouts import (
    MAX_TABLE_ROWS,
    MAX_TEXT_CHARACTERS,
    RolloutLog,
    build_record,
    read_rollouts,
    to_mlflow_table,
)
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus


def build_group(index, rewards, status=RolloutStatus.COMPLETED, reason=""):
    prompt = Prompt(index, (1,), f"prompt {index}", label="x")
    return Group(
        prompt,
        tuple(Rollout(prompt, i, (), f"answer {r}", status, reward=r, reason=reason) for i, r in enumerate(rewards)),
    )


def test_first_best_and_worst_are_kept_once_each():
    groups = [build_group(0, [0.5, 1.0, 0.0]), build_group(1, [0.9, 0.1, 0.2])]
    train = build_record(3, "train", "words", groups)
    assert [(k.pick, k.prompt_index, k.reward) for k in train.kept] == [
        ("first", 0, 0.5),
        ("best", 0, 1.0),
        ("worst", 0, 0.0),
    ]
    evaluated = build_record(3, "eval", "words", groups)
    assert [(k.pick, k.reward) for k in evaluated.kept] == [
        ("first", 0.5), ("first", 0.9), ("best", 1.0), ("best", 0.2), ("best", 0.1), ("worst", 0.0),
    ]  # fmt: skip


def test_failures_are_counted_by_reason_and_texts_are_cut_visibly():
    groups = [build_group(0, [0.0] * 3, RolloutStatus.FAILED, "timeout"), build_group(1, [0.0], RolloutStatus.ABORTED)]
    long = Prompt(2, (1,), "p" * 9000)
    groups.append(Group(long, (Rollout(long, 0, (), "a", RolloutStatus.COMPLETED),)))
    record = build_record(1, "train", "words", groups, {"zero variance": 2})
    assert record.failures == {"timeout": 3, "aborted": 1} and record.filtered == {"zero variance": 2}
    assert record.num_rollouts == 5
    cut = build_record(1, "train", "words", groups[2:]).kept[0].prompt
    assert len(cut) == MAX_TEXT_CHARACTERS and "shortened from 9000 characters" in cut


def test_failures_of_dropped_groups_are_counted_and_their_rollouts_not_kept():
    dropped = [build_group(1, [0.0] * 2, RolloutStatus.FAILED, "timeout")]
    record = build_record(1, "train", "words", [build_group(0, [0.5, 1.0, 0.2])], {"zero_variance": 1}, dropped)
    assert record.failures == {"timeout": 2} and record.num_rollouts == 5
    assert {kept.prompt_index for kept in record.kept} == {0}


def test_a_log_survives_a_torn_line_and_forgets_later_steps(tmp_path):
    log = RolloutLog(tmp_path / "rollouts.jsonl")
    for step in range(1, 4):
        log.append(build_record(step, "train", "words", [build_group(step, [1.0, 0.0])]))
    with log.path.open("a") as file:
        file.write('{"step": 4, "kept"')
    before = read_rollouts(log.path)
    assert [record.step for record in before] == [1, 2, 3] and before[0].kept[0].response == "answer 1.0"
    log.truncate_after(2)
    log.append(build_record(3, "eval", "words", [build_group(9, [1.0])]))
    assert [(r.step, r.purpose) for r in read_rollouts(log.path)] == [(1, "train"), (2, "train"), (3, "eval")]


def test_a_disk_that_refuses_costs_a_warning(tmp_path, caplog):
    log = RolloutLog(tmp_path / "absent" / "rollouts.jsonl")
    log.append(build_record(1, "train", "words", [build_group(0, [1.0])]))
    log.truncate_after(0)
    log_start(tmp_path / "absent", 0)
    assert "rollouts of step 1 are not kept" in caplog.text and "attempts.jsonl cannot be written" in caplog.text


def test_the_table_for_mlflow_holds_evaluations_and_says_what_it_leaves_out():
    records = [build_record(step, "eval", "words", [build_group(0, [1.0, 0.0])]) for step in range(MAX_TABLE_ROWS)]
    table, note = to_mlflow_table([build_record(0, "train", "words", [build_group(0, [1.0])]), *records])
    data = json.loads(table)
    assert data["columns"][:3] == ["step", "dataset", "pick"] and len(data["data"]) == MAX_TABLE_ROWS
    assert data["data"][-1][0] == MAX_TABLE_ROWS - 1
    assert note == f"the newest {MAX_TABLE_ROWS} of {2 * MAX_TABLE_ROWS} rows; all are in rollouts.jsonl"
    assert to_mlflow_table(records[:5])[1] == ""


def test_attempts_tell_how_each_start_ended(tmp_path):
    log_start(tmp_path, 0)
    log_start(tmp_path, 4)
    log_end(tmp_path, "FAILED", "an engine died")
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write("[1]\n{torn")
    killed, failed = read_attempts(tmp_path)
    assert (killed.first_step, killed.ended, killed.status) == (0, None, "RUNNING")
    assert (failed.first_step, failed.status, failed.reason) == (4, "FAILED", "an engine died")
    assert failed.ended == pytest.approx(failed.started, abs=60)
