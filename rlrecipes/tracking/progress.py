"""Progress of long work for people: a live bar on a terminal, plain lines elsewhere. Owns no numbers and no files."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MIN_LINE_INTERVAL_S = 10.0
_NUM_STEPS_FOR_ETA = 10
_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "train/ref_kl", "{:.4f}"),
    ("KL", "train/approx_kl", "{:.4f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("response", "response/mean_tokens", "{:.0f} tokens"),
)


class Progress(Protocol):
    """Where a run reports how far it is. Used as a context manager, from one thread."""

    def __enter__(self) -> Self:
        """Start showing."""

    def __exit__(self, *exception: object) -> None:
        """Stop showing; what was printed stays."""

    def update_rollout(self, done: int, total: int, tokens_per_s: float, reward: float) -> None:
        """Report the collection of the current step.

        Args:
            done: prompts whose groups are complete.
            total: prompts of the step.
            tokens_per_s: generated, by all engines.
            reward: mean so far.
        """

    def update_evaluation(self, dataset: str, done: int, total: int) -> None:
        """Report an evaluation.

        Args:
            dataset: its name.
            done: prompts answered and rewarded.
            total: prompts of the dataset.
        """

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step, of RL or SFT.

        Args:
            step: its number, from 0.
            metrics: as logged, ``time/step_s`` among them; of the others what is missing is not shown.
        """

    def show(self, text: str) -> None:
        """Print a line above the bars."""


class StepClock:
    """Tells how long what is left takes.

    Args:
        total_steps: of the run.
        clock: seconds.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._last = math.inf
        self._durations: deque[float] = deque(maxlen=_NUM_STEPS_FOR_ETA)

    def now(self) -> float:
        """Seconds on the clock."""
        return self._clock()

    def finish_step(self, step: int, own_s: float) -> float:
        """Take the time.

        Args:
            step: that has ended, from 0.
            own_s: seconds of the step itself, without an evaluation or checkpoint after it.

        Returns:
            The expected seconds of all that are left, from the mean of the last ten: each from the end of the one
            before, so that evaluations and checkpoints count; the first by itself, since before it the run started.
        """
        now = self._clock()
        self._durations.append(max(own_s, now - self._last))
        self._last = now
        return sum(self._durations) / len(self._durations) * max(0, self._total_steps - step - 1)


def build_progress(
    total_steps: int, title: str = "train", first_step: int = 0, console: Console | None = None
) -> Progress:
    """Choose how to show progress.

    Args:
        total_steps: of the run, those before a resume included.
        title: what is going on.
        first_step: where the run starts or resumes.
        console: where to show it; standard error by default.

    Returns:
        A live bar when the console is a terminal, plain lines otherwise.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(total_steps, title, first_step, console)
    return LineProgress(total_steps, title, lambda text: print(text, file=console.file, flush=True))


class LineProgress(AbstractContextManager["LineProgress"]):
    """Plain lines: one a step, and one every ten seconds inside a long step.

    Args:
        total_steps: of the run.
        title: what is going on.
        write: takes each line.
        clock: seconds.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._title = title
        self._write = write
        self._steps = StepClock(total_steps, clock)
        self._last_line = self._steps.now()
        self._has_told_step = False
        self._tokens_per_s = 0.0

    def __exit__(self, *exception: object) -> None:
        """Nothing is left open."""

    def update_rollout(self, done: int, total: int, tokens_per_s: float, reward: float) -> None:
        """See ``Progress``."""
        self._tokens_per_s = tokens_per_s
        self._write_seldom(f"rollout: {done}/{total} prompts, {tokens_per_s:.0f} tokens/s, reward {reward:.3f}")

    def update_evaluation(self, dataset: str, done: int, total: int) -> None:
        """See ``Progress``."""
        self._write_seldom(f"evaluation of {dataset}: {done}/{total} prompts", should_force=done == total)

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Progress``."""
        step_s = metrics["time/step_s"]
        eta_s = self._steps.finish_step(step, step_s)
        parts = describe_step(metrics, self._tokens_per_s)
        line = f"step {step + 1}/{self._total_steps}: {', '.join(parts)}, {format_duration(eta_s)} left"
        is_shown = step_s >= 1.0 or not self._has_told_step or step + 1 == self._total_steps
        self._has_told_step = True
        self._write_seldom(line, should_force=is_shown)

    def show(self, text: str) -> None:
        """See ``Progress``."""
        self._write(text)

    def _write_seldom(self, line: str, should_force: bool = False) -> None:
        now = self._steps.now()
        if should_force or now - self._last_line >= MIN_LINE_INTERVAL_S:
            self._last_line = now
            self._write(f"{self._title}: {line}")


