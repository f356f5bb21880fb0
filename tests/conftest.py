"""What all tests share: how they are spread over two processes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_TOGETHER = {
    "tests/contract/": "one real SGLang",
    "tests/integration/test_deaths.py": "one undisturbed run",
    "tests/integration/test_run.py": "one undisturbed run",
}


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A module's tests stay in one process with its fixtures; some modules do together, with what starts them all."""

    def _split_scope(self, nodeid: str) -> str:
        shared = [name for start, name in _TOGETHER.items() if nodeid.startswith(start)]
        return shared[0] if shared else nodeid.split("::", 1)[0]


# Not loadgroup, which names groups in a way that pytest 9.2 does not know any more.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModule:
    """Tell xdist."""
    return ByModule(config, log)
