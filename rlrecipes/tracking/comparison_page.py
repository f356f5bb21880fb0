"""A comparison as one HTML file that a person can send. Owns what it says; the page's safety is page.py's."""

from __future__ import annotations

from pathlib import Path

from rlrecipes.tracking.compare import Comparison
from rlrecipes.tracking.comparison_text import describe_intervals, to_cells, with_interquartile_means
from rlrecipes.tracking.page import write_page
from rlrecipes.tracking.panels import PanelBuilder


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a comparison.

    Args:
        comparison: of runs.
        path: the HTML file.

    Raises:
        OSError: the disk is full or refuses.
    """
    variants = comparison.variants
    labels = [variant.label for variant in variants]
    panels = PanelBuilder({variant.label: variant.records for variant in variants})
    num_runs = sum(len(variant.runs) for variant in variants)
    intervals = describe_intervals(comparison)
    write_page(
        path,
        "comparison.html.j2",
        title=" / ".join(labels) if len(labels) <= 4 else f"{len(labels)} variants compared",
        summary=f"{num_runs} runs of {len(labels)} plans; runs of one plan differ in nothing but seeds",
        labels=labels,
        numbers=tuple(range(1, len(labels) + 1)),
        params=to_cells(comparison.params),
        results=to_cells(with_interquartile_means(comparison.results)),
        results_note=f"{intervals[0].upper()}{intervals[1:]} (Agarwal et al. 2021)." if intervals else "",
        efficiency=to_cells(comparison.efficiency),
        efficiency_note=(
            "Means over seeds. The level is the highest that every variant reached in the mean of its seeds. Rollouts "
            "are those trained on, tokens include prompts, hours leave out start-up and stops; GPU hours count every "
            "GPU that the plan holds, and cost is their price in cluster.gpu_hour_price."
        ),
        data={"panels": [panels.build(name) for name in comparison.metrics]},
    )
