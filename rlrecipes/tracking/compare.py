"""Comparing runs: what differs between their plans, what came of it and what it took. Owns the facts, no rendering.

Runs that differ in nothing but seeds are one column: their mean, its interval and the interquartile mean.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonpath, commonprefix, relpath
from pathlib import Path

from rlrecipes.errors import InputError
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.curves import choose_headlines, compute_mean, draw_curves, to_series
from rlrecipes.tracking.efficiency import Axis, compute_axes, read_price
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.logged_runs import LoggedRun
from rlrecipes.tracking.metrics import find_metric
from rlrecipes.tracking.seeds import Summary, summarise

_NAMES = frozenset({"name", "run_dir", "runs_dir", "resume", "notes", "cluster.gpu_hour_price", "cluster.disk_bytes"})
_NAME_PREFIXES = ("provenance.", "tracking.")
"""Parameters that name a run, say who set a value or where it is tracked, or are of the day: no difference in what
runs."""

_SEED_IN_TEXT = re.compile(r"(seed\W{1,6})\d+")

Value = str | float | Summary | None


@dataclass(frozen=True, slots=True)
class Variant:
    """Runs of one plan, which differ in seeds alone.

    Attributes:
        label: what their names have in common; unique in a comparison.
        runs: one or more.
    """

    label: str
    runs: tuple[LoggedRun, ...]

    @property
    def seeds(self) -> tuple[str, ...]:
        """The seed of each run; a dash where its plan tells none."""
        return tuple(run.params.get("seed", "-") for run in self.runs)

    @property
    def records(self) -> list[tuple[MetricRecord, ...]]:
        """The records of each seed that measured anything."""
        return [run.records for run in self.runs if run.records]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison.

    Attributes:
        field: a parameter's dotted path, or a metric and which of its values.
        values: one a variant; None where it has none.
    """

    field: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between runs.

    Attributes:
        variants: the columns.
        metrics: that were compared.
        params: parameters that differ, by path.
        results: seeds where they differ, status, steps, and the last and best value of each metric.
        efficiency: what it took to reach the level that all variants reached, and what all of it took.
    """

    variants: tuple[Variant, ...]
    metrics: tuple[str, ...]
    params: tuple[Row, ...]
    results: tuple[Row, ...]
    efficiency: tuple[Row, ...]

    @property
    def main_metric(self) -> str | None:
        """The first compared metric that people steer to; None where there is none."""
        return _find_main(self.metrics)


def compare_runs(runs: Sequence[LoggedRun], metrics: Sequence[str] | None = None) -> Comparison:
    """Lay runs side by side.

    Args:
        runs: one or more.
        metrics: names; the headlines by default.

    Returns:
        What differs between their plans, their results, and what they took.

    Raises:
        InputError: none of the runs logged one of the metrics.
    """
    variants = group_seeds(runs)
    names = _choose_metrics(runs, metrics)
    results = [
        *_to_seed_rows(variants),
        Row("status", tuple(_tell_status(variant) for variant in variants)),
        Row("last step", tuple(_tell_last_step(variant) for variant in variants)),
    ]
    for name in names:
        results += _to_result_rows(name, variants)
    efficiency = tuple(_to_efficiency_rows(variants, _find_main(names)))
    return Comparison(variants, names, tuple(_to_param_rows(variants)), tuple(results), efficiency)


def _choose_metrics(runs: Sequence[LoggedRun], metrics: Sequence[str] | None) -> tuple[str, ...]:
    logged = sorted({name for run in runs for record in run.records for name in record.metrics})
    if metrics is None:
        return tuple(choose_headlines(logged))
    for name in metrics:
        if name not in logged:
            raise InputError("metrics", f"none of these runs logged '{name}'", did_you_mean(name, logged))
    return tuple(metrics)


def _find_main(metrics: Sequence[str]) -> str | None:
    steered = [name for name in metrics if (entry := find_metric(name)) is not None and entry.better]
    evaluations = [name for name in steered if name.startswith("eval/")]
    return next(iter([*evaluations, *steered]), None)


def _to_param_rows(variants: Sequence[Variant]) -> Iterator[Row]:
    """Parameters that differ between variants; of one variant those that differ within it would be its seeds alone."""
    plans = [_to_comparable(variant.runs[0]) for variant in variants]
    for key in sorted({key for plan in plans for key in plan}):
        if not _is_seed(key) and len({plan.get(key) for plan in plans}) > 1:
            yield Row(key, tuple(variant.runs[0].params.get(key) for variant in variants))


def _to_seed_rows(variants: Sequence[Variant]) -> Iterator[Row]:
    if len({seed for variant in variants for seed in variant.seeds}) > 1:
        yield Row("seeds", tuple(", ".join(sorted(variant.seeds, key=_seed_order)) for variant in variants))


def _tell_status(variant: Variant) -> str:
    counts = Counter(run.status.lower() for run in variant.runs)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _tell_last_step(variant: Variant) -> Value:
    steps = [records[-1].step for records in variant.records]
    if not steps:
        return None
    return float(max(steps)) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"


def _seed_order(seed: str) -> tuple[int, str]:
    return (int(seed), seed) if seed.isdecimal() else (0, seed)


def _to_result_rows(name: str, variants: Sequence[Variant]) -> Iterator[Row]:
    entry = find_metric(name)
    kinds: dict[str, Callable[[list[float]], float]] = {"last": lambda values: values[-1]}
    if entry is not None and entry.better:
        kinds["best"] = max if entry.better == "higher" else min
    for kind, pick in kinds.items():
        found = []
        for variant in variants:
            series = [_finite(records, name) for records in variant.records]
            found.append(summarise([pick(list(points.values())) for points in series if points]))
        yield Row(f"{name} ({kind})", tuple(found))


def _finite(records: Sequence[MetricRecord], name: str) -> dict[int, float]:
    return {step: value for step, value in to_series(records, name).items() if math.isfinite(value)}


def _to_efficiency_rows(variants: Sequence[Variant], main: str | None) -> Iterator[Row]:
    """To the level that every variant reached: the least of their best means. One variant has nothing to be held to."""
    spent = [[compute_axes(records) for records in variant.records] for variant in variants]
    if main is not None and len(variants) > 1:
        means = [_compute_mean_curve(variant, main) for variant in variants]
        entry = find_metric(main)
        sign = -1.0 if entry is not None and entry.better == "lower" else 1.0
        best = [max(sign * value for value in mean.values()) for mean in means if mean]
        if len(best) > 1:
            level = min(best)
            reached = [next((step for step in mean if sign * mean[step] >= level), None) for mean in means]
            what = f"to {main} {'<=' if sign < 0 else '>='} {sign * level:.4g}"
            yield from _to_spent_rows(variants, spent, reached, what)
    yield from _to_spent_rows(variants, spent, [None] * len(variants), "in all")


def _compute_mean_curve(variant: Variant, name: str) -> dict[int, float]:
    series = [points for records in variant.records if (points := _finite(records, name))]
    return compute_mean(series) if series else {}


def _to_spent_rows(
    variants: Sequence[Variant],
    spent: Sequence[Sequence[Mapping[int, Mapping[Axis, float]]]],
    reached: Sequence[int | None],
    what: str,
) -> Iterator[Row]:
    """What the seeds of each variant took on average up to a step; in all where there is none."""
    is_all = what == "in all"
    columns: list[dict[str, float]] = []
    for variant, seeds, step in zip(variants, spent, reached, strict=True):
        if not seeds or (step is None and not is_all):
            columns.append({})
            continue
        ends = [axes[max(axes) if step is None else step] for axes in seeds if step is None or step in axes]
        mean = {axis: sum(end[axis] for end in ends) / len(ends) for axis in ends[0]}
        price = read_price(variant.runs[0].params)
        column = {"steps": mean["step"], "rollouts": mean["rollouts"], "tokens": mean["tokens"], "hours": mean["hours"]}
        if price.num_gpus:
            column["GPU hours"] = mean["hours"] * price.num_gpus
        cost = price.compute_cost(mean["hours"])
        columns.append(column if cost is None else column | {"cost": cost})
    for name in dict.fromkeys(name for column in columns for name in column):
        values = tuple(column.get(name) for column in columns)
        if any(values) or name == "steps":
            yield Row(f"{name} {what}", values)


def group_seeds(runs: Sequence[LoggedRun]) -> tuple[Variant, ...]:
    """Put runs together that differ in nothing but seeds.

    Args:
        runs: in any order.

    Returns:
        The variants, in the order of their first runs.
    """
    groups: dict[tuple[tuple[str, str], ...], list[LoggedRun]] = {}
    for run in runs:
        plan = tuple(sorted((key, value) for key, value in _to_comparable(run).items() if not _is_seed(key)))
        groups.setdefault(plan if plan else (("run_id", run.run_id),), []).append(run)
    labels = [_find_label(members) for members in groups.values()]
    counts = Counter(labels)
    ids = _shorten_ids([members[0].run_id for members in groups.values()])
    return tuple(
        Variant(label if counts[label] == 1 else f"{label} ({short_id})", tuple(members))
        for label, members, short_id in zip(labels, groups.values(), ids, strict=True)
    )


def _shorten_ids(ids: Sequence[str]) -> list[str]:
    """What tells runs of one name apart: the start of MLflow's id, or where their directories part."""
    directories = [run_id for run_id in ids if run_id.startswith("/")]
    root = commonpath(directories) if directories else ""
    return [relpath(run_id, root) if run_id.startswith("/") else run_id[:6] for run_id in ids]


def _find_label(members: Sequence[LoggedRun]) -> str:
    label = commonprefix([run.name for run in members])
    if len({run.name for run in members}) > 1:
        label = label.rstrip("-_. ").removesuffix("seed").rstrip("-_. ")
    return label or members[0].name


def _to_comparable(run: LoggedRun) -> dict[str, str]:
    """What a run does: without names, paths inside its own directory, and seeds inside command lines."""
    run_dir = run.params.get("run_dir") or "<run_dir>"
    return {
        key: value if _is_seed(key) else _SEED_IN_TEXT.sub(r"\1<seed>", value.replace(run_dir, "<run_dir>"))
        for key, value in run.params.items()
        if key not in _NAMES and not key.startswith(_NAME_PREFIXES)
    }


def _is_seed(key: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    return last == "seed" or last.endswith("_seed")


def draw_comparison(comparison: Comparison, path: Path) -> bool:
    """Draw the compared metrics, and the main one against what was spent; seeds thin, their mean thick.

    Args:
        comparison: of runs.
        path: the PNG to write.

    Returns:
        False when there was nothing to draw.
    """
    runs = {variant.label: variant.records for variant in comparison.variants if variant.records}
    return draw_curves(runs, path, comparison.metrics, spent_by=comparison.main_metric)
