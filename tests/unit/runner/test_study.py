import math
from pathlib import Path

import optuna
import pytest

from rlrecipes.config.compose import Interval, SearchSpace, read_search_space
from rlrecipes.errors import ConfigError
from rlrecipes.runner.study import run_study
from rlrecipes.tracking.log import MetricLog
from rlrecipes.tracking.sweeps import Point, PointState, find_sweep

OPTIONS = {
    "_target_": "somewhere",
    "metric": "reward/mean",
    "direction": "maximize",
    "num_points": 12,
    "at_once": 1,
    "sampler": "tpe",
    "seed": 0,
}
SPACE = read_search_space(["recipe=mine", "++optim.lr=tag(log,interval(1e-5,1e-1))", "algo=grpo,gspo"])


class Sweep:
    """Points whose runs are as good as their learning rate is near to 1e-3; grpo is better by 1."""

    def __init__(self, directory: Path) -> None:
        self.record = find_sweep(directory, "mine")
        self.directory, self.batches = directory, []
        self.fails = self.dies = self.stops = lambda words: False

    def register(self, words):
        if "algo=refused" in words:
            raise ConfigError("algo", "is refused", "choose another")
        run = str(self.directory / "run-{number}")
        return self.record.register([Point(-1, " ".join(words), tuple(words), "run-{number}", run)], None)[0]

    def launch(self, batch, first_number):
        self.batches.append(batch)
        for words in batch:
            if self.dies(words):
                raise KeyboardInterrupt
            point = self.record.find(words)
            if self.stops(words):
                self.record.set_state(point, PointState.INTERRUPTED)
                continue
            if self.fails(words):
                self.record.set_state(point, PointState.FAILED, "why")
                continue
            values = dict(word.split("=") for word in words)
            Path(point.run_dir).mkdir()
            log = MetricLog(Path(point.run_dir) / "metrics.jsonl")
            reward = -abs(math.log10(float(values["++optim.lr"])) + 3) + (values["algo"] == "grpo")
            log.append(1, {"reward/mean": -99.0})
            log.append(2, {"reward/mean": reward})
            self.record.set_state(point, PointState.FINISHED)

    def run(self, space=SPACE, **changes):
        run_study(space, OPTIONS | changes, self.record, self.register, self.launch)
        storage = optuna.storages.journal.JournalFileBackend(str(self.record.directory / "study.log"))
        return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(storage))


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path)


def test_what_is_searched_is_read_from_the_words():
    assert SearchSpace(("recipe=mine",), {"++optim.lr": Interval(1e-5, 1e-1, True), "algo": ("grpo", "gspo")}) == SPACE
    assert read_search_space(["seed=range(1,4)", "x=interval(0,1)"]).dimensions == {
        "seed": ("1", "2", "3"),
        "x": Interval(0.0, 1.0, False),
    }
    assert SPACE.to_words({"++optim.lr": 0.5, "algo": "grpo"}) == ["recipe=mine", "++optim.lr=0.5", "algo=grpo"]


def test_points_come_nearer_to_what_is_best_and_a_study_goes_on(sweep):
    study = sweep.run()
    values = [trial.value for trial in study.trials]
    assert len(values) == len(sweep.batches) == 12
    assert study.best_value > 0.5 and study.best_params["algo"] == "grpo"
    more = sweep.run(num_points=15)
    assert [trial.value for trial in more.trials[:12]] == values
    tried = [trial.params["++optim.lr"] for trial in more.trials]
    assert len(tried) == len(set(tried)) == 15
    assert len(sweep.run(num_points=15).trials) == 15 and len(sweep.batches) == 15


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_least_is_found_in_batches(sweep, sampler):
    study = sweep.run(direction="minimize", at_once=4, num_points=10, sampler=sampler)
    assert [len(batch) for batch in sweep.batches] == [4, 4, 2]
    assert study.best_value == min(trial.value for trial in study.trials)


def test_a_point_that_fails_or_is_refused_tells_optuna_so(sweep):
    sweep.fails = lambda words: "algo=gspo" in words
    space = SearchSpace(SPACE.fixed, {**SPACE.dimensions, "algo": ("grpo", "gspo", "refused")})
    study = sweep.run(space, sampler="random", num_points=12)
    states = {trial.params["algo"]: trial.state.name for trial in study.trials}
    assert states == {"grpo": "COMPLETE", "gspo": "FAIL", "refused": "FAIL"}
    assert not any("algo=refused" in words for batch in sweep.batches for words in batch)


def test_a_point_that_was_pruned_tells_optuna_so(sweep):
    launch = sweep.launch

    def prune(batch, first_number):
        launch(batch, first_number)
        for point in map(sweep.record.find, batch):
            sweep.record.set_state(point, PointState.PRUNED, "why")

    sweep.launch = prune
    assert {trial.state.name for trial in sweep.run(num_points=2).trials} == {"PRUNED"}


def test_a_point_that_was_running_is_run_again_as_it_was(sweep):
    sweep.dies = lambda words: len(sweep.batches) == 3
    with pytest.raises(KeyboardInterrupt):
        sweep.run(num_points=5)
    sweep.dies = lambda words: False
    study = sweep.run(num_points=5)
    assert sweep.batches[3] == sweep.batches[2]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 5
    assert len(sweep.record.read()) == 5


def test_a_point_that_a_signal_stopped_is_run_again_as_it_was(sweep):
    sweep.stops = lambda words: len(sweep.batches) == 2
    assert [trial.state.name for trial in sweep.run(num_points=3).trials] == ["COMPLETE", "RUNNING", "COMPLETE"]
    sweep.stops = lambda words: False
    assert [trial.state.name for trial in sweep.run(num_points=3).trials] == ["COMPLETE"] * 3
    assert sweep.batches[3] == sweep.batches[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metric": None}, "metric: is not given"),
        ({"metric": "reward/maen"}, "did you mean 'reward/mean'"),
        ({"at_once": 0}, "at_once"),
        ({"sampler": "tpee"}, "sampler"),
        ({"space": SearchSpace(("a=1",), {})}, "no value is searched"),
    ],
)
def test_options_that_do_not_fit_are_told_before_anything_is_asked(sweep, changes, says):
    with pytest.raises(ConfigError) as error:
        sweep.run(**changes)
    assert says in str(error.value)
    assert sweep.batches == [] and not sweep.record.directory.exists()
