"""On an engine's PYTHONPATH: SGLang's own RMSNorm in torch takes the place of its kernel, which has no float32."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "sglang.srt.layers.layernorm"


class LayernormFinder(MetaPathFinder):
    """Finds that one module, once."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            module.RMSNorm.forward_cuda = module.RMSNorm.forward_native

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, LayernormFinder())
