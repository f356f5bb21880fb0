import io

import pytest
from rich.console import Console

from rlrecipes.tracking.progress import (
    LineProgress,
    LiveProgress,
    StepClock,
    build_progress,
    describe_step,
    format_duration,
)

METRICS = {"reward/mean": 0.4125, "train/approx_kl": 0.5, "train/ref_kl": 0.00123, "response/mean_tokens": 33.7}
METRICS |= {"time/step_s": 30.0}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(lines, clock):
    return LineProgress(40, "train", lines.append, clock)


def test_a_step_line_has_what_people_watch(progress, lines, clock):
    clock.now += 10
    progress.update_rollout(8, 8, 1234.5, 0.25)
    lines.clear()
    clock.now += 20
    progress.finish_step(0, METRICS)
    assert lines == [
        "train: step 1/40: reward 0.412, KL 0.0012, response 34 tokens, 1234 tokens/s, 30.0 s/step, 19m30s left"
    ]


def test_lines_inside_a_step_are_seldom(progress, lines, clock):
    for done in range(100):
        clock.now += 0.5
        progress.update_rollout(done, 100, 50.0, 0.25)
    assert len(lines) == 5 and lines[0] == "train: rollout: 19/100 prompts, 50 tokens/s, reward 0.250"


def test_fast_steps_are_seldom_too_but_the_first_and_the_last_are_shown(progress, lines, clock):
    for step in range(40):
        clock.now += 0.6
        progress.finish_step(step, {"sft/loss": 2.0, "time/step_s": 0.6})
    assert [line.split(":")[1] for line in lines] == [" step 1/40", " step 18/40", " step 35/40", " step 40/40"]
    assert lines[-1] == "train: step 40/40: loss 2.0000, 0.6 s/step, 0s left"


def test_the_end_of_an_evaluation_is_shown(progress, lines):
    progress.update_evaluation("chain_sum", 1, 2)
    progress.update_evaluation("chain_sum", 2, 2)
    assert lines == ["train: evaluation of chain_sum: 2/2 prompts"]


def test_the_eta_follows_the_last_ten_steps(clock):
    steps = StepClock(100, clock)
    for step in range(30):
        clock.now += 100.0 if step < 20 else 2.0
        eta_s = steps.finish_step(step, 2.0)
    assert eta_s == 140.0


def test_the_eta_counts_evaluations_between_steps_and_nothing_before_the_first(clock):
    steps = StepClock(3, clock)
    clock.now += 1000.0  # processes start, the model is measured before it is trained
    assert steps.finish_step(0, 2.0) == 4.0
    clock.now += 8.0
    assert steps.finish_step(1, 2.0) == 5.0


def test_evaluation_metrics_are_percent():
    assert describe_step({"eval/gsm8k/accuracy": 0.5, "time/step_s": 2.0}, 0.0) == ["eval/gsm8k 50.0%", "2.0 s/step"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (7500, "2h05m")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_file_gets_plain_lines_and_a_terminal_a_bar():
    plain = Console(file=io.StringIO())
    with build_progress(3, console=plain) as progress:
        assert isinstance(progress, LineProgress)
        progress.show("[bold]literally[/bold]")
        progress.finish_step(2, METRICS)
    text = plain.file.getvalue()
    assert text.startswith("[bold]literally[/bold]\ntrain: step 3/3: reward 0.412") and "\x1b" not in text

    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with build_progress(40, "grpo", first_step=10, console=terminal) as progress:
        assert isinstance(progress, LiveProgress)
        progress.update_rollout(3, 8, 1234.5, 0.25)
        progress._live.refresh()
        progress.update_evaluation("chain_sum", 5, 9)
        progress._live.refresh()
        progress.finish_step(10, METRICS | {"eval/chain_sum/accuracy": 0.5})
        progress.show("[bold]literally[/bold]")
    shown = terminal.file.getvalue()
    for part in (
        "grpo",
        "10/40",
        "prompts",
        "3/8",
        "1234 tokens/s",
        "eval chain_sum",
        "5/9",
        "11/40",
        "reward 0.412",
        "s/step",
    ):
        assert part in shown, part
    assert "[bold]literally[/bold]" in shown and "left" in shown
