"""What all tests share: how they are spread over two processes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A module's tests stay in one process with its fixtures; the contract suite does, with its one real SGLang."""

    def _split_scope(self, nodeid: str) -> str:
        return "contract" if nodeid.startswith("tests/contract/") else nodeid.split("::", 1)[0]


# Not loadgroup, which names groups in a way that pytest 9.2 does not know any more.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModule:
    """Tell xdist."""
    return ByModule(config, log)
