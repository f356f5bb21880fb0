"""Memory of shared GPUs: never the trainer's and the engines' at once, whatever happens to a run, and in what order."""

from __future__ import annotations

import asyncio
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import EngineError, Interrupted, Pruned
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.faults import StopRequest
from rlrecipes.runner.loop import Loop, Parts
from rlrecipes.runner.turns import GpuTurns
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
BOTH = ["topology.should_offload_trainer=true", "topology.should_offload_engines=true"]
WHOLE = {"weights", "state"}
PROMPT = Prompt(0, (1,), "p")
DROPPED = Group(PROMPT, (Rollout(PROMPT, 0, (), "", RolloutStatus.FAILED, 0.0, reason="timeout"),))


class Gpu:
    """One GPU: what trainer and engines hold of it, and what they were told, in order."""

    def __init__(self):
        self.told = []
        self.trainer = set(WHOLE)
        self.engines = {}
        self.most = {}
        """What was told last -> what was held then, of moments when both held something."""

    def tell(self, what):
        self.told.append(what)
        held = (frozenset(self.trainer), frozenset().union(*self.engines.values()))
        if all(held):
            self.most.setdefault(what, held)

    async def run(self, method, *shared, per_rank=None, ranks=None):
        if method in ("send_weights", "export_hf"):
            assert "weights" in self.trainer, f"{method} without weights"
        if method in ("save_checkpoint", "train"):
            assert self.trainer == WHOLE, f"{method} without memory"
        {
            "offload_state": lambda: self.trainer.discard("state"),
            "offload_weights": lambda: self.trainer.discard("weights"),
            "reload": lambda: self.trainer.update(WHOLE),
        }.get(method, lambda: None)()
        self.tell(method)
        return [({}, 1)]


class Client:
    """An engine with SGLang's rules: it sleeps idle, and weights that come back are undefined until they are sent."""

    def __init__(self, gpu, name="", is_updated=True):
        self.gpu, self.name, self.is_updated, self.url = gpu, name, is_updated, f"http://{name}"
        self.held = gpu.engines.setdefault(name, {"weights", "kv_cache"})
        self.is_paused, self.is_defined, self.fails = False, True, False

    def tell(self, what):
        self.gpu.tell(f"{self.name}{what}")

    async def pause(self, mode):
        self.is_paused = True
        self.tell(f"pause {mode}")

    async def continue_generation(self):
        assert self.held == {"weights", "kv_cache"}
        assert self.is_defined
        self.is_paused = False
        self.tell("continue")

    async def flush_cache(self):
        assert "kv_cache" in self.held
        self.tell("flush")

    async def release_memory(self, tags):
        if self.fails:
            raise EngineError(self.url, "is busy", "wait")
        assert self.is_paused
        assert set(tags) <= self.held
        self.held -= set(tags)
        self.is_defined = not self.is_updated  # the others keep a copy in the host
        self.tell("release")

    async def resume_memory(self, tags):
        assert not set(tags) & self.held
        self.held |= set(tags)
        self.tell("resume " + ", ".join(tags))

    async def begin_weight_update(self):
        assert "weights" in self.held

    async def end_weight_update(self):
        self.is_defined = True

    async def update_weight_version(self, version):
        self.tell(f"version {version}")

    async def load(self):
        return SimpleNamespace(kv_cache_use_fraction=0.0)


def serve(*clients, is_colocated=True):
    engines = [
        SimpleNamespace(client=client, is_updated=client.is_updated, is_colocated=is_colocated, num_ranks=1)
        for client in clients
    ]
    return SimpleNamespace(
        colocated_engines=[engine for engine in engines if engine.is_colocated],
        updated_engines=[engine for engine in engines if engine.is_updated],
        policy_engines=[engine for engine in engines if engine.is_updated],
        check_alive=lambda: None,
    )


def plan_of(*overrides):
    changes = [
        "schedule.prompts_per_step=4",
        "algo.group_size=2",
        "weight_sync.verify_interval=0",
        "schedule.eval_interval=0",
        "schedule.should_eval_before=false",
    ]
    recipe = compose([*changes, *overrides])
    return resolve(recipe.config, HOSTS, recipe.origins)


