import hashlib
import os
from dataclasses import replace

import orjson
import pytest

from rlrecipes.data.reasoning_tasks import TaskSpec, run_write_tasks
from rlrecipes.errors import ConfigError, DataError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SPEC = TaskSpec(
    {"chain_sum": SUMS, "basic_arithmetic": {}}, 20, 6, 7, "Q: {question}", "\\boxed{{answer}}"
)  # fmt: skip


def read(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "sub" / "train.jsonl", tmp_path / "sub" / "eval.jsonl"


def test_rows_take_turns_and_no_question_stands_twice(paths):
    run_write_tasks(*paths, SPEC)
    train, held_out = map(read, paths)
    assert (len(train), len(held_out)) == (20, 6)
    assert [row["metadata"]["dataset"] for row in train[:4]] == ["chain_sum", "basic_arithmetic"] * 2
    questions = [row["prompt"] for row in train + held_out]
    assert len(set(questions)) == 26
    assert questions[0].startswith("Q: ") and questions[0][3:] == train[0]["metadata"]["entry"]["question"]
    assert train[0]["response"] == f"\\boxed{{{train[0]['label']}}}"
    assert sorted(os.listdir(paths[0].parent)) == ["eval.jsonl", "train.jsonl", "train.jsonl.tasks.json"]


def test_the_same_spec_gives_the_same_bytes_and_writes_once(paths, tmp_path):
    run_write_tasks(*paths, SPEC)
    other = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    run_write_tasks(*other, SPEC)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in other]
    before = paths[0].stat().st_ino
    run_write_tasks(*paths, SPEC)
    assert paths[0].stat().st_ino == before
    run_write_tasks(*paths, replace(SPEC, seed=8))
    assert paths[0].read_bytes() != other[0].read_bytes()


def test_a_killed_writer_is_made_good(paths):
    run_write_tasks(*paths, SPEC)
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in paths]
    paths[1].unlink()
    run_write_tasks(*paths, SPEC)
    assert [hashlib.sha256(path.read_bytes()).digest() for path in paths] == digests


def test_files_of_somebody_else_are_kept(paths):
    paths[0].parent.mkdir()
    paths[0].write_text("mine\n")
    with pytest.raises(DataError, match=r"was not written by data\.tasks"):
        run_write_tasks(*paths, SPEC)
    paths[1].write_text("mine too\n")
    run_write_tasks(*paths, SPEC)
    assert [path.read_text() for path in paths] == ["mine\n", "mine too\n"]


@pytest.mark.parametrize(
    ("datasets", "where", "problem"),
    [
        ({"chain_sm": {}}, "data.tasks.datasets.chain_sm", "did you mean 'chain_sum'"),
        ({"chain_sum": {"min_term": 2}}, "data.tasks.datasets.chain_sum", "unexpected keyword argument 'min_term'"),
        ({"chain_sum": {"min_terms": 9}}, "data.tasks.datasets.chain_sum", "max_terms must be >= min_terms"),
        ({"chain_sum": {"seed": 1}}, "data.tasks.datasets.chain_sum.seed", "data.tasks.seed"),
        ({"rubiks_cube": {}}, "data.tasks.datasets.rubiks_cube", "for its own answer"),
        ({}, "data.tasks.datasets", "names no dataset"),
    ],
)
def test_bad_tasks_are_named(paths, datasets, where, problem):
    with pytest.raises(ConfigError) as caught:
        run_write_tasks(*paths, replace(SPEC, datasets=datasets))
    assert caught.value.problems[0].where == where
    assert problem in str(caught.value)
    assert not paths[0].exists()


def test_too_few_distinct_questions_are_an_error(paths):
    with pytest.raises(DataError, match="distinct questions were found of 5006"):
        run_write_tasks(*paths, replace(SPEC, datasets={"chain_sum": SUMS}, num_train_rows=5000))
    assert not paths[0].exists()


def test_many_questions_are_found_where_there_are_many(paths):
    """Two-digit sums and differences: 16200 questions, beside 200 of one digit that keep coming back."""
    datasets = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
    run_write_tasks(*paths, replace(SPEC, datasets=datasets, num_train_rows=2000))
    assert len({row["prompt"] for row in read(paths[0]) + read(paths[1])}) == 2006


def test_a_place_that_cannot_be_written_is_named(paths):
    paths[0].parent.write_text("a file where a directory should be")
    with pytest.raises(DataError, match="cannot be written"):
        run_write_tasks(*paths, SPEC)


def test_templates_may_name_any_fact_of_a_task(paths):
    words = {"spell_backward": {"min_word_len": 3, "max_word_len": 5}}
    run_write_tasks(*paths, TaskSpec(words, 3, 1, 1, "{word}>", "{answer}."))
    for row in read(paths[0]):
        word = row["metadata"]["entry"]["metadata"]["word"]
        assert (row["prompt"], row["response"]) == (word + ">", word[::-1] + ".")
    with pytest.raises(ConfigError, match="'word'") as caught:
        run_write_tasks(*paths, TaskSpec(words, 3, 1, 2, "{wrd}>"))
    assert caught.value.problems[0].where == "data.tasks.prompt_template"


def test_templates_may_use_whatever_the_task_tells(paths):
    sums = {"chain_sum": SUMS}
    spec = replace(SPEC, datasets=sums, prompt_template="{expression}=", response_template="{answer}!")
    run_write_tasks(*paths, spec)
    row = read(paths[0])[0]
    entry = row["metadata"]["entry"]
    assert row["prompt"] == entry["metadata"]["expression"] + "="
    assert (row["label"], row["response"]) == (entry["answer"], entry["answer"] + "!")
    with pytest.raises(ConfigError, match="did you mean 'expression'"):
        run_write_tasks(*paths, replace(SPEC, datasets=sums, prompt_template="{expresion}"))
