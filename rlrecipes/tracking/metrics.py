"""The metric registry: which names exist and what they mean. Owns the check at log time and docs/metrics.md.

``python -m rlrecipes.tracking.metrics`` prints docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rlrecipes.errors import ContractError
from rlrecipes.suggest import nearest
from rlrecipes.tracking.catalog import CATALOG, Metric

__all__ = ["CATALOG", "Metric", "check_metrics", "find_metric", "render_docs"]

_PLACEHOLDER = re.compile(r"<[a-z_]+>")


def iterate_metrics() -> Iterator[Metric]:
    """Every metric and family of the registry, in the order of the docs."""
    for metrics in CATALOG.values():
        yield from metrics


@cache
def _tables() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    exact = {metric.name: metric for metric in iterate_metrics() if "<" not in metric.name}
    families = [
        (re.compile(_PLACEHOLDER.sub("[^/]+", metric.name)), metric)
        for metric in iterate_metrics()
        if "<" in metric.name
    ]
    return exact, families


def find_metric(name: str) -> Metric | None:
    """The registry's entry for a name.

    Args:
        name: a full name, such as ``eval/gsm8k/accuracy``.

    Returns:
        The metric, or the family it belongs to; None when there is neither.
    """
    exact, families = _tables()
    if name in exact:
        return exact[name]
    return next((metric for pattern, metric in families if pattern.fullmatch(name)), None)


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Hold metrics against the registry.

    Args:
        metrics: name -> number (int, float, bool, or a numpy or 0-d tensor scalar).

    Returns:
        The same, as floats.

    Raises:
        ContractError: names the registry lacks (all of them, each with the nearest one), or a value that is no number.
    """
    unknown = [name for name in metrics if find_metric(name) is None]
    if unknown:
        raise ContractError(
            f"metrics.{unknown[0]}",
            "unknown metric " + ", ".join(f"'{name}'" for name in unknown),
            "; ".join(_suggest(name) for name in unknown),
        )
    return {name: _to_float(name, value) for name, value in metrics.items()}


def _to_float(name: str, value: Any) -> float:
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ContractError(f"metrics.{name}", f"{value!r} is not a number", "log one number a metric and step")


def _suggest(name: str) -> str:
    segments = name.split("/")
    known = [_fill(metric.name, segments) for metric in iterate_metrics()]
    near = nearest(name, known)
    if near is None:
        leaf = nearest(segments[-1], [k.split("/")[-1] for k in known], cutoff=0.8)
        near = next((k for k in known if k.split("/")[-1] == leaf), None)
    hint = f"did you mean {near!r}?" if near else f"nothing is near {name!r}; docs/metrics.md lists all names"
    return f"{hint} A new metric starts with its line in rlrecipes/tracking/catalog.py"


def _fill(family: str, segments: list[str]) -> str:
    parts = family.split("/")
    return "/".join(segments[i] if part.startswith("<") and i < len(segments) else part for i, part in enumerate(parts))


def render_docs() -> str:
    """The text of docs/metrics.md: one table a group."""
    lines = [
        "# Metrics",
        "",
        "Generated from the registry by `python -m rlrecipes.tracking.metrics > docs/metrics.md`; do not edit.",
        "",
        "Every step appends one line or more to `<run_dir>/metrics.jsonl`; MLflow receives the same numbers. A name in",
        "`<...>` stands for a dataset or a part of the reward. Better: the direction to steer to, where there is one.",
    ]
    for title, metrics in CATALOG.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | unit | what it is | how to read it | better |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| `{m.name}` | {m.unit} | {m.explanation} | {m.reading} | {m.better} |" for m in metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
