"""`rlrecipes <verb> ...`: finds the verb, and turns what goes wrong into one message and an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from types import FrameType

from rlrecipes import __version__
from rlrecipes.cli.flags import is_json_asked
from rlrecipes.errors import Interrupted, RecipeError
from rlrecipes.suggest import did_you_mean

VERBS = {
    "train": "run a recipe, resuming when its run directory holds a checkpoint",
    "plan": "resolve a recipe and show what would run where; starts nothing",
    "run": "execute a saved plan: rlrecipes run plan.yaml",
    "eval": "measure a model on held-out prompts, without training",
    "jobs": "runs that were submitted to SLURM: state, step, reward, why they wait; --cancel ends one",
    "compare": "hold runs against each other: what differs, what came of it",
    "diff": "what two recipes, plans or runs say differently, and who said it",
    "explain": "what a key means, who set it, what depends on it",
    "search": "rank the layouts of a recipe on a cluster by predicted time; prints the best as overrides",
    "calibrate": "fit the constants of the predictions to the metrics of runs",
    "render": "a plan as a manifest: rlrecipes render kuberay recipe=... --image IMAGE",
    "init": "write a project of your own: rlrecipes init DIR",
    "doctor": "what this machine lacks: packages, GPUs, memory, limits, disk, ports, network",
}
_COMPLETION = ("-sc", "--shell-completion")
_TRACEBACK = "RLRECIPES_TRACEBACK"


def main() -> None:
    """Entry point; exits with 0, 1 (the run failed), 2 (the input is wrong) or 128 plus a signal's number."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line.

    Args:
        arguments: after the program's name.

    Returns:
        The exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except RecipeError as error:
        if is_json_asked(arguments):
            print(error.to_json(), flush=True)
            return error.exit_code
        return _report(str(error), error.exit_code)
    except Interrupted as stop:
        message = "stopped by a signal; rerun the same command to go on from the last checkpoint"
        return _report(message, 128 + stop.signal_number)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return 1
    except OSError as error:
        where, reason = error.filename or "disk", error.strerror or str(error)
        return _report(f"{where}: {reason}\n    fix: free space or mend permissions, then rerun", 1)
    except Exception as error:
        return _report(f"internal error: {type(error).__name__}: {error}\n    fix: report it with {_TRACEBACK}=1", 1)


def _stop(number: int, _: FrameType | None) -> None:
    """Until a run has processes to stop, and handlers of its own, it is left where it stands."""
    raise Interrupted(number)


def _dispatch(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if verb == "--version":
        print(f"rlrecipes {__version__}")
        return 0
    if verb in _COMPLETION:
        from rlrecipes.cli.completion import complete

        complete(arguments, VERBS)
        return 0
    if verb not in VERBS:
        raise_unknown_verb(verb)
    gc.disable()  # what modules are made of stays: looking through it for garbage took a tenth of a plan's time
    module = importlib.import_module(f"rlrecipes.cli.{verb}")
    gc.freeze()
    gc.enable()
    code: int | None = module.run(arguments[1:])
    return code or 0


def raise_unknown_verb(verb: str) -> None:
    """Raise for a verb that is none.

    Raises:
        InputError: always.
    """
    from rlrecipes.errors import InputError

    raise InputError("rlrecipes", f"{verb!r} is not a verb", did_you_mean(verb, VERBS))


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return (
        f"usage: rlrecipes <verb> [group=option] [key=value] [Hydra flags]\n\n{verbs}\n\n"
        "examples:\n"
        "  rlrecipes plan recipe=quickstart_sft\n"
        "  rlrecipes train recipe=quickstart_sft schedule.num_steps=50\n"
        "  rlrecipes train -m recipe=quickstart seed=1,2,3\n\n"
        "`--format json` tells plans and problems to programs; `rlrecipes train --help` lists groups and options; "
        'completion: eval "$(rlrecipes -sc install=bash)"'
    )


def _report(message: str, code: int) -> int:
    if os.environ.get(_TRACEBACK):
        traceback.print_exc()
    print(f"rlrecipes: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
