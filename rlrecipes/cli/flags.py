"""What of a command line is ours: flags beside Hydra's, taken out of the words that it gets, and verbs without it."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from rlrecipes.errors import InputError
from rlrecipes.suggest import did_you_mean


class Parser(argparse.ArgumentParser):
    """The command line of a verb that Hydra does not read; what is wrong with it is an input error like any other."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Refuse a command line.

        Raises:
            InputError: always.
        """
        raise InputError(self.prog, message, f"see `{self.prog} --help`")


def take_flag(words: list[str], flag: str, example: str) -> str | None:
    """Remove ``--flag VALUE`` or ``--flag=VALUE`` from a command line.

    Args:
        words: after the verb; changed.
        flag: with its dashes.
        example: of a value, for who forgot it.

    Returns:
        The value; None where the flag is not given.

    Raises:
        InputError: it is given without a value, or twice.
    """
    found = [number for number, word in enumerate(words) if word.partition("=")[0] == flag]
    if not found:
        return None
    if len(found) > 1:
        raise InputError(flag, "is given twice", "give it once")
    word = words.pop(found[0])
    if "=" not in word and found[0] < len(words) and not words[found[0]].startswith("-"):
        return words.pop(found[0])
    value = word.partition("=")[2]
    if not value:
        raise InputError(flag, "has no value", f"write {flag} {example}")
    return value


def take_format(words: list[str], choices: Collection[str], default: str) -> str:
    """Remove ``--format`` from a command line. With ``json``, problems are told as JSON by every verb.

    Args:
        words: after the verb; changed.
        choices: what the verb can print.
        default: what it prints unasked.

    Raises:
        InputError: it is none of them.
    """
    asked = take_flag(words, "--format", "json")
    if asked is not None and asked not in choices:
        raise InputError("--format", f"is {asked!r}", did_you_mean(asked, choices))
    return asked or default


def is_json_asked(arguments: list[str]) -> bool:
    """Whether a command line asks for JSON; problems are then told in it too.

    Args:
        arguments: verb and all.
    """
    return "--format=json" in arguments or ("--format", "json") in zip(arguments, arguments[1:], strict=False)
