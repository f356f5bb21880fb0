"""No key of the schema does nothing: each is read by what runs, or by what predicts."""

from __future__ import annotations

import ast
from pathlib import Path

import rlrecipes
import rlrecipes.config.schema as schema
from rlrecipes.config.compose import compose
from rlrecipes.config.schema import ModelShapes
from rlrecipes.plan.families import find_untrainable

ROOT = Path(rlrecipes.__file__).parent
_TELLING = ("native.py", "families.py")
"""Modules of the Plan that hold names of keys without acting on them."""
_ACTING = ("cluster.py", "commands.py", "facts.py", "hosts.py", "nodes.py", "placement.py", "serving.py")
"""Modules of the Plan that make something of a value that runs; the others hold, judge or predict."""
_PREDICTED = {
    *(f"GpuConfig.{name}" for name in ("fp8_flops_per_s", "hbm_bytes_per_s", "nvlink_bytes_per_s")),
    "RunConfig.calibration",
}
"""Keys of which only figures are made."""
_PARTS_OF_OTHERS = {
    *("rotary_scaling_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"),  # of scaled RoPE
    *("moe_shared_expert_gate", "moe_router_group_topk"),  # of shared experts, of groups of experts
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),  # of latent attention
    *("dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
}
"""Facts that say nothing alone: the fact that they belong to is refused."""


def keys() -> dict[str, str]:
    sections = (getattr(schema, name) for name in schema.__all__)
    return {
        f"{section.__name__}.{name}": name
        for section in sections
        if isinstance(section, type) and issubclass(section, schema.Section) and section is not schema.Section
        for name in section.model_fields
    }


def read_names(files) -> set[str]:
    """Names that are looked up in something, or stand as a whole string, as for getattr and tables."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def files_of(is_wanted) -> list[Path]:
    return [file for file in ROOT.rglob("*.py") if is_wanted(file.relative_to(ROOT))]


def test_every_key_is_read_outside_the_room_that_defines_it():
    def is_reader(file: Path) -> bool:
        return file.parts[0] != "config" and "rules" not in file.parts and file.name not in _TELLING

    read = read_names(files_of(is_reader))
    unread = {key for key, name in keys().items() if name not in read}
    assert {key for key in unread if not key.startswith("ModelShapes.")} == set()


def test_every_key_changes_what_runs_or_is_a_figure_for_predictions():
    def is_acting(file: Path) -> bool:
        if file.parts[0] == "plan":
            return len(file.parts) == 2 and file.name in _ACTING
        return file.parts[0] not in ("config", "cli")

    read = read_names(files_of(is_acting))
    unread = {key for key, name in keys().items() if name not in read and not key.startswith("ModelShapes.")}
    assert unread == _PREDICTED


def test_every_fact_of_a_model_is_built_or_refused():
    """A fact that the trainer does not read would make another model of it, without a word."""
    read = read_names(files_of(lambda file: file.parts[:2] == ("engines", "megatron")))
    plain = compose(["model=qwen3_tiny"]).config.model.shapes
    for name, field in ModelShapes.model_fields.items():
        if name in read or name in _PARTS_OF_OTHERS:
            continue
        value = {"rope_type": "yarn", "moe_router_score_function": "sigmoid", "rotary_percent": 0.5}.get(name, 1)
        assert getattr(plain, name) != value, name
        changed = plain.model_copy(update={name: True if field.annotation is bool else value})
        assert find_untrainable("qwen3", changed) is not None, f"{name} is neither read nor refused"


def test_a_key_without_a_reader_would_be_found(tmp_path):
    (tmp_path / "reader.py").write_text("a = plan.optim.lr\nb = getattr(plan, 'clip_grad')\nplan.min_lr = 1\n")
    found = read_names([tmp_path / "reader.py"])
    assert {"lr", "clip_grad"} <= found
    assert "min_lr" not in found
