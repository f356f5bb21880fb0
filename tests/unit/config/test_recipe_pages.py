"""What a change of a default does to each recipe is seen in docs/recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("recipe_pages", ROOT / "tools" / "recipes.py")
recipe_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(recipe_pages)


@pytest.mark.parametrize("name", recipe_pages.RECIPES)
def test_the_page_is_current(name):
    page = recipe_pages.PAGES / f"{name}.yaml"
    assert page.read_text() == recipe_pages.render(name), "run: make docs"


def test_no_page_is_left_of_a_recipe_that_is_gone():
    assert sorted(page.stem for page in recipe_pages.PAGES.glob("*.yaml")) == recipe_pages.RECIPES
