"""Tokens/s of the project's own way to an engine against a bare client, on one SGLang server in one run.

The bare client posts the same requests with aiohttp straight to the engine and reads ids and log probabilities. The
project's way is what a step does: the loop's collector, client, the real sglang-router, parsing, decoding, the recipe's
reward, and the watch over the engines' load. A third leg leaves the router out. All legs ask the same prompts with the
same seeds, every answer is as long as it may be, the prefix cache is emptied before each, and legs take turns. Needs a
GPU and SGLang, no network::

    python benchmarks/gpu/rollout_efficiency.py --model DIR [--repeats 5] [--budget-s 300] [overrides ...]

Environment: as in colocated.py, whose engine options it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import faulthandler
import io
import os
import pstats
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from colocated import GROUP, RECIPE, SGLANG, SMALL
from watched_run import print_failure

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import Plan
from rlrecipes.rollout.generate import compute_rollout_seed
from rlrecipes.runner.build import Inputs, ServedClients, build_collector, build_inputs, build_plan_reward
from rlrecipes.runner.loop import Loop, Parts
from rlrecipes.runner.preparation import run_preparation
from rlrecipes.runner.resolution import resolve_recipe
from rlrecipes.runner.servers import Serving
from rlrecipes.tracking.system import SystemSampler

BARE, PROJECT, DIRECT = "bare client", "project", "project, no router"
Leg = Callable[[int], Awaitable[int]]
"""Asks everything of one turn; returns the number of generated tokens."""
WAVES = 4
"""Requests of a leg, as a multiple of those at once."""
PROFILE_LINES = 25
TARGET = 0.97


class SilentProgress:
    """Shows nothing."""

    def update_rollout(self, *shown: float) -> None:
        """Called by the loop after every group."""


def build_overrides(arguments: argparse.Namespace, run_dir: Path, concurrency: int) -> list[str]:
    """The recipe with answers of one length, the caller's words last."""
    found = [f"recipe={RECIPE}", f"run_dir={run_dir}", *SMALL]
    found += [
        "rollout.sampling.stop=[]",
        "rollout.sampling.ignore_eos=true",
        f"rollout.sampling.max_new_tokens={arguments.new_tokens}",
    ]
    found += [f"rollout.max_concurrent_requests={concurrency}", f"algo.group_size={arguments.group_size}"]
    found += [f"schedule.prompts_per_step={WAVES * concurrency // arguments.group_size}"]
    found += [f"model.path={arguments.model}", f"topology={arguments.topology}"]
    found += [f"{GROUP}.start_timeout_s={arguments.budget_s}"]
    if arguments.topology == "colocated":
        found += [f"+{GROUP}.sglang.{name}={value}" for name, value in SGLANG.items()]
        if path := os.environ.get("ROLLOUT_PATH"):
            found.append(f"+{GROUP}.env.PYTHONPATH={path}")
    return [*found, *arguments.overrides]


def build_bare_leg(plan: Plan, inputs: Inputs, session: aiohttp.ClientSession, url: str) -> Leg:
    """The same requests as a person would write them."""
    assert inputs.prompts is not None
    source, sampling, num_prompts = inputs.prompts, plan.rollout.sampling, plan.batch.prompts_per_step

    async def leg(turn: int) -> int:
        slots = asyncio.Semaphore(plan.rollout.max_concurrent_requests)

        async def ask(token_ids: tuple[int, ...], seed: int) -> int:
            params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            params |= {"max_new_tokens": sampling.max_new_tokens, "ignore_eos": True, "sampling_seed": seed}
            body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True}
            async with slots, session.post(url + "/generate", data=orjson.dumps(body)) as response:
                answer = orjson.loads(await response.read())
                return len(answer["meta_info"]["output_token_logprobs"])

        prompts = [source.prompt(index) for index in range(turn * num_prompts, (turn + 1) * num_prompts)]
        asking = (
            ask(prompt.token_ids, compute_rollout_seed(plan.seed, prompt.index, sibling))
            for prompt in prompts
            for sibling in range(plan.batch.group_size)
        )
        return sum(await asyncio.gather(*asking))

    return leg


def build_project_leg(plan: Plan, inputs: Inputs, serving: Serving) -> Leg:
    """What the loop does; every call takes the next prompts."""
    collector = build_collector(plan, inputs)
    missing: Any = None  # collecting touches no trainer
    parts = Parts(
        plan=plan,
        inputs=inputs,
        trainers=missing,
        turns=missing,
        learner=missing,
        store=missing,
        tracker=missing,
        system=SystemSampler(Path(plan.run_dir)),
        progress=SilentProgress(),  # type: ignore[arg-type]
        stop=missing,
        serving=serving,
        collector=collector,
        eval_generator=None,
    )
    loop = Loop(parts, 0, 0, is_evaluation_due=False, next_sample=0)

    async def leg(turn: int) -> int:
        collection, _ = await loop._collect(collector, serving)
        collector.confirm_trained()
        assert [group.prompt.index for group in collection.groups] == list(
            range(turn * plan.batch.prompts_per_step, (turn + 1) * plan.batch.prompts_per_step)
        )
        return collection.num_tokens

    return leg


