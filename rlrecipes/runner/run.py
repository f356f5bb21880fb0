"""Executes a Plan: builds every part in order, runs the loop, and takes everything down again, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.config.schema import RlConfig
from rlrecipes.errors import ConfigError, Interrupted, Pruned, RecipeError, WeightSyncError
from rlrecipes.plan.cluster import check_is_here
from rlrecipes.plan.comparison import compare_plans
from rlrecipes.plan.facts import find_obstacles
from rlrecipes.plan.lock import Lock, build_lock, check_lock, read_lock, to_lock_path, write_lock
from rlrecipes.plan.nodes import Plan, load_plan
from rlrecipes.rollout.evaluation import EvaluationResult, run_evaluation
from rlrecipes.runner.build import (
    Inputs,
    ServedClients,
    build_collector,
    build_eval_generator,
    build_inputs,
    build_plan_reward,
    build_run_tracker,
    build_system_sampler,
)
from rlrecipes.runner.checkpoint import CheckpointStore, RunState, check_same_recipe
from rlrecipes.runner.cluster import RayCluster, TrainerGroup
from rlrecipes.runner.faults import RunLock, StopRequest, keeping_signal_handlers
from rlrecipes.runner.loop import Loop, Parts
from rlrecipes.runner.preparation import run_preparation, write_tasks
from rlrecipes.runner.pruning import build_pruner
from rlrecipes.runner.rank import is_sent_by_all
from rlrecipes.runner.readiness import check_is_ready
from rlrecipes.runner.servers import Engine, Serving
from rlrecipes.runner.training import Learner, build_objective
from rlrecipes.runner.turns import GpuTurns
from rlrecipes.tracking.log import read_records, write_atomically
from rlrecipes.tracking.mlflow_sink import METRICS_FILE
from rlrecipes.tracking.progress import build_progress
from rlrecipes.tracking.sweeps import find_point
from rlrecipes.tracking.tracker import RunStatus, Tracker

_EXPORTED_STEP_FILE = ".hf_step"
_PLAN_FILE = "plan.yaml"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run leaves behind.

    Attributes:
        run_dir: where.
        steps: completed.
        evaluations: step -> held-out accuracy, of this process.
        hf_path: the exported model; None when the recipe asks for none.
    """

    run_dir: Path
    steps: int
    evaluations: Mapping[int, float]
    hf_path: Path | None


def run_plan(plan: Plan, stop: StopRequest | None = None) -> RunResult:
    """Train as the Plan says, resuming when its run directory holds a checkpoint.

    Args:
        plan: the Plan.
        stop: takes the signals that come meanwhile, also those that come too late to stop it.

    Raises:
        InputError: a file, the run directory or this machine does not fit; nothing was started.
        RunError: the run failed; the last checkpoint stands.
        Interrupted: a signal stopped it in order.
        Pruned: other points of its sweep are better.
    """
    if obstacles := find_obstacles(plan.model):
        raise ConfigError.from_problems(obstacles)
    check_is_here(plan)
    run_dir = Path(plan.run_dir)
    with RunLock(run_dir):
        store = CheckpointStore(run_dir, plan.schedule.num_kept_checkpoints)
        checkpoint, state = _find_resume_point(plan, store)
        if state is None or not _is_finished(plan, state):
            check_is_ready(plan)
            clients = ServedClients(plan)
            reward = build_plan_reward(plan, clients)
            build_objective(plan)  # a loss of the user's own that cannot be imported is told before anything starts
            is_held_to_lock = state is not None and plan.resume != "accept_changes"
            saved = read_lock(run_dir / _PLAN_FILE) if is_held_to_lock else None
            run_preparation(plan, is_new=state is None, lock=saved)
            inputs = build_inputs(plan, reward, clients)
            _lock(plan, run_dir / _PLAN_FILE, saved)
            write_atomically(run_dir / _PLAN_FILE, plan.to_yaml().encode())
            with keeping_signal_handlers():
                return asyncio.run(_run(plan, inputs, store, checkpoint, state, stop or StopRequest()))
        hf_path = run_dir / "hf"
        return RunResult(run_dir, state.step, {}, hf_path if hf_path.is_dir() else None)


