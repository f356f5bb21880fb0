"""`rlrecipes doctor [overrides] [--nodes HOST,HOST] [--format table|json]`: what this machine lacks for a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rlrecipes.cli.flags import Parser
from rlrecipes.errors import InputError
from rlrecipes.runner.diagnosis.finding import Finding
from rlrecipes.runner.diagnosis.packages import check_dependencies


def _build_parser() -> Parser:
    parser = Parser(
        prog="rlrecipes doctor",
        description="What this machine lacks, for recipes on a CPU; what only GPUs need is a warning. With overrides: "
        "what that recipe lacks here. Exit code 1 when something that is needed is missing.",
        epilog="Of machines that --nodes names, or those of cluster=slurm and cluster=ray, the network is tried: over "
        "srun with SLURM, else over ssh.",
    )
    parser.add_argument("words", nargs="*", metavar="OVERRIDE", help="of a recipe, e.g. recipe=qwen3_4b")
    parser.add_argument("--nodes", metavar="HOST,HOST", help="machines between which the network is tried")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--config-dir", type=Path, help="groups of your own")
    return parser


def run(arguments: list[str]) -> int:
    """Look at this machine and say what it lacks.

    Args:
        arguments: see ``--help``.

    Returns:
        0, or 1 when something is missing.

    Raises:
        InputError: the recipe is wrong, or an option is.
    """
    asked = _build_parser().parse_intermixed_args(arguments)
    nodes = _read_nodes(asked.nodes)
    findings = check_dependencies()
    is_whole = all(one.state == "ok" for one in findings)
    try:
        for finding in _check(asked.words, asked.config_dir, nodes):
            findings.append(finding)  # one by one: those before an error count
    except InputError:
        raise
    except Exception as error:
        if is_whole:
            raise
        found = f"not looked at: {type(error).__name__}: {error}"
        findings.append(Finding("the rest", found, "everything", "mend what is missing, then ask again"))
    if asked.format == "json":
        print(json.dumps({"findings": [one.to_data() for one in findings]}, indent=2))
    else:
        from rlrecipes.runner.diagnosis.finding import to_table

        print(to_table(findings))
    return int(any(one.state == "missing" for one in findings))


def _read_nodes(text: str | None) -> list[str]:
    if text is None:
        return []
    nodes = [name.strip() for name in text.split(",")]
    if len(set(nodes)) < 2 or len(set(nodes)) < len(nodes) or not all(nodes):
        raise InputError("--nodes", f"is {text!r}", "name at least two machines, each once: --nodes a,b")
    return nodes


def _check(words: list[str], config_dir: Path | None, nodes: list[str]) -> Iterator[Finding]:
    from rlrecipes.config.compose import compose
    from rlrecipes.errors import ConfigError
    from rlrecipes.runner.diagnosis.finding import to_findings
    from rlrecipes.runner.diagnosis.gpus import check_gpus, check_plan
    from rlrecipes.runner.diagnosis.host import check_host
    from rlrecipes.runner.diagnosis.network import check_network
    from rlrecipes.runner.diagnosis.packages import check_imports, probe_packages
    from rlrecipes.runner.resolution import resolve_recipe

    recipe = compose(words, config_dir)
    config, plan, refused = recipe.config, None, []
    try:
        plan = resolve_recipe(recipe)
    except ConfigError as error:
        refused = to_findings(error.problems, config.name if words else "recipes of the CPU")
    probes = probe_packages()
    yield from check_imports(probes, has_router=plan is None or bool(plan.served_models))
    yield from check_host(config, plan, has_gpus=config.topology.device == "cuda")
    yield from refused
    if not words:
        yield from check_gpus(probes)
    elif plan is not None:
        yield from check_plan(plan, probes)
    cluster = config.cluster
    if not nodes and plan is not None and cluster.source in ("slurm", "ray") and len(plan.hosts) > 1:
        nodes = [host.name for host in plan.hosts]
    if nodes:
        is_slurm = cluster.source == "slurm" or "SLURM_JOB_ID" in os.environ
        yield from check_network(nodes, is_slurm=is_slurm, partition=cluster.partition)
