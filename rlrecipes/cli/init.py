"""`rlrecipes init DIR`: a project of your own, with groups, a recipe, prompts, a reward and a test."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from rlrecipes.cli.flags import Parser
from rlrecipes.errors import InputError

_TEMPLATE = Path(__file__).parent.parent / "plugins" / "first_project"


def run(arguments: list[str]) -> None:
    """Write the project and say what to do with it.

    Args:
        arguments: the directory, new or empty.

    Raises:
        InputError: it holds something, or cannot be written.
    """
    parser = Parser(prog="rlrecipes init", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    target: Path = parser.parse_args(arguments).directory
    try:
        if target.exists() and next(target.iterdir(), None) is not None:
            raise InputError(str(target), "is not empty", "name a new directory: nothing is written over")
        shutil.copytree(_TEMPLATE, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        fix = "name a directory that can be made or written"
        raise InputError(str(target), f"cannot be written: {error.strerror or error}", fix) from error
    print(f"{target}: a recipe, prompts, a reward and a test; README.md says what each file is\n\nnext:")
    if target.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(target))}")
    print("  rlrecipes plan --config-dir conf recipe=vowels")
    print("  rlrecipes train --config-dir conf recipe=vowels")
    print("  python -m pytest")
