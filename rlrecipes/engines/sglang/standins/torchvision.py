"""Stand-in for torchvision, which SGLang imports for image models; on PYTHONPATH of the CPU server only.

The submodules SGLang and transformers name while they load exist and are empty: whatever is taken from them is a
class that does nothing. Never imported by rlrecipes.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from types import ModuleType

__version__ = "0.0.0"
__path__: list[str] = []


class InterpolationMode(StrEnum):
    """Ways to resize an image; transformers builds a table of them when it loads."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _EmptyModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return InterpolationMode if name == "InterpolationMode" else type(name, (), {})


for _path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = sys.modules[f"{__name__}.{_path}"] = _EmptyModule(f"{__name__}.{_path}")
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    setattr(sys.modules[_parent], _name, _module)
