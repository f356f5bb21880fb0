"""The one loop: collect, train, sync; evaluate and save when due. Owns order and resume, no arithmetic."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.errors import Interrupted, Pruned
from rlrecipes.plan.nodes import Plan
from rlrecipes.rollout.collector import Collection, Collector, CollectProgress
from rlrecipes.rollout.evaluation import EvaluationResult, run_evaluation
from rlrecipes.rollout.groups import GroupGenerator, check_weight_version
from rlrecipes.rollout.metrics import compute_rollout_metrics
from rlrecipes.runner.build import Inputs
from rlrecipes.runner.checkpoint import CheckpointStore, RunState
from rlrecipes.runner.cluster import TrainerGroup
from rlrecipes.runner.faults import StopRequest
from rlrecipes.runner.pruning import Pruner
from rlrecipes.runner.rank import is_sent_by_all
from rlrecipes.runner.servers import Serving
from rlrecipes.runner.training import Learner
from rlrecipes.runner.turns import GpuTurns
from rlrecipes.tracking.progress import Progress
from rlrecipes.tracking.rollouts import build_record
from rlrecipes.tracking.system import SystemSampler
from rlrecipes.tracking.tracker import Tracker
from rlrecipes.weight_sync.session import run_sync

_POLL_INTERVAL_S = 0.1


@dataclass(slots=True)
class Parts:
    """What the loop drives; runner/run.py builds and closes them.

    ``serving``, ``collector`` and ``eval_generator`` are None where the run serves nothing (SFT without evaluation),
    ``collector`` also for SFT.
    """

    plan: Plan
    inputs: Inputs
    trainers: TrainerGroup
    turns: GpuTurns
    learner: Learner
    store: CheckpointStore
    tracker: Tracker
    system: SystemSampler
    progress: Progress
    stop: StopRequest
    pruner: Pruner | None
    serving: Serving | None
    collector: Collector | None
    eval_generator: GroupGenerator | None
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step -> held-out accuracy, for the closing words."""