class Work:
    """Everything of a run but its turns: collector, learner, store, tracker, progress."""

    def __init__(self, gpu, clients, stop, strike):
        self.gpu, self.clients, self.stop, self.strike = gpu, clients, stop, strike
        self.num_waiting_groups = 0
        self.run_id = None
        self.saved = []
        self.confirmed = []
        self.records = []
        self.logged = {}

    def reach(self, where):
        if self.strike == (where, self.gpu.told.count(where)):
            self.stop._receive(signal.SIGTERM)

    async def collect(self, num_groups, show):
        assert not any(client.is_paused for client in self.clients)
        self.gpu.tell("rollout")
        self.reach("rollout")
        await asyncio.sleep(0)
        return SimpleNamespace(groups=[], num_filtered={}, dropped=(DROPPED,))

    async def train_groups(self, groups, *, step, weight_version):
        await self.gpu.run("train")
        self.reach("train")
        return {"train/loss": 0.0}

    async def save(self, state, save_trainer):
        from pathlib import Path

        await save_trainer(Path("saved"))
        self.saved.append((state.step, state.weight_version, state.is_evaluation_due))

    def confirm_evaluated(self, step):
        assert self.gpu.told.count("eval") == 1
        self.confirmed.append(step)

    async def evaluate(self):
        assert not any(client.is_paused for client in self.clients)
        self.gpu.tell("eval")
        self.reach("eval")
        await asyncio.sleep(0)
        return {}

    def log_metrics(self, step, metrics):
        self.logged.setdefault(step, {}).update(metrics)

    def log_rollouts(self, record):
        self.records.append(record)

    def __getattr__(self, name):
        return lambda *arguments, **keywords: None

    def state(self):
        return {}


def run(
    monkeypatch,
    *overrides,
    gpu=None,
    clients=None,
    step=0,
    version=0,
    is_evaluation_due=False,
    strike=None,
    pruned=None,
):
    gpu = gpu or Gpu()
    clients = clients or [Client(gpu)]
    plan, stop = plan_of(*overrides), StopRequest()
    work = Work(gpu, clients, stop, strike)
    serving = serve(*clients)
    monkeypatch.setattr("rlrecipes.runner.loop.compute_rollout_metrics", lambda *a, **k: {"rollout/time_s": 0.0})
    monkeypatch.setattr(Loop, "_evaluate", lambda self, generator: stop.run(work.evaluate()))

    def prune(step):
        if step == pruned:
            raise Pruned("others are better")

    async def execute():
        gpu.trainer.clear()
        turns = GpuTurns(plan, gpu, serving)
        await turns.put_engines_to_sleep()
        gpu.trainer.update(WHOLE)  # ranks start
        system = SimpleNamespace(take=dict, phase=nullcontext)
        inputs = generator = SimpleNamespace()
        pruner = SimpleNamespace(check=prune) if pruned else None
        parts = Parts(plan, inputs, gpu, turns, work, work, work, system, work, stop, pruner, serving, work, generator)  # type: ignore[arg-type]
        loop = Loop(parts, step, version, is_evaluation_due=is_evaluation_due, next_sample=0)
        try:
            return await loop.run()
        except (Interrupted, Pruned):
            return None

    return asyncio.run(execute()), gpu, work


SLEEP = ["pause abort", "release"]
SYNC = ["offload_state", "resume weights", "send_weights"]
LEAVE = ["offload_weights", "resume kv_cache", "continue"]


def test_a_run_takes_turns_from_its_start_to_its_end(monkeypatch):
    reached, gpu, work = run(monkeypatch, *BOTH, "schedule.num_steps=2", "schedule.save_interval=10")
    assert reached == 2
    first = [*SLEEP, *SYNC, "version 0", *LEAVE]
    step = ["rollout", *SLEEP, "reload", "train", *SYNC]
    end = [*SLEEP, "reload", "save_checkpoint"]
    assert gpu.told == [*first, *step, "version 1", *LEAVE, *step, "version 2", *LEAVE, "eval", *end]
    assert work.saved == [(2, 2, False)]
    assert gpu.trainer == WHOLE  # what is exported comes from there


def test_both_hold_memory_only_while_weights_travel_and_then_weights_alone(monkeypatch):
    weights = frozenset({"weights"})
    for overrides in (["schedule.save_interval=1"], ["schedule.eval_interval=1"]):
        _, gpu, _ = run(monkeypatch, *BOTH, "schedule.num_steps=3", *overrides)
        assert set(gpu.most) <= {"resume weights", "send_weights", *(f"version {v}" for v in range(4))}
        assert set(gpu.most.values()) == {(weights, weights)}


