"""What tests on a GPU share with those on a CPU: the helper that builds trainer ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "megatron"))