class LiveProgress(AbstractContextManager["LiveProgress"]):
    """Stays at the bottom of a terminal: a bar of steps, one of the work inside the step, a line of numbers.

    Args:
        total_steps: of the run.
        title: what is going on.
        first_step: where it starts.
        console: the terminal.
    """

    def __init__(self, total_steps: int, title: str, first_step: int, console: Console) -> None:
        from rich import live, progress

        self._steps = StepClock(total_steps)
        self._tokens_per_s = 0.0
        self._numbers = ""
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[note]}"),
        )
        self._step_bar = self._bars.add_task(title, total=total_steps, completed=first_step, note="")
        self._work_bar = self._bars.add_task("rollout", total=None, visible=False, note="")
        # The numbers have a line of their own: beside the bars they would push them off an 80-column terminal.
        self._live = live.Live(console=console, get_renderable=self._render)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, Text(self._numbers)) if self._numbers else self._bars

    def __enter__(self) -> Self:
        """Start showing."""
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last state on the terminal."""
        self._bars.update(self._work_bar, visible=False)
        self._live.stop()

    def update_rollout(self, done: int, total: int, tokens_per_s: float, reward: float) -> None:
        """See ``Progress``."""
        self._tokens_per_s = tokens_per_s
        self._show_work("prompts", done, total, f"{tokens_per_s:.0f} tokens/s  reward {reward:.3f}")

    def update_evaluation(self, dataset: str, done: int, total: int) -> None:
        """See ``Progress``."""
        self._show_work(f"eval {dataset}", done, total, "")

    def _show_work(self, description: str, done: int, total: int, note: str) -> None:
        shown: dict[str, Any] = {"completed": done, "total": total, "note": note, "visible": True}
        if self._bars.tasks[self._work_bar].description != description:
            self._bars.reset(self._work_bar)
        self._bars.update(self._work_bar, description=description, **shown)

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Progress``."""
        eta_s = self._steps.finish_step(step, metrics["time/step_s"])
        self._numbers = "  ".join(describe_step(metrics, self._tokens_per_s))
        self._bars.update(self._step_bar, completed=step + 1, note=f"{format_duration(eta_s)} left")
        self._bars.reset(self._work_bar, visible=False)

    def show(self, text: str) -> None:
        """See ``Progress``."""
        self._live.console.print(text, markup=False, highlight=False)


def describe_step(metrics: Mapping[str, float], tokens_per_s: float) -> list[str]:
    """Say the few numbers people watch.

    Args:
        metrics: of the step, its duration (``time/step_s``) among them.
        tokens_per_s: of its rollouts; 0 when there were none.

    Returns:
        Parts such as ``reward 0.412``; at most one KL (to the reference where there is one).
    """
    shown: dict[str, str] = {}
    for label, name, style in _SHOWN:
        if name in metrics:
            shown.setdefault(label, f"{label} {style.format(metrics[name])}")
    parts = list(shown.values())
    parts += [f"{name.removesuffix('/accuracy')} {v:.1%}" for name, v in metrics.items() if name.endswith("/accuracy")]
    if tokens_per_s:
        parts.append(f"{tokens_per_s:.0f} tokens/s")
    return [*parts, f"{metrics['time/step_s']:.1f} s/step"]


def format_duration(seconds: float) -> str:
    """Write a duration as people say it: ``45s``, ``3m20s``, ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