class Loop:
    """Runs the steps of a Plan.

    Args:
        parts: everything it drives.
        step: completed so far.
        weight_version: of the weights the trainer holds; engines are brought to it first.
        is_evaluation_due: whether the step reached is still to be evaluated.
        next_sample: of SFT's stream; RL's cursor is the collector's.
    """

    def __init__(
        self, parts: Parts, step: int, weight_version: int, *, is_evaluation_due: bool, next_sample: int
    ) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._step = step
        self._weight_version = weight_version
        self._is_evaluation_due = is_evaluation_due
        self._next_sample = next_sample
        self._num_syncs = 0
        self._saved = (step, is_evaluation_due and step > 0)  # what the checkpoint gone on from says

    async def run(self) -> int:
        """Go from the step reached to the last, and leave a checkpoint whatever stops it in order.

        Returns:
            Steps completed.

        Raises:
            RunError: something failed; the last checkpoint stands.
            Interrupted: a signal came; a checkpoint of the last complete step was written.
            Pruned: other points of the sweep are better; the same.
        """
        try:
            await self._run_steps()
            await self._parts.turns.to_trainer()  # what is exported is read from its memory
            return self._step
        except (Interrupted, Pruned):
            if (self._step, self._is_evaluation_due) > self._saved:
                await self._parts.turns.to_trainer(is_last=True)
                await self._save()
            raise

    async def _run_steps(self) -> None:
        schedule = self._plan.schedule
        await self._start()
        while self._step < schedule.num_steps:
            await self._run_step()
            if self._step % schedule.save_interval == 0 or self._step == schedule.num_steps:
                self._parts.tracker.log_metrics(self._step, {"time/checkpoint_s": await self._save()})
            self._parts.stop.check()
            if self._parts.pruner is not None and self._step < schedule.num_steps:
                await asyncio.to_thread(self._parts.pruner.check, self._step)

    async def _start(self) -> None:
        """Engines hold the initial weights from disk; a resumed trainer has moved on. One sync settles it."""
        if self._parts.serving is None:
            return
        metrics = await self._sync(self._weight_version)
        if self._step == 0:
            self._parts.tracker.log_metrics(0, metrics)
        await self._evaluate_if_due()
        if self._saved[1]:  # or every further start from this checkpoint would evaluate it again
            self._parts.store.confirm_evaluated(self._step)
            self._saved = (self._step, False)

    async def _run_step(self) -> None:
        started_s = time.monotonic()
        self._parts.turns.take_spent_s()  # by what lay between the steps: start, evaluation, checkpoint
        is_rl = self._parts.collector is not None
        metrics = await (self._learn_from_rollouts() if is_rl else self._learn_from_samples())
        self._step += 1
        self._is_evaluation_due = self._should_evaluate()
        if is_rl or self._is_evaluation_due:
            resent_s = metrics.get("weight_sync/time_s", 0.0)
            metrics |= await self._sync(self._weight_version + 1)
            metrics["weight_sync/time_s"] += resent_s
        step_s = time.monotonic() - started_s
        if is_rl:
            wait_s = metrics["rollout/time_s"]
            metrics |= {
                "time/wait_s": wait_s,
                "time/wait_fraction": wait_s / step_s,
                "time/idle_fraction": 1 - wait_s / step_s,
            }
        metrics |= {"time/step_s": step_s, "time/offload_s": self._parts.turns.take_spent_s()}
        metrics |= self._parts.system.take()
        self._parts.tracker.log_metrics(self._step, metrics)
        self._parts.progress.finish_step(self._step - 1, metrics)
        await self._evaluate_if_due()

    def _should_evaluate(self) -> bool:
        schedule = self._plan.schedule
        is_last = self._step == schedule.num_steps
        is_interval = schedule.eval_interval > 0 and self._step % schedule.eval_interval == 0
        return self._parts.eval_generator is not None and (is_last or is_interval)

    async def _learn_from_rollouts(self) -> dict[str, float]:
        collector, serving = self._parts.collector, self._parts.serving
        if collector is None or serving is None:
            raise RuntimeError("RL needs a collector and engines")
        serving.check_alive()
        resent_s = await self._make_engines_ready()
        are_all_new = collector.num_waiting_groups == 0  # of a restored buffer, groups may outlive a smaller step
        with self._parts.system.phase("rollout"):
            collection, kv_use = await self._parts.stop.run(self._collect(collector, serving))
        if are_all_new:
            check_weight_version(collection.groups, self._weight_version)
        num_gpus = sum(engine.num_ranks for engine in serving.policy_engines)
        metrics = compute_rollout_metrics(collection, num_gpus=num_gpus, weight_version=self._weight_version)
        metrics |= {
            "rollout/kv_cache_use_fraction": kv_use,
            "buffer/num_groups": float(collector.num_waiting_groups),
            "weight_sync/time_s": resent_s,
        }
        await self._parts.turns.to_trainer()
        metrics |= await self._parts.learner.train_groups(
            collection.groups, step=self._step, weight_version=self._weight_version
        )
        collector.confirm_trained()
        found = collection.groups, collection.num_filtered, collection.dropped
        self._parts.tracker.log_rollouts(build_record(self._step + 1, "train", self._plan.data.name, *found))
        return metrics

    async def _collect(self, collector: Collector, serving: Serving) -> tuple[Collection, float]:
        def show(progress: CollectProgress) -> None:
            rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
            self._parts.progress.update_rollout(
                progress.num_groups, progress.num_wanted_groups, rate, progress.mean_reward
            )

        peak = 0.0

        async def watch() -> None:
            nonlocal peak
            while True:
                await asyncio.sleep(_POLL_INTERVAL_S)
                serving.check_alive()
                loads = await asyncio.gather(*(engine.client.load() for engine in serving.policy_engines))
                peak = max(peak, *(load.kv_cache_use_fraction for load in loads))

        collecting = asyncio.create_task(collector.collect(self._plan.batch.prompts_per_step, show))
        watching = asyncio.create_task(watch())
        try:
            await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # an engine died: its error says more than the requests that will fail
            return await collecting, peak
        finally:
            for task in (collecting, watching):
                task.cancel()
            await asyncio.gather(collecting, watching, return_exceptions=True)

    async def _learn_from_samples(self) -> dict[str, float]:
        source = self._parts.inputs.sft
        if source is None:
            raise RuntimeError("SFT needs samples")
        await self._parts.turns.to_trainer()
        size = self._plan.batch.prompts_per_step
        first = self._next_sample
        metrics = await self._parts.learner.train_samples([source.sample(i) for i in range(first, first + size)])
        self._next_sample = first + size
        return metrics

    async def _make_engines_ready(self) -> float:
        """After a checkpoint the trainer has the GPUs, and what engines held there is undefined: send it again.

        Returns:
            Seconds it took.
        """
        if self._parts.turns.is_engines_turn:
            return 0.0
        return (await self._sync(self._weight_version))["weight_sync/time_s"]

    async def _sync(self, version: int) -> dict[str, float]:
        serving = self._parts.serving
        if serving is None:
            return {}
        clients = [engine.client for engine in serving.updated_engines]
        config = self._plan.weight_sync
        started_s = time.monotonic()
        is_due = config.verify_interval > 0 and self._num_syncs % config.verify_interval == 0
        # What an engine of several ranks hashes are its shards: see weight_sync/checksums.py.
        should_verify = is_due and all(engine.num_ranks == 1 for engine in serving.updated_engines)
        num_bytes = 0

        async def send() -> dict[str, str]:
            nonlocal num_bytes
            if config.transport == "disk":
                num_bytes = await self._send_by_disk(clients, version)
                return (await self._send_by_ranks(True, should_send=False))[0] if should_verify else {}
            checksums, num_bytes = await self._send_by_ranks(should_verify, should_send=True)
            return checksums

        with self._parts.system.phase("weight_sync"):
            await run_sync(
                clients,
                send,
                version=version,
                pause_mode=config.pause_mode,
                should_bracket=config.transport != "disk",
                should_verify=should_verify,
                timeout_s=config.timeout_s,
                handover=self._parts.turns,
            )
        self._weight_version = version
        self._num_syncs += 1
        return {
            "weight_sync/time_s": time.monotonic() - started_s,
            "weight_sync/num_bytes": float(num_bytes),
            "weight_sync/weight_version": float(version),
            "weight_sync/is_verified": float(should_verify),
        }

    async def _send_by_ranks(self, should_hash: bool, *, should_send: bool) -> tuple[dict[str, str], int]:
        """Stages take turns: two groups that wait in two engines for each other would wait for ever."""
        checksums: dict[str, str] = {}
        num_bytes = 0
        is_by_all = should_send and is_sent_by_all(self._plan)
        for stage, sources in enumerate(self._plan.trainer.weight_sources):
            ranks = None if is_by_all else sources
            arguments = (should_hash, should_send, stage)
            for part, sent in await self._parts.trainers.run("send_weights", *arguments, ranks=ranks):
                checksums |= part
                num_bytes += sent
        return checksums, num_bytes

    async def _send_by_disk(self, clients: Sequence[EngineClient], version: int) -> int:
        path = (Path(self._plan.run_dir) / "weights" / f"v{version:06d}").absolute()
        await self._parts.trainers.run("export_hf", str(path), str(Path(self._plan.model.path).absolute()))
        await asyncio.gather(*(client.update_weights_from_disk(str(path)) for client in clients))
        for old in path.parent.iterdir():
            if old != path:
                shutil.rmtree(old)
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    async def _evaluate_if_due(self) -> None:
        """What a signal interrupts here is due again after the resume."""
        generator = self._parts.eval_generator
        if self._is_evaluation_due and generator is not None:
            await self._make_engines_ready()
            self._parts.tracker.log_metrics(self._step, await self._evaluate(generator))
        self._is_evaluation_due = False

    async def _evaluate(self, generator: GroupGenerator) -> Mapping[str, float]:
        started_s = time.monotonic()
        name, prompts = self._plan.data.name, self._parts.inputs.eval_prompts
        work = run_evaluation(
            generator,
            prompts,
            max_concurrent_requests=self._plan.rollout.max_concurrent_requests,
            max_failed_fraction=self._plan.rollout.max_failed_fraction,
            on_progress=lambda done: self._parts.progress.update_evaluation(name, done, len(prompts)),
        )
        with self._parts.system.phase("rollout"):
            result: EvaluationResult = await self._parts.stop.run(work)
        check_weight_version(result.groups, self._weight_version)
        self._parts.tracker.log_rollouts(build_record(self._step, "eval", name, result.groups))
        self._parts.evaluations[self._step] = result.accuracy
        self._parts.progress.show(
            f"step {self._step}: held-out accuracy {result.accuracy:.3f} on {len(prompts)} prompts"
        )
        return result.to_metrics(name) | {"time/eval_s": time.monotonic() - started_s}

    async def _save(self) -> float:
        started_s = time.monotonic()
        await self._parts.turns.to_trainer()
        collector = self._parts.collector
        state = RunState(
            step=self._step,
            is_evaluation_due=self._is_evaluation_due,
            weight_version=self._weight_version,
            mlflow_run_id=self._parts.tracker.run_id,
            plan_hash=self._plan.hash,
            plan=self._plan.to_data(),
            collector=collector.state() if collector is not None else {"next_index": self._next_sample},
        )

        async def save_trainer(path: Path) -> None:
            await self._parts.trainers.run("save_checkpoint", str(path.absolute()))

        await self._parts.store.save(state, save_trainer)
        self._parts.tracker.log_checkpoints(self._parts.store.find_all())
        self._saved = (self._step, self._is_evaluation_due)
        return time.monotonic() - started_s
