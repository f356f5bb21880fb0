"""Imports the modules it is given, one by one, and says how each went: ``python -m ... MODULE...``.

What an import prints itself carries no mark. The first module that nothing is said of has ended the process.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

MARK = "rlrecipes-probe: "


def main() -> None:
    """Import all words of the command line."""
    for name in sys.argv[1:]:
        try:
            module = importlib.import_module(name)
            facts = _read_torch(module) if name == "torch" else {}
        except BaseException as error:  # a broken package may raise anything, SystemExit too
            _tell(name, f"{type(error).__name__}: {error}".splitlines()[0], {})
        else:
            _tell(name, "", facts)


def _tell(name: str, problem: str, facts: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps([name, problem, facts])}", flush=True)


def _read_torch(torch: Any) -> dict[str, Any]:
    distributed = torch.distributed
    has_groups = distributed.is_available()
    has_nccl = has_groups and distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "has_gloo": has_groups and distributed.is_gloo_available(),
    }


if __name__ == "__main__":
    main()
