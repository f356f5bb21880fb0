"""The effective configuration of every shipped recipe, one file each under docs/recipes/.

    python tools/recipes.py          writes them anew (`make docs`); a test holds them to the recipes

A change of a default shows there as a change of every recipe that it reaches.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from rlrecipes.config.compose import compose

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "recipes"
RECIPES = sorted(file.stem for file in (ROOT / "conf" / "recipe").glob("*.yaml"))
NEEDED = {"qwen3_4b_opd": ("topology.served_models.teacher.path=Qwen3-32B",)}
"""Recipe -> what only its user can say."""


def render(name: str) -> str:
    """The whole of a recipe's values, as YAML.

    Args:
        name: of the recipe.
    """
    words = [f"recipe={name}", *NEEDED.get(name, ())]
    data = compose(words).config.model_dump(mode="json")
    return f"# rlrecipes plan {' '.join(words)}\n" + yaml.safe_dump(data, sort_keys=False, width=120)


def main() -> None:
    """Write every page; those of recipes that are gone are removed."""
    PAGES.mkdir(exist_ok=True)
    for file in PAGES.glob("*.yaml"):
        if file.stem not in RECIPES:
            file.unlink()
    for name in RECIPES:
        (PAGES / f"{name}.yaml").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
