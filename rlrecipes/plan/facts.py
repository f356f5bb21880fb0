"""The facts of a model: its shapes, from config.json or from the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import ModelConfig, ModelShapes
from rlrecipes.errors import Problem
from rlrecipes.plan.families import (
    FAMILIES,
    UnreadableConfigError,
    find_shape_problems,
    find_untrainable,
    read_num_mtp_layers,
    read_text_config,
    to_shapes,
)
from rlrecipes.plan.nodes import ModelNode
from rlrecipes.suggest import did_you_mean

NUM_SPECIAL_TOKENS = 3
"""Padding, end of sequence and unknown, which every tokenizer made from an alphabet holds."""


def read_shapes(model: ModelConfig, problems: list[Problem]) -> tuple[ModelShapes | None, bool]:
    """Settle the shapes of the trained model.

    Args:
        model: the recipe's model section.
        problems: what is wrong is appended.

    Returns:
        The shapes (None when they cannot be known) and whether the weights are to be made.
    """
    if model.shapes is not None:
        problems += find_shape_problems(model.shapes)
    if model.path is None:
        return _check_described(model, problems), model.alphabet is not None
    config = _read_config(Path(model.path), problems)
    if config is None:
        return None, False
    family, text = read_text_config(config)
    if family != model.family:
        fix = f"write model.family={family}" if family in FAMILIES else did_you_mean(str(family), FAMILIES)
        problems.append(Problem("model.family", f"is {model.family!r}; {model.path}/config.json says {family!r}", fix))
        return None, False
    try:
        shapes = to_shapes(text, model.family)
    except UnreadableConfigError as error:
        problem = f"{model.path}/config.json does not say what is needed: {error}"
        problems.append(Problem("model.path", problem, "mend the file, or use another model"))
        return None, False
    return (_compare(model, shapes, text, problems) if model.shapes else shapes), False


def find_obstacles(model: ModelNode) -> list[Problem]:
    """Why a Plan of this model cannot be run here, although it can be made, priced and compared.

    Args:
        model: the Plan's.
    """
    obstacles = []
    if not model.path:
        problem = "is null: planned from the facts of its file, without weights"
        obstacles.append(Problem("model.path", problem, "give model.path=<HF directory> to run it"))
    untrainable = find_untrainable(model.family, model.shapes)
    if untrainable is not None:
        problem = f"{untrainable}: resolved and priced, not yet trainable here"
        obstacles.append(Problem("model.family", problem, "run another model; `rlrecipes plan` works for this one"))
    return obstacles


def _check_described(model: ModelConfig, problems: list[Problem]) -> ModelShapes | None:
    if model.shapes is None:
        fix = "give model.path=<HF directory>, or model.shapes"
        problems.append(Problem("model", "has neither a path nor shapes", fix))
        return None
    needed = len(set(model.alphabet or "")) + NUM_SPECIAL_TOKENS
    if model.alphabet is not None and needed > model.shapes.vocab_size:
        fix = f"raise it to {needed}, or shorten model.alphabet"
        problem = f"is {model.shapes.vocab_size}; the alphabet needs {needed}"
        problems.append(Problem("model.shapes.vocab_size", problem, fix))
    return model.shapes


def _compare(
    model: ModelConfig, theirs: ModelShapes, text: Mapping[str, Any], problems: list[Problem]
) -> ModelShapes | None:
    """Shapes of config.json with the recipe's choice of prediction layers; every difference is a problem."""
    ours = model.shapes
    if ours is None:
        return theirs
    for name in ModelShapes.model_fields:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if name != "mtp_num_layers" and mine != other:
            fix = f"write {json.dumps(other)}, or model.shapes=null"
            problem = f"is {json.dumps(mine)}; {model.path}/config.json says {json.dumps(other)}"
            problems.append(Problem(f"model.shapes.{name}", problem, fix))
    held = read_num_mtp_layers(text)
    if (ours.mtp_num_layers or 0) > held:
        problem = f"is {ours.mtp_num_layers}; {model.path}/config.json says {held}"
        problems.append(Problem("model.shapes.mtp_num_layers", problem, f"write {held or 'null'}"))
    return theirs.model_copy(update={"mtp_num_layers": ours.mtp_num_layers})


def _read_config(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{file} cannot be read ({error.strerror})"
        fix = "name an existing HF directory; a recipe that starts from another run's weights needs that run first"
        problems.append(Problem("model.path", reason, fix))
        return None
    except ValueError as error:
        problems.append(Problem("model.path", f"{file} is not JSON: {error}", "mend or replace the file"))
        return None
    if not isinstance(config, dict) or "hidden_size" not in read_text_config(config)[1]:
        problems.append(Problem("model.path", f"{file} describes no language model", "name a model's own directory"))
        return None
    return config
