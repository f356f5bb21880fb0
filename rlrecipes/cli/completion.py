"""Words for a shell that completes `rlrecipes ...`: verbs and flags are ours, groups and keys are asked of Hydra.

Hydra writes the shell's part (`rlrecipes -sc install=bash`, or fish), which calls `rlrecipes -sc query=SHELL` with the
line typed so far in COMP_LINE. It knows no verbs, and of flags only its own: what it is not to see is taken out here.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Collection

from rlrecipes.errors import RecipeError

_HYDRA = ("--config-dir", "--multirun", "--cfg", "--info", "--help")
FLAGS = {
    "train": ("--format", *_HYDRA),
    "plan": ("--format", "--save", *_HYDRA),
    "eval": ("--format", *_HYDRA),
    "explain": (),
    "search": ("--format", "--config-dir", "--help"),
    "doctor": ("--nodes", "--format", "--config-dir", "--help"),
    "render": ("--image", "--claim", "--namespace", "--config-dir", "--help"),
}
"""Verb that takes a recipe -> its flags; where another verb stands, the shell completes files."""
_WITHOUT_VALUE = ("--multirun", "-m", "--help")


def complete(arguments: list[str], verbs: Collection[str]) -> None:
    """Print words that may stand where the cursor is, or the shell's part of it.

    Args:
        arguments: ``-sc`` and what follows: ``install=SHELL``, ``uninstall=SHELL`` or ``query=SHELL``.
        verbs: all of them.
    """
    from rlrecipes.config.compose import run_hydra_app

    if not any(word.startswith("query=") for word in arguments):
        run_hydra_app(lambda recipe: None, arguments)
        return
    words = _suggest(os.environ.get("COMP_LINE", ""), arguments, verbs)
    print(("\n" if "query=fish" in arguments else " ").join(words))


def _suggest(line: str, arguments: list[str], verbs: Collection[str]) -> list[str]:
    *before, word = line.split()[1:] + ([""] if line.endswith(" ") else []) or [""]
    if not before:
        return [verb for verb in verbs if verb.startswith(word)]
    verb, *typed = before
    if verb not in FLAGS or (typed and typed[-1].startswith("-") and typed[-1] not in _WITHOUT_VALUE):
        return []  # a file, or the value of a flag
    if word.startswith("-"):
        return [flag for flag in FLAGS[verb] if flag.startswith(word)]
    if verb == "render" and not typed:
        return ["kuberay"]
    found = _ask_hydra([*typed[verb == "render" :], word], arguments)
    is_key_alone = verb == "explain" and not typed
    return [one.removesuffix("=") if is_key_alone else one for one in found]


def _ask_hydra(words: list[str], arguments: list[str]) -> list[str]:
    from rlrecipes.config.compose import run_hydra_app

    kept, dirs, flag = [], [], ""
    for word in words:
        if flag == "--config-dir":
            dirs += [flag, word]
        elif not flag and not word.startswith("-"):
            kept.append(word)
        flag = word if word.startswith("-") and "=" not in word and word not in _WITHOUT_VALUE else ""
        dirs += [word] if word.startswith("--config-dir=") else []
    os.environ["COMP_LINE"] = " ".join(["rlrecipes", *kept])
    printed = io.StringIO()
    # A recipe that cannot be composed yet has no completion; a message would spoil the line.
    quiet = (contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()))
    with quiet[0], quiet[1], contextlib.suppress(RecipeError, SystemExit):
        run_hydra_app(lambda recipe: None, [*arguments, *dirs])
    return [one for one in printed.getvalue().split() if words[-1].startswith("h") or not one.startswith("hydra")]
