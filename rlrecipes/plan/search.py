"""The best layouts of a recipe on a cluster: every pair of trainer and engine layouts, ranked by predicted time.

A step is a sum of the rollouts' time, which the engines' layout decides, and the trainer's, which its own decides; so
each is predicted once, and pairs only add what lies between them.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from rlrecipes.config.schema import ModelShapes, ParallelConfig, RlConfig, RunConfig, TopologyConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.difference import compute_difference
from rlrecipes.plan.layouts import iter_memory_options, iter_parallel, iter_topologies, list_trainer_sizes
from rlrecipes.plan.memory import compute_memory
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.nodes import ClusterNode, HostNode
from rlrecipes.plan.placement import Placement, place
from rlrecipes.plan.rollout_time import RolloutTime, compute_distribution, compute_rollout_time
from rlrecipes.plan.rules.rule import Facts
from rlrecipes.plan.rules.table import check_recipe
from rlrecipes.plan.step_inputs import StepInputs, to_step_inputs
from rlrecipes.plan.sync_time import compute_offload_time, compute_sync_time
from rlrecipes.plan.time_constants import TimeConstants
from rlrecipes.plan.train_time import TrainTime, compute_train_time

Objective = Literal["samples_per_s", "cost"]


@dataclass(frozen=True, slots=True)
class Constants:
    """What both models are calibrated with."""

    time: TimeConstants
    memory: MemoryConstants


@dataclass(frozen=True, slots=True)
class Start:
    """A recipe with one topology, from which layouts are varied.

    Attributes:
        topology: option of conf/topology.
        config: the recipe.
        overrides: what was given to compose it.
    """

    topology: str
    config: RunConfig
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout.

    Attributes:
        topology: option of conf/topology.
        config: the recipe with this layout.
        overrides: what gives it.
        inputs: of the step-time model.
        step_s: predicted.
        num_gpus: that it keeps.
        num_samples: of a step.
    """

    topology: str
    config: RunConfig
    overrides: tuple[str, ...]
    inputs: StepInputs
    step_s: float
    num_gpus: int
    num_samples: int

    @property
    def samples_per_s(self) -> float:
        """Rollouts trained a second."""
        return self.num_samples / self.step_s

    @property
    def gpu_s_per_sample(self) -> float:
        """GPU-seconds of one of them."""
        return self.num_gpus * self.step_s / self.num_samples


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        candidates: the best, best first.
        num_candidates: pairs of layouts looked at.
        num_too_large: of them, that were found not to fit; of pairs only those fast enough are asked.
        refusals: key -> layouts that a rule about it refused.
    """

    candidates: list[Candidate] = field(default_factory=list)
    num_candidates: int = 0
    num_too_large: int = 0
    refusals: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Trainer:
    parallel: ParallelConfig
    time: TrainTime


@dataclass(frozen=True, slots=True)
class _Pair:
    start: Start
    config: RunConfig
    inputs: StepInputs
    num_gpus: int

    def to_candidate(self, step_s: float) -> Candidate:
        config = self.config.model_copy(update={"parallel": self.inputs.parallel})
        return Candidate(
            topology=self.start.topology,
            config=config,
            overrides=(*self.start.overrides, *to_overrides(self.start.config, config)),
            inputs=self.inputs,
            step_s=step_s,
            num_gpus=self.num_gpus,
            num_samples=self.inputs.num_samples,
        )


def search(
    starts: Sequence[Start],
    shapes: ModelShapes,
    cluster: ClusterNode,
    hosts: tuple[HostNode, ...],
    constants: Constants,
    objective: Objective,
    top: int,
) -> SearchResult:
    """Rank layouts.

    Args:
        starts: the recipe with each topology to try.
        shapes: of its model.
        cluster: with a GPU described.
        hosts: its machines.
        constants: of both models.
        objective: samples_per_s uses the whole cluster; cost, GPU-seconds a sample, also halves, quarters ... of it.
        top: candidates to return.
    """
    state = _Search(shapes, cluster, hosts, constants, objective, top)
    for start in starts:
        for num_gpus in state.list_sizes():
            state.try_topology(start, num_gpus)
    return state.finish()


class _Search:
    def __init__(
        self,
        shapes: ModelShapes,
        cluster: ClusterNode,
        hosts: tuple[HostNode, ...],
        constants: Constants,
        objective: Objective,
        top: int,
    ) -> None:
        self._shapes, self._cluster, self._hosts = shapes, cluster, hosts
        self._constants, self._memory = constants.time, constants.memory
        self._objective, self._top = objective, top
        self._gpus_per_node = max(host.num_gpus for host in hosts)
        self._result = SearchResult()
        self._best: list[tuple[float, int, float, _Pair]] = []
        self._num_kept = 0
        self._trainers: dict[int, list[_Trainer]] = {}
        self._num_too_large: dict[int, int] = {}

    def list_sizes(self) -> list[int]:
        """GPUs to use."""
        total = sum(host.num_gpus for host in self._hosts)
        sizes = [total]
        while self._objective == "cost" and sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return sizes

    def try_topology(self, start: Start, num_gpus: int) -> None:
        """Every pair of layouts of one topology."""
        groups = start.config.topology.served_models["policy"].server_groups.values()
        is_colocated = all(group.placement == "colocated" for group in groups)
        for num_ranks in list_trainer_sizes(num_gpus, self._gpus_per_node, is_colocated=is_colocated):
            for_engines = num_gpus if is_colocated else num_gpus - num_ranks
            topologies = iter_topologies(start.config.topology, self._shapes, for_engines)
            is_rl = isinstance(start.config.algo, RlConfig)
            for topology in topologies if is_rl else islice(topologies, 1):  # demonstrations need no engines
                self._try_engines(start, topology, num_ranks)

    def _try_engines(self, start: Start, topology: TopologyConfig, num_ranks: int) -> None:
        placed = self._place(start.config, topology, num_ranks)
        if placed is None:
            return
        config, inputs = placed
        trainers = self._list_trainers(config, inputs, num_ranks)
        self._result.num_candidates += len(trainers) + self._num_too_large[num_ranks]
        self._result.num_too_large += self._num_too_large[num_ranks]
        rollout = compute_rollout_time(inputs, self._constants) if inputs.has_rollouts else None
        num_gpus = inputs.num_gpus
        for trainer in trainers:
            pair = _Pair(start, config, replace(inputs, parallel=trainer.parallel), num_gpus)
            self._weigh(pair, rollout, trainer.time)

    def _place(self, base: RunConfig, topology: TopologyConfig, num_ranks: int) -> tuple[RunConfig, StepInputs] | None:
        """The recipe with these engines and so many ranks; None where they have no room or a rule refuses them."""
        flat = {**_FLAT, "data_parallel_size": num_ranks}
        parallel = base.parallel.model_copy(update=flat)
        config = base.model_copy(update={"topology": topology, "parallel": parallel})
        problems: list[Problem] = []
        placement = place(config, self._hosts, problems)
        if not problems:
            facts = Facts(config, self._shapes, self._hosts, self._cluster, placement)
            problems = [problem for problem in check_recipe(facts) if not problem.where.startswith("parallel.")]
        inputs = None if problems else to_step_inputs(config, self._shapes, self._cluster, self._hosts, placement)
        if inputs is None:
            self._refuse(problems)
            return None
        return config, inputs

    def _refuse(self, problems: Sequence[Problem]) -> None:
        self._result.num_candidates += 1
        self._result.refusals[problems[0].where if problems else "topology"] += 1

    def _list_trainers(self, config: RunConfig, inputs: StepInputs, num_ranks: int) -> list[_Trainer]:
        """Layouts of so many ranks that rules and memory allow, whatever the engines are."""
        if num_ranks not in self._trainers:
            placement = Placement(trainer=inputs.trainer_devices)
            self._num_too_large[num_ranks] = 0
            self._trainers[num_ranks] = []
            for parallel in iter_parallel(config, self._shapes, num_ranks, self._gpus_per_node):
                problems = self._judge(config, parallel, placement)
                if problems:
                    self._refuse(problems)
                    continue
                found = list(self._fit(inputs, parallel))
                self._trainers[num_ranks] += found
                self._num_too_large[num_ranks] += not found
        return self._trainers[num_ranks]

    def _judge(self, config: RunConfig, parallel: ParallelConfig, placement: Placement) -> list[Problem]:
        tried = config.model_copy(update={"parallel": parallel})
        facts = Facts(tried, self._shapes, self._hosts, self._cluster, placement)
        return [problem for problem in check_recipe(facts) if problem.where.startswith("parallel.")]

    def _fit(self, inputs: StepInputs, parallel: ParallelConfig) -> Iterator[_Trainer]:
        """Every way of sparing memory with which the trainer alone fits."""
        for option in iter_memory_options(parallel):
            alone = replace(inputs, parallel=option, engine_groups=(), shares_gpus=False)
            if compute_memory(alone, self._memory).is_fitting:
                distribution = compute_distribution(alone, self._constants)
                yield _Trainer(option, compute_train_time(alone, self._constants, distribution))

    def _weigh(self, pair: _Pair, rollout: RolloutTime | None, trainer: TrainTime) -> None:
        """Keep a pair if it is among the best so far; of equals the earlier one."""
        step_s = trainer.logprobs_s + trainer.train_s
        if rollout is not None:
            step_s += rollout.duration_s + sum(compute_sync_time(pair.inputs, self._constants).values())
            step_s += compute_offload_time(pair.inputs, self._constants)
        price = step_s if self._objective == "samples_per_s" else step_s * pair.num_gpus
        if len(self._best) == self._top and price >= -self._best[0][0]:
            return
        if not compute_memory(pair.inputs, self._memory).is_fitting:
            self._result.num_too_large += 1
            return
        self._num_kept += 1
        push = heapq.heappush if len(self._best) < self._top else heapq.heapreplace
        push(self._best, (-price, -self._num_kept, step_s, pair))

    def finish(self) -> SearchResult:
        """The best, best first."""
        ranked = sorted(self._best, key=lambda item: item[:2], reverse=True)
        self._result.candidates = [pair.to_candidate(step_s) for _, _, step_s, pair in ranked]
        return self._result


_FLAT: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def to_overrides(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """What turns one recipe into another that differs in its layout.

    Args:
        before: composed from overrides.
        after: the same with another layout.
    """
    found = compute_difference(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return tuple(f"{path}={_to_word(value)}" for path, (_, value) in found.items())


def _to_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
