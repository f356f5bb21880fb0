from __future__ import annotations

from pathlib import Path

import pytest
from tiny_engines import save_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
