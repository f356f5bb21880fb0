"""The closing words of `make quickstart`: what the two stages learned, and what to do next."""

from __future__ import annotations

from pathlib import Path

from rlrecipes.tracking.curves import draw_curves, to_series
from rlrecipes.tracking.log import MetricRecord, read_records

_RUNS_DIR = Path("runs")
_STAGES = {"quickstart_sft": "SFT", "quickstart_grpo": "GRPO"}
_ACCURACY = "eval/spell_backward/accuracy"
_NEXT = """
next:
  look      {curves}; every metric is explained in docs/metrics.md
  ask       mlflow ui --backend-store-uri sqlite:///{runs}/mlflow.db
  change    rlrecipes plan recipe=quickstart algo.group_size=16     (resolves and shows, starts nothing)
            rlrecipes train recipe=quickstart name=second algo.group_size=16
            rlrecipes compare quickstart_grpo second
  measure   rlrecipes eval recipe=quickstart model.path={runs}/quickstart_grpo/hf
  your own  copy conf/recipe/quickstart.yaml; README.md says how to change model, algorithm and topology
"""


def main() -> None:
    """Print held-out accuracy before, between and after the stages, and draw both curves."""
    print("\nheld-out accuracy, spelling words backward:")
    curves = _RUNS_DIR / "quickstart.png"
    runs: dict[str, list[list[MetricRecord]]] = {}
    for name, stage in _STAGES.items():
        records = read_records(_RUNS_DIR / name / "metrics.jsonl")
        runs[stage] = [records]
        measured = list(to_series(records, _ACCURACY).items())
        (first, before), (last, after) = measured[0], measured[-1]
        print(f"  {stage:<5} {before:.3f} after {first} steps -> {after:.3f} after {last} steps")
    draw_curves(runs, curves, [_ACCURACY])
    print(_NEXT.format(curves=curves, runs=_RUNS_DIR))


if __name__ == "__main__":
    main()