async def measure(legs: dict[str, Leg], plan: Plan, serving: Serving, repeats: int, deadline_s: float) -> list[Any]:
    """Turns of all legs, each turn beginning with another one: (leg, tokens/s, CPU seconds of this process)."""
    rows: list[Any] = []
    engine = serving.policy_engines[0].client
    names, wanted = [*legs], WAVES * plan.rollout.max_concurrent_requests * plan.rollout.sampling.max_new_tokens
    for turn in range(repeats + 1):  # turn 0 warms up
        started_s = time.monotonic()
        found = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            await engine.flush_cache()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            num_tokens = await legs[name](turn)
            time_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            assert num_tokens == wanted, f"{name}: {num_tokens} tokens instead of {wanted}"
            found[name] = (num_tokens / time_s, cpu_s / time_s)
        if turn:
            rows.append(found)
            rates = ", ".join(f"{name} {found[name][0]:,.0f}" for name in names)
            print(f"  {plan.rollout.max_concurrent_requests} at once, turn {turn}: {rates} tokens/s", flush=True)
        if time.monotonic() + 1.5 * (time.monotonic() - started_s) > deadline_s:
            print("  no time for another turn", flush=True)
            break
    return rows


def spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def render(measured: dict[int, list[Any]]) -> str:
    """One row a concurrency and leg; ratios are of the same turn."""
    lines = [
        f"| at once | leg | tokens/s | of the bare client (target {TARGET}) | CPU of the client, cores |",
        "|---|---|---|---|---|",
    ]
    for concurrency, rows in measured.items():
        for name in (BARE, PROJECT, DIRECT) if rows else ():
            rates, busy = ([row[name][column] for row in rows] for column in (0, 1))
            ratios = "" if name == BARE else spread([row[name][0] / row[BARE][0] for row in rows], ".3f")
            line = f"| {concurrency} | {name} | {spread(rates, ',.0f')} | {ratios} |"
            lines.append(f"{line} {statistics.median(busy):.2f} |")
    return "\n".join(lines)


async def profile(leg: Leg, turn: int) -> str:
    """Where this process spends its CPU time in one turn of a leg."""
    profiler = cProfile.Profile()
    profiler.enable()
    await leg(turn)
    profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(PROFILE_LINES)
    return "\n".join(line[:150] for line in out.getvalue().splitlines() if line.strip())


async def run(arguments: argparse.Namespace, run_dir: Path, measured: dict[int, list[Any]]) -> None:
    deadline_s = time.monotonic() + arguments.budget_s
    plans = {
        concurrency: resolve_recipe(compose(build_overrides(arguments, run_dir, concurrency)))
        for concurrency in arguments.concurrency
    }
    first = plans[arguments.concurrency[0]]
    run_preparation(first, is_new=True)
    async with asyncio.timeout(arguments.budget_s), AsyncExitStack() as stack:
        serving = Serving(first, print)
        stack.push_async_callback(serving.close)
        started_s = time.monotonic()
        serving.launch()
        await serving.wait_until_ready()
        print(f"engine and router are up after {time.monotonic() - started_s:.0f} s", flush=True)
        engine_url = serving.policy_engines[0].url
        connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=arguments.budget_s)
        headers = {"Content-Type": "application/json"}
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers)
        )
        shares = len(plans)
        for number, (concurrency, plan) in enumerate(plans.items()):
            legs: dict[str, Leg] = {}
            for name, find_router in ((PROJECT, serving.router_url), (DIRECT, lambda _: engine_url)):
                clients = ServedClients(plan)
                await clients.open(find_router, stack)
                inputs = build_inputs(plan, build_plan_reward(plan, clients), clients)
                if not legs:
                    legs[BARE] = build_bare_leg(plan, inputs, session, engine_url)
                legs[name] = build_project_leg(plan, inputs, serving)
            share_s = (deadline_s - time.monotonic() - arguments.reserve_s) / (shares - number)
            rows = await measure(legs, plan, serving, arguments.repeats, time.monotonic() + share_s)
            measured[concurrency] = rows
            print(f"\nCPU of the project's leg, {concurrency} at once, one turn:", flush=True)
            print(await profile(legs[PROJECT], len(rows) + 1), flush=True)
    print(f"the project's legs reward with {first.reward.name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--budget-s", type=float, default=300.0, help="of everything, the engine's start included")
    parser.add_argument("--topology", default="colocated", help="embedded: a try without a GPU")
    parser.add_argument("overrides", nargs="*", help="further ones of the recipe")
    arguments = parser.parse_args()
    arguments.reserve_s = 0.1 * arguments.budget_s
    faulthandler.dump_traceback_later(arguments.budget_s + 40, exit=True)
    run_dir = Path(tempfile.mkdtemp(prefix="rollout-efficiency-")).absolute()
    measured: dict[int, list[Any]] = {}
    failure = ""
    try:
        asyncio.run(run(arguments, run_dir, measured))
    except Exception:
        failure = traceback.format_exc()
    print(f"\n{render(measured)}", flush=True)
    if failure:
        print_failure(failure, run_dir)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
