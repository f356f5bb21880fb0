from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_group import RankGroup, rank_group


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroup]:
    with rank_group() as group:
        yield group
