"""`rlrecipes search [overrides] [objective=...] [top=N]`: which layouts of a recipe a cluster runs fastest."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rlrecipes.cli.flags import Parser
from rlrecipes.config.compose import ComposedRecipe, compose
from rlrecipes.config.schema import SftConfig
from rlrecipes.errors import ConfigError, InputError, Problem
from rlrecipes.plan.cluster import Cluster
from rlrecipes.plan.facts import read_shapes
from rlrecipes.plan.memory import load_memory_constants
from rlrecipes.plan.predictions import StepTimeNode
from rlrecipes.plan.search import Candidate, Constants, Objective, SearchResult, Start, search
from rlrecipes.plan.step_time import compute_step_time, load_time_constants
from rlrecipes.runner.resolution import read_recipe_cluster, resolve_recipe
from rlrecipes.suggest import did_you_mean

TOPOLOGIES = {"colocated": "tensor", "disaggregated": "distributed", "pd": "distributed", "pd_colocated": "tensor"}
"""Topology to try -> how weights travel there, unless the command line says so."""
OBJECTIVES = ("samples_per_s", "cost")
_PLAIN_WIDTH = 160
"""Columns where there is no terminal to ask."""

type _Found = tuple[Candidate, StepTimeNode]


def _build_parser() -> Parser:
    parser = Parser(
        prog="rlrecipes search",
        description=__doc__,
        epilog="objective=samples_per_s (all GPUs) or cost (GPU-seconds a sample; also half the GPUs, a quarter ...); "
        f"topology=NAME tries only that one, else {', '.join(TOPOLOGIES)} are tried.",
    )
    parser.add_argument("words", nargs="*", metavar="OVERRIDE", help="of the recipe, and objective=, top=")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--config-dir", type=Path, help="groups of your own")
    return parser


def run(arguments: list[str]) -> None:
    """Search and print.

    Args:
        arguments: see ``--help``.

    Raises:
        ConfigError: the recipe is wrong with every topology, or no GPU is described.
        InputError: an option is wrong, or no layout is possible.
    """
    asked = _build_parser().parse_args(arguments)
    words, options = _split(asked.words)
    objective, top = _read_options(options)
    started_s = time.process_time()
    starts, skipped = _compose_starts(words, asked.config_dir)
    recipe = starts[0][1]
    problems: list[Problem] = []
    cluster = read_recipe_cluster(recipe, problems)
    shapes, _ = read_shapes(recipe.config.model, problems)
    if problems or shapes is None:
        raise ConfigError.from_problems(problems)
    if cluster.node.gpu is None:
        fix = "use a described cluster, e.g. cluster=h100_8, or gpu@cluster.gpu=NAME"
        raise InputError("cluster", "does not say what its GPUs are: no time can be predicted", fix)
    path = recipe.config.calibration
    constants = Constants(load_time_constants(path), load_memory_constants(path))
    result = search([start for start, _ in starts], shapes, cluster.node, cluster.hosts, constants, objective, top)
    found = _confirm(result, asked.config_dir)
    if not found:
        raise _nothing(result, cluster)
    cpu_s = time.process_time() - started_s
    if asked.format == "json":
        print(json.dumps(_to_data(found, result, skipped, cpu_s), indent=2))
    else:
        _print(found, result, skipped, cpu_s)


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    pairs = [word.partition("=") for word in words]
    options = {name: value for name, _, value in pairs if name in ("objective", "top")}
    return [word for word in words if word.partition("=")[0] not in options], options


def _read_options(options: dict[str, str]) -> tuple[Objective, int]:
    objective, top = options.get("objective", OBJECTIVES[0]), options.get("top", "10")
    if objective not in OBJECTIVES:
        raise InputError("objective", f"is {objective!r}", did_you_mean(objective, OBJECTIVES))
    if not top.isdigit() or int(top) == 0:
        raise InputError("top", f"is {top!r}", "give a number of layouts to show, e.g. top=10")
    return cast("Objective", objective), int(top)


def _compose_starts(
    words: Sequence[str], config_dir: Path | None
) -> tuple[list[tuple[Start, ComposedRecipe]], dict[str, str]]:
    """The recipe with each topology; and those that it does not go with, with the reason."""
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    chosen = given.get("topology")
    if chosen is not None and chosen not in TOPOLOGIES:
        raise InputError("topology", f"{chosen!r} is not searched", did_you_mean(chosen, TOPOLOGIES))
    starts, skipped, last = [], {}, None
    for topology, transport in TOPOLOGIES.items() if chosen is None else [(chosen, TOPOLOGIES[chosen])]:
        own = [] if chosen is not None else [f"topology={topology}"]
        own += [] if "weight_sync" in given else [f"weight_sync={transport}"]
        overrides = (*words, *own)
        try:
            recipe = compose(overrides, config_dir)
        except ConfigError as error:
            skipped[topology], last = str(error.problems[0]).partition("\n")[0], error
            continue
        starts.append((Start(topology, recipe.config, overrides), recipe))
        if isinstance(recipe.config.algo, SftConfig):
            break  # engines lie beside the trainer and serve its evaluation alone
    if not starts:
        raise last or InputError("topology", "there is none to try", "name one of the recipe's own")
    return starts, skipped


def _confirm(result: SearchResult, config_dir: Path | None) -> list[_Found]:
    """Candidates from the first on whose overrides resolve, by the very road of `rlrecipes plan`."""
    candidates = result.candidates
    constants = load_time_constants(candidates[0].config.calibration) if candidates else None
    for position, candidate in enumerate(candidates):
        try:
            step = resolve_recipe(compose(candidate.overrides, config_dir)).step_time
        except ConfigError as error:
            result.refusals[error.problems[0].where] += 1
            continue
        if step is not None and constants is not None:
            rest = candidates[position + 1 :]
            return [(candidate, step), *((other, compute_step_time(other.inputs, constants)) for other in rest)]
    return []


def _nothing(result: SearchResult, cluster: Cluster) -> InputError:
    reasons = [f"{count} refused by rules of {where}" for where, count in result.refusals.most_common(3)]
    reasons += [f"{result.num_too_large} too large for {cluster.node.name}"] if result.num_too_large else []
    fix = "use more or larger GPUs, shorter answers, or mend what the rules name"
    return InputError("search", f"none of {result.num_candidates} layouts is possible: {'; '.join(reasons)}", fix)


def _to_data(found: Sequence[_Found], result: SearchResult, skipped: dict[str, str], cpu_s: float) -> dict[str, Any]:
    return {
        "num_candidates": result.num_candidates,
        "num_too_large": result.num_too_large,
        "refused": dict(result.refusals),
        "skipped_topologies": skipped,
        "cpu_s": cpu_s,
        "candidates": [
            {
                "overrides": list(candidate.overrides),
                "samples_per_s": candidate.samples_per_s,
                "gpu_s_per_sample": candidate.gpu_s_per_sample,
                "step_time": step.model_dump(mode="json"),
            }
            for candidate, step in found
        ],
    }


def _print(found: Sequence[_Found], result: SearchResult, skipped: dict[str, str], cpu_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    table = Table(title="layouts, best first", title_justify="left", box=None)
    for column in ("", "samples/s", "step s", "rollout", "train", "sync", "GPU-s/sample", "GPUs"):
        table.add_column(column, justify="right")
    table.add_column("layout", overflow="fold")
    for number, (candidate, step) in enumerate(found, 1):
        seconds = (
            step.step_s,
            step.rollout_s,
            step.logprobs_s + step.train_s,
            step.weight_sync_s + step.offload_s,
        )
        figures = [f"{candidate.samples_per_s:.3g}", *(f"{value:.1f}" for value in seconds)]
        figures += [f"{candidate.gpu_s_per_sample:.3g}", str(candidate.num_gpus)]
        layout = f"{candidate.topology}: {_describe_trainer(candidate)}; {_describe_engines(candidate)}"
        table.add_row(str(number), *figures, layout)
    console.print(table)
    console.print(f"bottleneck of the first: {found[0][1].bottleneck}", highlight=False)
    refused = sum(result.refusals.values())
    console.print(
        f"{result.num_candidates} layouts in {cpu_s:.1f} s of CPU; {refused} refused by rules, "
        f"{result.num_too_large} too large; times are predictions (docs/step_time.md)",
        highlight=False,
    )
    for topology, reason in skipped.items():
        console.print(f"topology={topology} was not tried: {reason}", highlight=False)
    print(f"rlrecipes plan {shlex.join(found[0][0].overrides)}")


def _describe_trainer(candidate: Candidate) -> str:
    parallel = candidate.config.parallel
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "VPP": parallel.virtual_pipeline_model_parallel_size or 1,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["1 rank"]
    words.append(f"{parallel.max_tokens_per_micro_batch} tokens")
    words += ["recompute"] if parallel.recompute_granularity else []
    words += ["Adam on host"] if parallel.optimizer_cpu_offload else []
    return " ".join(words)


def _describe_engines(candidate: Candidate) -> str:
    kinds = {"regular": "", "prefill": " prefill", "decode": " decode"}
    return ", ".join(
        f"{group.num_engines}{kinds[group.worker_type]} x TP{group.tensor_parallel_size}"
        for group in candidate.inputs.engine_groups
    )
