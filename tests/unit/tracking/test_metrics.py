import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlrecipes.errors import ContractError
from rlrecipes.tracking.metrics import check_metrics, find_metric, iterate_metrics, render_docs

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_every_metric_says_what_it_is_and_how_to_read_it():
    metrics = list(iterate_metrics())
    assert len({m.name for m in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.unit and metric.explanation and metric.reading, metric.name
        assert "|" not in metric.explanation + metric.reading, metric.name
        assert "\n" not in metric.explanation + metric.reading, metric.name


def test_names_follow_the_words_of_the_design():
    for metric in iterate_metrics():
        last = metric.name.split("/")[-1]
        assert (metric.unit == "s") == (last.endswith("_s") and "_per_" not in last), metric.name
        assert not (last.endswith("_fraction") and metric.unit != "fraction"), metric.name
        assert not (last.endswith("_bytes") and metric.unit != "bytes"), metric.name


def test_docs_are_current():
    assert DOCS.read_text() == render_docs(), "run: python -m rlrecipes.tracking.metrics > docs/metrics.md"


def test_values_of_every_number_type_become_floats():
    checked = check_metrics({"reward/mean": np.float32(0.5), "rollout/num_groups": 3, "weight_sync/is_verified": True})
    assert checked == {"reward/mean": 0.5, "rollout/num_groups": 3.0, "weight_sync/is_verified": 1.0}
    assert all(type(value) is float for value in checked.values())


def test_open_families_take_one_segment():
    assert find_metric("eval/gsm8k/accuracy").name == "eval/<dataset>/accuracy"
    assert find_metric("eval/gsm8k/pass_at_8").name == "eval/<dataset>/pass_at_<k>"
    assert find_metric("reward_part/format").unit == "reward"
    assert find_metric("eval/a/b/accuracy") is None
    assert find_metric("reward_part/") is None


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("reward/meen", "'reward/mean'"),
        ("eval/gsm8k/acuracy", "'eval/gsm8k/accuracy'"),
        ("train/grad-norm", "'train/grad_norm'"),
        ("policy_loss", "'train/policy_loss'"),
        ("zzz", "docs/metrics.md"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, suggestion):
    with pytest.raises(ContractError) as caught:
        check_metrics({"reward/mean": 1.0, name: 1.0})
    assert caught.value.problems[0].where == f"metrics.{name}"
    assert suggestion in caught.value.problems[0].fix


def test_all_unknown_names_are_reported_together():
    with pytest.raises(ContractError, match="'reward/meen', 'train/los'"):
        check_metrics({"reward/meen": 1.0, "train/los": 1.0})


@pytest.mark.parametrize("value", ["0.5", None, [1, 2], np.zeros(2)])
def test_a_value_that_is_no_number_is_refused(value):
    with pytest.raises(ContractError, match="not a number"):
        check_metrics({"reward/mean": value})


def test_importing_the_room_costs_no_library():
    code = (
        "import sys, rlrecipes.tracking.tracker, rlrecipes.tracking.compare, rlrecipes.tracking.progress\n"
        "print([m for m in ('mlflow', 'rich', 'matplotlib', 'torch', 'numpy', 'psutil') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
