"""What all tests share: how they are spread over two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent


@pytest.hookimpl(wrapper=True)  # before xdist, whose own hook is a tryfirst one, reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Keep together what shares a slow fixture: the contract suite (one real SGLang), and any other module."""
    for item in items:
        path = item.path.relative_to(ROOT)
        item.add_marker(pytest.mark.xdist_group("contract" if path.parts[0] == "contract" else str(path)))
    yield
