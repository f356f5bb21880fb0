"""The tables of docs/memory.md: constants of the memory model, and what it says of every described model.

python tools/memory.py          writes it anew (`make docs`); a test holds the page to it
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from rlrecipes.config.schema import ModelShapes, ParallelConfig
from rlrecipes.plan.calibration import load_calibration
from rlrecipes.plan.model_costs import compute_kv_bytes_per_token, compute_state_bytes
from rlrecipes.plan.parameters import compute_num_active_parameters, compute_num_parameters, compute_rank_parameters
from rlrecipes.plan.trainer_memory import compute_gradient_bytes, compute_optimizer_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "memory.md"
CONF = ROOT / "conf"
TABLES = "## Constants\n"


def render(page: str) -> str:
    """The page with its tables written anew; what stands before them is written by hand."""
    lines = [page.partition(TABLES)[0] + TABLES, "| constant | value | unit | source |", "|---|---|---|---|"]
    for name, constant in load_calibration().sections["memory"].items():
        lines.append(f"| {name} | {constant.value:g} | {constant.unit} | {constant.source} |")
    lines += [
        "",
        "## Every described model",
        "",
        "| model | parameters | active | GB on 1 | GB each on 8 | KV bytes a token | state, MB |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, shapes) for name, shapes in _iter_models()),
    ]
    return "\n".join(lines) + "\n"


def _iter_models() -> Iterator[tuple[str, ModelShapes]]:
    from rlrecipes.config.compose import compose

    for file in sorted((CONF / "model").glob("*.yaml")):
        if file.stem not in ("hf", "qwen3_tiny"):
            shapes = compose([f"model={file.stem}"]).config.model.shapes
            assert shapes is not None
            yield file.stem, shapes


def _row(name: str, shapes: ModelShapes) -> str:
    single = ParallelConfig(
        **yaml.safe_load((CONF / "parallel" / "single.yaml").read_text()) | {"recompute_modules": ()}
    )
    eight = {"data_parallel_size": 8, "expert_model_parallel_size": 8 if shapes.num_moe_experts else 1}
    sizes = []
    for parallel in (single, single.model_copy(update=eight)):
        counts = compute_rank_parameters(shapes, parallel)[0]
        held = counts.total * (2 + compute_gradient_bytes(parallel, 2)) + compute_optimizer_bytes(counts, parallel, 2)
        sizes.append(held / 1e9)
    state = compute_state_bytes(shapes) / 1e6
    return (
        f"| {name} | {compute_num_parameters(shapes) / 1e9:.3f} | {compute_num_active_parameters(shapes) / 1e9:.3f} "
        f"| {sizes[0]:,.1f} | {sizes[1]:,.1f} | {compute_kv_bytes_per_token(shapes, 1, 2):,} "
        f"| {f'{state:.1f}' if state else ''} |"
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
