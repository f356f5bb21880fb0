"""`rlrecipes diff` between runs that only MLflow knows, as the tracker left them there."""

import json

import pytest

from rlrecipes.cli.diff import run
from rlrecipes.config.compose import compose
from rlrecipes.errors import InputError
from rlrecipes.runner.resolution import resolve_recipe
from rlrecipes.tracking.tracker import build_tracker

pytestmark = pytest.mark.usefixtures("fast_sink")
WORDS = {
    "first": "recipe=smollm2_135m_reasoning algo=grpo",
    "second": "recipe=smollm2_135m_reasoning algo=dapo optim.lr=3e-4",
}


@pytest.fixture
def logged(mlflow_uri, tmp_path):
    for name, words in WORDS.items():
        plan = resolve_recipe(compose(words.split()))
        tracker = build_tracker(tmp_path / name, mlflow_uri, "experiment", name)
        tracker.log_plan(plan.to_execution(), plan.to_yaml(), plan.describe_changes())
        assert tracker.finish()
    return mlflow_uri


def test_logged_runs_differ_as_their_recipes_do(logged, capsys):
    found = []
    for sides in ([*WORDS], [*WORDS.values()], ["first", WORDS["second"]]):
        run([*sides, "--tracking-uri", logged, "--format", "json"])
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    rates = [row for row in found[0] if row["path"] == "trainer.optim.lr"]
    assert [(row["right"], row["right_origin"]) for row in rates] == [(3e-4, "override optim.lr=3e-4")]
    run(["first", "first", "--tracking-uri", logged])
    shown = capsys.readouterr()
    assert "no difference" in shown.out and "Downloading" not in shown.err


def test_a_run_that_mlflow_does_not_have_is_told_with_the_nearest(logged):
    with pytest.raises(InputError, match=r"(?s)no run .secnd.*did you mean .second"):
        run(["first", "secnd", "--tracking-uri", logged])
