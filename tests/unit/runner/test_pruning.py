from pathlib import Path

import pytest

from rlrecipes.config.schema import PrunerConfig
from rlrecipes.errors import Pruned
from rlrecipes.runner.pruning import Pruner
from rlrecipes.tracking.log import MetricLog
from rlrecipes.tracking.sweeps import Point, PointState, find_sweep

ACCURACY = "eval/gsm8k/accuracy"
CONFIG = {"metric": ACCURACY, "percentile": 50.0, "min_points": 3, "num_warmup_steps": 0}


@pytest.fixture
def judge(tmp_path):
    """Judges a point at its last step, among others, each given as step -> value."""

    def judge(own, others, state=PointState.RUNNING, **changes):
        record = find_sweep(tmp_path, "mine")
        names = [f"run-{number}" for number in range(len(others) + 1)]
        record.register([Point(-1, n, (n,), n, str(tmp_path / n), state) for n in names], None)
        config = PrunerConfig.model_validate(CONFIG | changes)
        for name, series in zip(names, [own, *others], strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "metrics.jsonl").unlink(missing_ok=True)
            log = MetricLog(tmp_path / name / "metrics.jsonl")
            for step, value in series.items():
                log.append(step, {"response/max_tokens": 0.0} if value is None else {config.metric: value})
        try:
            Pruner(config, record, tmp_path / names[0]).check(max(own))
        except Pruned as error:
            return str(error)
        return ""

    return judge


OTHERS = [{4: 0.2, 8: 0.9}, {4: 0.4}, {4: 0.6, 8: 0.1}]


def test_worse_than_the_median_at_the_same_step_is_stopped(judge):
    told = f"{ACCURACY} was 0.39 at best, not among the best 50% of what 3 others had at step 4"
    assert judge({4: 0.39}, OTHERS) == told
    assert judge({4: 0.4}, OTHERS) == ""
    # What others had later does not count; what the point had earlier does.
    assert judge({2: 0.41, 4: 0.1}, OTHERS) == ""


@pytest.mark.parametrize("state", list(PointState))
def test_how_the_others_ended_does_not_matter(judge, state):
    assert judge({4: 0.39}, OTHERS, state)
    assert not judge({4: 0.41}, OTHERS, state)


def test_the_direction_is_the_metric_s_own(judge):
    worse_is_higher = {"metric": "response/truncated_fraction"}
    assert judge({4: 0.5}, OTHERS, **worse_is_higher)
    assert not judge({4: 0.3}, OTHERS, **worse_is_higher)


def test_a_percentile_says_how_many_go_on(judge):
    others = [{4: value / 10} for value in range(1, 6)]
    assert not judge({4: 0.25}, others, percentile=75.0)
    assert judge({4: 0.15}, others, percentile=75.0)
    assert judge({4: 0.35}, others, percentile=25.0)
    assert not judge({4: 0.45}, others, percentile=25.0)


def test_nothing_is_judged_too_early(judge):
    assert not judge({4: 0.0}, OTHERS[:2])
    assert not judge({4: 0.0, 8: 0.0}, OTHERS)  # two of three came so far
    assert judge({4: 0.0, 8: 0.0}, OTHERS, min_points=2)
    assert not judge({4: 0.0}, OTHERS, num_warmup_steps=4)
    assert judge({4: 0.0}, OTHERS, num_warmup_steps=3)
    assert not judge({4: 0.0, 5: None}, [{5: 1.0}] * 3)  # a step without the metric


def test_what_cannot_be_read_is_no_other(judge, tmp_path):
    assert judge({4: 0.0}, OTHERS)
    record = find_sweep(tmp_path, "mine")
    config = PrunerConfig.model_validate(CONFIG)
    log: Path = tmp_path / "run-1" / "metrics.jsonl"
    log.write_text("{\nno json\n")
    Pruner(config, record, tmp_path / "run-0").check(4)
    log.unlink()
    Pruner(config, record, tmp_path / "run-0").check(4)


def test_what_others_log_meanwhile_is_seen(judge, tmp_path):
    assert not judge({4: 0.3}, [*OTHERS[:2], {2: 0.1}])
    pruner = Pruner(PrunerConfig.model_validate(CONFIG), find_sweep(tmp_path, "mine"), tmp_path / "run-0")
    pruner.check(4)
    MetricLog(tmp_path / "run-3" / "metrics.jsonl").append(4, {ACCURACY: 0.6})
    with pytest.raises(Pruned):
        pruner.check(4)