def _find_resume_point(plan: Plan, store: CheckpointStore) -> tuple[Path | None, RunState | None]:
    checkpoint = store.find_latest()
    if checkpoint is None:
        if plan.resume == "required":
            fix = "start it without resume=required, or name the right run_dir"
            raise ConfigError("resume", f"{plan.run_dir} holds no checkpoint", fix)
        _check_has_never_saved(Path(plan.run_dir) / METRICS_FILE)
        return None, None
    if plan.resume == "never":
        fix = "choose another name or run_dir, or set resume=auto"
        raise ConfigError("resume", f"{plan.run_dir} already holds {checkpoint.name}", fix)
    state = store.read_state(checkpoint)
    check_same_recipe(state.plan, plan, checkpoint)
    return checkpoint, state


def _check_has_never_saved(metrics: Path) -> None:
    """A run from the start forgets what was logged, which must not be what a lost checkpoint took hours for."""
    records = read_records(metrics) if metrics.exists() else []
    if any("time/checkpoint_s" in record.metrics for record in records):
        problem = f"{metrics.parent} has metrics to step {records[-1].step} and no checkpoint any more"
        fix = f"restore its checkpoints, choose another name, or remove {metrics} to start anew"
        raise ConfigError("resume", problem, fix)


def _is_finished(plan: Plan, state: RunState) -> bool:
    if state.is_evaluation_due:
        return False
    is_exported = not plan.schedule.should_export_hf or _read_exported_step(plan) == state.step
    return state.step >= plan.schedule.num_steps and is_exported


def _read_exported_step(plan: Plan) -> int | None:
    try:
        return int((Path(plan.run_dir) / _EXPORTED_STEP_FILE).read_text())
    except (OSError, ValueError):
        return None


def _lock(plan: Plan, plan_path: Path, saved: Lock | None) -> None:
    """A run that goes on must find the model and the data it began with."""
    lock = build_lock(plan)
    if saved is not None:
        for note in check_lock(saved, lock, to_lock_path(plan_path)):
            print(f"  note: {note}", flush=True)
    write_lock(lock, plan_path)


async def _run(
    plan: Plan,
    inputs: Inputs,
    store: CheckpointStore,
    checkpoint: Path | None,
    state: RunState | None,
    stop: StopRequest,
) -> RunResult:
    step = state.step if state else 0
    async with AsyncExitStack() as stack:
        tracker = _start_tracker(plan, state, stack)
        system = stack.enter_context(build_system_sampler(plan))
        progress = stack.enter_context(build_progress(plan.schedule.num_steps, plan.name, step))
        if state is not None:
            progress.show(f"resuming {plan.run_dir} after step {step}")
        serving, trainers, turns = await _start_processes(plan, checkpoint, stack, stop, progress.show)
        collector = eval_generator = None
        if serving is not None:
            await inputs.clients.open(serving.router_url, stack)
            collector = build_collector(plan, inputs) if isinstance(plan.algo, RlConfig) else None
            eval_generator = build_eval_generator(plan, inputs) if inputs.eval_prompts else None
        if collector is not None and state is not None:
            collector.restore(state.collector)
        parts = Parts(
            plan=plan,
            inputs=inputs,
            trainers=trainers,
            turns=turns,
            learner=Learner(plan, trainers, system.phase),
            store=store,
            tracker=tracker,
            system=system,
            progress=progress,
            stop=stop,
            pruner=build_pruner(plan),
            serving=serving,
            collector=collector,
            eval_generator=eval_generator,
        )
        is_evaluation_due = state.is_evaluation_due if state else plan.schedule.should_eval_before
        loop = Loop(
            parts,
            step,
            state.weight_version if state else 0,
            is_evaluation_due=is_evaluation_due,
            next_sample=state.collector.get("next_index", 0) if state else 0,
        )
        # What start-up made stays. A step makes some hundred thousand objects, so full collections come often, and each
        # would look through all of it while answers wait: up to half a second.
        gc.freeze()
        reached = await loop.run()
        hf_path = await _export(plan, trainers, reached)
        if hf_path is not None and plan.tracking.registered_model is not None:
            tracker.register_model(plan.tracking.registered_model, hf_path, reached)
    return RunResult(Path(plan.run_dir), reached, parts.evaluations, hf_path)