def test_after_a_checkpoint_weights_are_sent_again_before_anybody_asks(monkeypatch):
    _, gpu, work = run(
        monkeypatch, *BOTH, "schedule.num_steps=2", "schedule.save_interval=1", "schedule.eval_interval=1"
    )
    saved = gpu.told.index("save_checkpoint")
    assert gpu.told[saved - 4 : saved] == ["eval", *SLEEP, "reload"]
    again = [*SYNC, "version 1", *LEAVE, "rollout"]
    assert gpu.told[saved + 1 : saved + 1 + len(again)] == again
    assert work.saved == [(1, 1, False), (2, 2, False)]


def test_a_resumed_run_sends_its_weights_and_evaluates_what_is_due(monkeypatch):
    changes = ["schedule.num_steps=4", "schedule.save_interval=10"]
    _, gpu, _ = run(monkeypatch, *BOTH, *changes, step=3, version=7, is_evaluation_due=True)
    assert gpu.told[: len(SLEEP) + len(SYNC)] == [*SLEEP, *SYNC]
    assert gpu.told.index("version 7") < gpu.told.index("eval") < gpu.told.index("rollout")


def test_an_evaluation_made_up_is_noted_in_its_checkpoint(monkeypatch):
    changes = ["schedule.num_steps=4", "schedule.save_interval=10"]
    for step, strike in ((4, None), (3, ("rollout", 1))):  # the last one; a signal in the step after
        _, _, work = run(monkeypatch, *BOTH, *changes, step=step, version=7, is_evaluation_due=True, strike=strike)
        assert (work.confirmed, work.saved) == ([step], [])
    _, _, work = run(monkeypatch, *BOTH, *changes, step=3, is_evaluation_due=True, strike=("eval", 1))
    assert work.confirmed == []
    _, _, work = run(monkeypatch, *BOTH, *changes, is_evaluation_due=True)  # before training there is no checkpoint
    assert work.confirmed == []


def test_a_run_that_has_nothing_left_but_its_export_ends_with_the_trainer_whole(monkeypatch):
    reached, gpu, work = run(monkeypatch, *BOTH, "schedule.num_steps=3", step=3, version=3)
    assert (reached, gpu.trainer, work.saved) == (3, WHOLE, [])


@pytest.mark.parametrize(
    ("strike", "saved"),
    [
        (("rollout", 1), []),
        (("rollout", 2), [(1, 1, False)]),
        (("train", 2), [(2, 2, True)]),
        (("eval", 1), [(1, 1, True)]),
    ],
)
def test_a_signal_in_any_phase_leaves_a_checkpoint_of_the_whole_trainer(monkeypatch, strike, saved):
    changes = ["schedule.num_steps=9", "schedule.save_interval=10"]
    if strike[0] != "rollout":
        changes.append(f"schedule.eval_interval={strike[1]}")
    reached, gpu, work = run(monkeypatch, *BOTH, *changes, strike=strike)
    assert reached is None
    assert work.saved == saved
    assert ("reload" in gpu.told[-2:]) == bool(saved)


def test_a_signal_that_engines_die_of_leaves_a_checkpoint_too(monkeypatch):
    gpu = Gpu()
    dead, alive = Client(gpu, "dead "), Client(gpu, "alive ")
    receive = StopRequest._receive

    def strike(self, number):
        dead.fails = True
        dead.held.clear()
        receive(self, number)

    monkeypatch.setattr(StopRequest, "_receive", strike)
    changes = ["schedule.num_steps=9", "schedule.save_interval=10"]
    reached, gpu, work = run(monkeypatch, *BOTH, *changes, gpu=gpu, clients=[dead, alive], strike=("rollout", 2))
    assert (reached, work.saved) == (None, [(1, 1, False)])
    assert gpu.told[-3:] == ["alive release", "reload", "save_checkpoint"] and not alive.held


def test_a_point_that_is_pruned_leaves_a_checkpoint_and_the_last_step_prunes_nothing(monkeypatch):
    changes = ["schedule.num_steps=4", "schedule.save_interval=10", "schedule.eval_interval=2"]
    reached, gpu, work = run(monkeypatch, *BOTH, *changes, pruned=2)
    assert reached is None
    assert work.saved == [(2, 2, False)] and gpu.told.count("rollout") == 2
    assert gpu.told[-len(SLEEP) - 3 :] == ["eval", *SLEEP, "reload", "save_checkpoint"]
    assert run(monkeypatch, *BOTH, *changes, pruned=4)[0] == 4


