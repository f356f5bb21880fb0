"""The report of one run: an HTML file made from its run directory alone. Owns what a report says, no measuring.

``python -m rlrecipes.tracking.report RUN_DIR`` writes it anew, of a run that goes on or was killed too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rlrecipes.errors import InputError, RecipeError
from rlrecipes.tracking.attempts import Attempt, read_attempts
from rlrecipes.tracking.curves import choose_headlines, to_series
from rlrecipes.tracking.efficiency import compute_axes, read_price
from rlrecipes.tracking.log import MetricRecord, read_records
from rlrecipes.tracking.memory_report import compare_memory
from rlrecipes.tracking.mlflow_sink import METRICS_FILE
from rlrecipes.tracking.page import write_page
from rlrecipes.tracking.panels import PanelBuilder
from rlrecipes.tracking.phases import tell_phases
from rlrecipes.tracking.rollouts import ROLLOUTS_FILE, RolloutRecord, read_rollouts
from rlrecipes.tracking.upload_state import flatten

REPORT_FILE = "report.html"
MAX_ROLLOUTS = 600
"""In the page; of more, evaluations go first and then every n-th step."""

_STALENESS = ("staleness/mean", "staleness/max")
_MORE_CURVES = ("response/truncated_fraction", "train/loss", "train/grad_norm", "train/rollout_logprob_abs_diff_mean")
_WORDS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped", "RUNNING": "running, or killed"}


def write_report(run_dir: Path) -> bool:
    """Write ``report.html`` of a run.

    Args:
        run_dir: holds metrics.jsonl; plan.yaml, rollouts.jsonl and attempts.jsonl add to it.

    Returns:
        False when nothing was measured, and nothing was written.

    Raises:
        OSError: the disk is full or refuses.
        RunError: metrics.jsonl is malformed.
    """
    records = read_records(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).exists() else []
    if not records:
        return False
    plan = _read_plan(run_dir)
    rollouts = read_rollouts(run_dir / ROLLOUTS_FILE)
    attempts = read_attempts(run_dir)
    last = attempts[-1] if attempts else Attempt(records[0].time, 0)
    names = sorted({name for record in records for name in record.metrics})
    panels = PanelBuilder({run_dir.name: [records]})
    phases = tell_phases(records, plan.get("step_time"))
    memory, memory_note = compare_memory(records, plan.get("memory"))
    shown = _choose_rollouts(rollouts)
    headlines = [*choose_headlines(names), *(name for name in _MORE_CURVES if name in names)]
    write_page(
        run_dir / REPORT_FILE,
        "report.html.j2",
        title=str(plan.get("name", run_dir.name)),
        status=last.status,
        status_word=_WORDS.get(last.status, last.status),
        reason=last.reason,
        choices=" ".join(f"{group}={option}" for group, option in plan.get("choices", {}).items() if "@" not in group),
        facts=list(_tell_facts(records, plan, attempts)),
        phases_columns=phases.columns,
        phases=phases.rows,
        phases_note=phases.note,
        memory=memory,
        memory_note=memory_note,
        attempts=list(_tell_attempts(attempts)),
        failures=list(_tell_failures(rollouts)),
        rollouts_note=_describe_rollouts(rollouts, shown),
        changes=list(_tell_changes(plan)),
        data={
            "panels": [panels.build(name) for name in headlines],
            "staleness": [panels.build(name) for name in _STALENESS if name in names],
            "metrics": [panels.build(name) for name in names],
            "phase_steps": phases.steps,
            "phases": phases.bars,
            "rollouts": shown,
        },
    )
    return True


def _read_plan(run_dir: Path) -> dict[str, Any]:
    """Plain data: a report of an older Plan is better than none."""
    try:
        plan = yaml.safe_load((run_dir / "plan.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _tell_facts(
    records: Sequence[MetricRecord], plan: Mapping[str, Any], attempts: Sequence[Attempt]
) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        if name.startswith("eval/") and name.endswith("/accuracy") or name == "reward/mean":
            values = to_series(records, name)
            best = max(values, key=lambda step: (values[step], -step))
            first, last = (values[step] for step in (min(values), max(values)))
            told = f"{first:.3f} to {last:.3f}, best {values[best]:.3f}"
            yield f"{name}, first to last; best at step {best}", told
    axes = compute_axes(records)
    spent = axes[max(axes)]
    num_steps = plan.get("schedule", {}).get("num_steps")
    yield "steps", f"{spent['step']:.0f}" + (f" of {num_steps}" if num_steps else "")
    if spent["rollouts"]:
        yield "rollouts trained on", f"{spent['rollouts']:,.0f}"
    if spent["tokens"]:
        yield "tokens trained on", f"{spent['tokens']:,.0f}"
    yield "at work, start-up left out", tell_hours(spent["hours"])
    price = read_price(flatten({name: plan.get(name) for name in ("cluster", "trainer", "served_models")}))
    if price.num_gpus:
        yield f"GPU hours, {price.num_gpus} GPUs", f"{spent['hours'] * price.num_gpus:.2f}"
    cost = price.compute_cost(spent["hours"])
    if cost is not None:
        yield f"cost, {price.gpu_hour:g} a GPU hour", f"{cost:,.2f}"
    if attempts:
        yield "starts", str(len(attempts))


def tell_hours(hours: float) -> str:
    """A duration for people.

    Args:
        hours: of it.
    """
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min" if hours >= 1 / 60 else f"{hours * 3600:.1f} s"


def _tell_attempts(attempts: Sequence[Attempt]) -> Iterator[tuple[str, ...]]:
    for number, attempt in enumerate(attempts, start=1):
        is_lost = attempt.ended is None and number < len(attempts)
        how = "killed" if is_lost else _WORDS.get(attempt.status, attempt.status)
        ended = "" if attempt.ended is None else _tell_time(attempt.ended)
        yield _tell_time(attempt.started), str(attempt.first_step), ended, how, attempt.reason


def _tell_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _tell_failures(rollouts: Sequence[RolloutRecord]) -> Iterator[tuple[str, int, str]]:
    failed: Counter[tuple[str, str]] = Counter()
    filtered: Counter[str] = Counter()
    for record in rollouts:
        what = "in evaluation" if record.purpose == "eval" else "in training"
        failed.update({(what, reason): count for reason, count in record.failures.items()})
        filtered.update(record.filtered)
    yield from ((f"failed or aborted {what}", count, reason) for (what, reason), count in failed.most_common())
    yield from (("groups dropped by a filter", count, reason) for reason, count in filtered.most_common())


def _choose_rollouts(records: Sequence[RolloutRecord]) -> list[dict[str, Any]]:
    chosen: list[RolloutRecord] = []
    room = MAX_ROLLOUTS
    for purpose in ("eval", "train"):
        of_purpose = [record for record in records if record.purpose == purpose]
        num_kept = sum(len(record.kept) for record in of_purpose)
        stride = max(1, -(-num_kept // room)) if room > 0 else len(of_purpose) + 1
        # From the last one back: how a run ended is what people look for.
        taken = of_purpose[::-1][::stride] if room > 0 else []
        room -= sum(len(record.kept) for record in taken)
        chosen += taken
    chosen.sort(key=lambda record: (-record.step, record.purpose))
    return [
        {"step": record.step, "purpose": record.purpose, "dataset": record.dataset, **asdict(kept)}
        for record in chosen
        for kept in record.kept
    ]


def _describe_rollouts(records: Sequence[RolloutRecord], shown: Sequence[object]) -> str:
    num_kept, num_all = (sum(counts) for counts in ([len(r.kept) for r in records], [r.num_rollouts for r in records]))
    text = "The first, the best and the worst of every step and of every evaluation, the newest first: "
    text += f"{num_kept:,} of {num_all:,} rollouts, in {ROLLOUTS_FILE}."
    return text if len(shown) == num_kept else text + f" {len(shown)} of them, of steps spread evenly, are here."


def _tell_changes(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    origins = plan.get("provenance", {})
    for path, value in plan.get("changes", {}).items():
        yield path, json.dumps(value), str(origins.get(path, ""))


def _main(arguments: Sequence[str]) -> int:
    try:
        for word in arguments:
            if not write_report(Path(word)):
                raise InputError(word, f"holds no measured {METRICS_FILE}", "give the directory of a run, runs/<name>")
            print(Path(word) / REPORT_FILE)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