def _start_tracker(plan: Plan, state: RunState | None, stack: AsyncExitStack) -> Tracker:
    tracker = build_run_tracker(plan, state.mlflow_run_id if state else None)

    def finish(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        failed = RunStatus.INTERRUPTED if kind in (Interrupted, Pruned) else RunStatus.FAILED
        tracker.finish(RunStatus.FINISHED if kind is None else failed, _tell(error))

    stack.push(finish)
    tracker.resume(state.step if state else -1)
    tracker.log_plan(plan.to_execution(), plan.to_yaml(), plan.describe_changes())
    if (text := _describe_point(plan)) is not None:
        tracker.log_text("sweep_diff.txt", text)
    return tracker


def _describe_point(plan: Plan) -> str | None:
    """What a point says differently from the recipe that its sweep began from."""
    found = find_point(Path(plan.runs_dir), plan.tracking.sweep, Path(plan.run_dir))
    if found is None or not found[0].base_path.exists():
        return None
    differences = compare_plans(load_plan(found[0].base_path), plan)
    told = [one for one in differences if one.kind != "prediction" and one.path != "tracking.sweep"]
    return "".join(f"{one.path}: {one.left} -> {one.right}\n" for one in told)


def _tell(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, Interrupted):
        return f"stopped by {signal.Signals(error.signal_number).name}"
    return str(error) if isinstance(error, RecipeError | Pruned) else f"{type(error).__name__}: {error}"


async def _start_processes(
    plan: Plan, checkpoint: Path | None, stack: AsyncExitStack, stop: StopRequest, show: Callable[[str], None]
) -> tuple[Serving | None, TrainerGroup, GpuTurns]:
    cluster = RayCluster(plan)
    stack.push_async_callback(cluster.close)
    stop.install()
    if cluster.is_joined:  # engines of other machines are started through it
        await cluster.launch()
        await stop.run(cluster.settle())
    serving = Serving(plan, show, cluster.machines) if plan.served_models else None
    if serving is not None:
        stack.push_async_callback(serving.close)
        await stack.enter_async_context(serving.naming_deaths())
        serving.launch()  # engines come up while Ray and the trainers do
    trainers = TrainerGroup(plan, Path(plan.run_dir) / "logs", cluster)
    stack.push_async_callback(trainers.close)
    turns = GpuTurns(plan, trainers, serving)
    if not cluster.is_joined:
        await cluster.launch()
    are_engines_first = _share_gpus(plan)
    if serving is not None and are_engines_first:
        # An engine takes a share of what it finds free: trainers come when it has, and has given back what it will.
        await stop.run(serving.wait_until_ready())
        await stop.run(turns.put_engines_to_sleep())
    await stop.run(_start_trainers(plan, trainers, checkpoint))
    if serving is not None:
        if not are_engines_first:
            await stop.run(serving.wait_until_ready())
        await stop.run(_connect(trainers, plan, serving.updated_engines))
    return serving, trainers, turns


def _share_gpus(plan: Plan) -> bool:
    return (plan.trainer.device == "cuda" and plan.shares_gpus) or plan.should_offload_engines


async def _start_trainers(plan: Plan, trainers: TrainerGroup, checkpoint: Path | None) -> None:
    await trainers.start()
    await trainers.run("load_hf", str(Path(plan.model.path).absolute()))  # the reference too, where one is kept
    if checkpoint is not None:
        await trainers.run("load_checkpoint", str(checkpoint.absolute()))


async def _connect(trainers: TrainerGroup, plan: Plan, updated: Sequence[Engine]) -> None:
    if is_sent_by_all(plan):
        engines = [(engine.url, engine.num_ranks, find_trainer_ranks(plan, engine)) for engine in updated]
        await trainers.run("connect", engines)
        return
    for ranks in plan.trainer.weight_sources:  # in turn, as they send
        await trainers.run("connect", [(engine.url, engine.num_ranks, ()) for engine in updated], ranks=ranks)


def find_trainer_ranks(plan: Plan, engine: Engine) -> tuple[int, ...]:
    """The trainer rank on the GPU of each rank of an engine.

    Args:
        plan: the Plan.
        engine: one that weight syncs reach.

    Raises:
        WeightSyncError: an engine's rank lies where no trainer rank is, or nobody knows where.
    """
    ranks = {(device.node, device.gpu): rank for rank, device in enumerate(plan.trainer.devices)}
    found = [ranks.get((device.node, device.gpu)) for device in engine.devices]
    shared = tuple(rank for rank in found if rank is not None)
    if not found or len(shared) < len(found):
        problem = "handles of GPU memory do not reach it: it is not known to lie on the trainer's GPUs"
        raise WeightSyncError(f"engine {engine.url}", problem, "use weight_sync=distributed or weight_sync=disk")
    return shared


async def _export(plan: Plan, trainers: TrainerGroup, step: int) -> Path | None:
    if not plan.schedule.should_export_hf:
        return None
    path, marker = Path(plan.run_dir) / "hf", Path(plan.run_dir) / _EXPORTED_STEP_FILE
    marker.unlink(missing_ok=True)  # an export of another step must not pass for this one's
    await trainers.run("export_hf", str(path.absolute()), str(Path(plan.model.path).absolute()))
    marker.write_text(str(step))
    return path


def run_held_out_evaluation(plan: Plan) -> EvaluationResult:
    """Evaluate the Plan's model as it is, without a trainer.

    Args:
        plan: the Plan.

    Raises:
        ConfigError: nothing is held out, or another process uses the run directory.
        RunError: the engines failed.
    """
    check_is_here(plan)
    if plan.data.eval_path is None or plan.policy is None:
        raise ConfigError("data.eval_path", "is null: nothing is held out", "give data.eval_path=<JSONL file>")
    if plan.model.is_random:
        problem = "the recipe's model has random weights: there is nothing to measure"
        raise ConfigError("model.path", problem, f"train first, then give model=hf model.path={plan.run_dir}/hf")
    check_is_ready(plan, should_train=False)
    clients = ServedClients(plan)
    reward = build_plan_reward(plan, clients)
    write_tasks(plan)
    inputs = build_inputs(plan, reward, clients, should_train=False)
    with RunLock(Path(plan.run_dir)), keeping_signal_handlers():
        return asyncio.run(_evaluate(plan, inputs))


async def _evaluate(plan: Plan, inputs: Inputs) -> EvaluationResult:
    stop = StopRequest()
    stop.install()
    async with AsyncExitStack() as stack:
        cluster = RayCluster(plan)
        if cluster.is_joined:
            stack.push_async_callback(cluster.close)
            await cluster.launch()
            await stop.run(cluster.settle())
        serving = Serving(plan, print, cluster.machines)
        stack.push_async_callback(serving.close)
        await stack.enter_async_context(serving.naming_deaths())
        serving.launch()
        await stop.run(serving.wait_until_ready())
        await inputs.clients.open(serving.router_url, stack)
        work = run_evaluation(
            build_eval_generator(plan, inputs),
            inputs.eval_prompts,
            max_concurrent_requests=plan.rollout.max_concurrent_requests,
            max_failed_fraction=plan.rollout.max_failed_fraction,
        )
        return await stop.run(work)
