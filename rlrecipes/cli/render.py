"""`rlrecipes render kuberay [overrides] --image IMAGE`: a Plan as a manifest for somebody else to start."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from rlrecipes.cli.flags import Parser
from rlrecipes.config.compose import compose
from rlrecipes.runner.kuberay import to_kuberay
from rlrecipes.runner.resolution import resolve_recipe


def _build_parser() -> Parser:
    parser = Parser(
        prog="rlrecipes render",
        description=__doc__,
        epilog="kuberay: a ConfigMap and a RayJob for `kubectl apply -f -`; nothing is applied here.",
    )
    parser.add_argument("target", choices=("kuberay",))
    parser.add_argument("words", nargs="*", metavar="OVERRIDE", help="of the recipe")
    parser.add_argument("--image", required=True, help="of all pods; it holds rlrecipes and what the recipe needs")
    parser.add_argument("--claim", help="PersistentVolumeClaim that is the working directory of all pods")
    parser.add_argument("--namespace", help="of Kubernetes")
    parser.add_argument("--config-dir", type=Path, help="groups of your own")
    return parser


def run(arguments: list[str]) -> None:
    """Print the manifest.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: the recipe is wrong, or an option is.
    """
    asked = _build_parser().parse_intermixed_args(arguments)
    plan = resolve_recipe(compose(asked.words, asked.config_dir))
    documents = to_kuberay(plan, image=asked.image, claim=asked.claim, namespace=asked.namespace)
    print(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120), end="")
    if asked.claim is None:
        print("note: without --claim what the run writes ends with its pods", file=sys.stderr)


class _Dumper(yaml.SafeDumper):
    """Writes the Plan as a block that a person can read, and says nothing twice by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _to_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _to_block)