def test_without_offloading_nothing_changes_hands(monkeypatch):
    _, gpu, _ = run(monkeypatch, "schedule.num_steps=2", "schedule.save_interval=1")
    sync = ["pause abort", "flush", "send_weights"]
    first = [*sync, "version 0", "continue"]
    assert gpu.told[: len(first)] == first
    assert gpu.told.count("send_weights") == 3  # none after a checkpoint
    assert not {"release", "reload", "offload_state"} & set(gpu.told)


@pytest.mark.parametrize(
    ("who", "never"), [(BOTH[:1], {"release", "resume weights"}), (BOTH[1:], {"reload", "offload_state"})]
)
def test_each_side_may_stay(monkeypatch, who, never):
    reached, gpu, _ = run(monkeypatch, *who, "schedule.num_steps=2", "schedule.save_interval=1")
    assert reached == 2
    assert not never & set(gpu.told)
    assert {"release", "reload"} & set(gpu.told)


def test_a_model_that_is_not_updated_sleeps_and_wakes_without_a_sync(monkeypatch):
    gpu = Gpu()
    clients = [Client(gpu), Client(gpu, "judge ", is_updated=False)]
    run(monkeypatch, *BOTH, "schedule.num_steps=1", gpu=gpu, clients=clients)
    judge = [told.removeprefix("judge ") for told in gpu.told if told.startswith("judge")]
    assert judge == 2 * [*SLEEP, "resume weights", "resume kv_cache", "continue"] + SLEEP
    assert gpu.told.index("judge resume weights") > gpu.told.index("offload_weights")


def test_an_engine_that_keeps_its_memory_stops_the_run_before_the_trainer_takes_its_own(monkeypatch):
    gpu = Gpu()
    client = Client(gpu)
    plan, serving = plan_of(*BOTH), serve(client)

    async def execute():
        turns = GpuTurns(plan, gpu, serving)
        await turns.put_engines_to_sleep()
        await turns.before_weights()
        await turns.after_weights()
        client.fails = True
        await turns.to_trainer()

    with pytest.raises(EngineError, match="is busy"):
        asyncio.run(execute())
    assert "reload" not in gpu.told


def test_engines_elsewhere_are_let_alone():
    gpu = Gpu()
    turns = GpuTurns(plan_of(*BOTH), gpu, serve(Client(gpu), is_colocated=False))
    asyncio.run(turns.put_engines_to_sleep())
    assert gpu.told == []


def test_failures_of_groups_that_filters_dropped_are_recorded(monkeypatch):
    _, _, work = run(monkeypatch, "schedule.num_steps=1")
    assert [record.failures for record in work.records] == [{"timeout": 1}]


def test_a_step_counts_the_seconds_of_its_own_turns(monkeypatch):
    gpu = Gpu()
    clock = SimpleNamespace(monotonic=lambda: float(len(gpu.told)))  # whatever is told takes a second
    monkeypatch.setattr("rlrecipes.runner.turns.time", clock)
    monkeypatch.setattr("rlrecipes.runner.loop.time", clock)
    _, _, work = run(monkeypatch, *BOTH, "schedule.num_steps=3", "schedule.save_interval=2", gpu=gpu)
    handover_s = 4.0  # what of a sync is memory
    # Neither the sync at the start nor the turn of the checkpoint after the second step.
    assert [work.logged[step]["time/offload_s"] for step in (1, 2, 3)] == [
        len(SLEEP) + 1 + handover_s,
        len(SLEEP) + 1 + handover_s,
        len(SLEEP) + 1 + 2 * handover_s,
    ]
    # The third sends what the checkpoint made engines forget, too.
    sync_s = float(len([*SYNC, "version", *LEAVE]))
    assert [work.logged[step]["weight_sync/time_s"] for step in (0, 1, 2, 3)] == [sync_s, sync_s, sync_s, 2 * sync_s]


def test_seconds_are_counted_once():
    gpu = Gpu()
    turns = GpuTurns(plan_of(*BOTH), gpu, serve(Client(gpu)))

    async def execute():
        await turns.put_engines_to_sleep()
        await turns.before_weights()
        await turns.after_weights()
        await turns.to_trainer()

    asyncio.run(execute())
    assert turns.take_spent_s() > 0
    assert turns.take_spent_s() == 0
