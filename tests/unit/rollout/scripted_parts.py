"""Parts that answer by rule instead of by a model, so that what a collector does with the answers can be foreseen."""

import asyncio
import random
from dataclasses import dataclass, field, replace

from rlrecipes.errors import EngineError
from rlrecipes.rollout.groups import GroupGenerator
from rlrecipes.types import Completion, Prompt, Rollout, RolloutStatus, SamplingParams, Turn


class NumberSource:
    """Prompt i is the token i."""

    def prompt(self, index):
        return Prompt(index, (index,), str(index), label=str(index))


class NumberTokenizer:
    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, token_ids))


@dataclass
class ScriptedClient:
    """Answers with the prompt's token and the request's seed, after a random while.

    ``answer`` may change an answer (given the request's fields) or raise.
    """

    answer: object = None
    latency_seed: int = 0
    requests: list = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    def __post_init__(self):
        self._random = random.Random(self.latency_seed)

    async def generate(self, *, input_ids, sampling: SamplingParams, request_id, routing_key):
        self.requests.append({"request_id": request_id, "sampling": sampling, "routing_key": routing_key})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(self._random.randrange(4)):
                await asyncio.sleep(0)
            completion = Completion(
                (input_ids[0], sampling.seed or 0), (-0.25, -0.5), "stop", 1, len(input_ids), 0, 0.5
            )
            return self.answer(completion, request_id) if self.answer else completion
        finally:
            self.num_running -= 1


class RuleReward:
    """Reward of a rollout by a rule over (prompt index, sibling)."""

    def __init__(self, rule=lambda index, sibling: float(sibling)):
        self._rule = rule

    async def reward_group(self, group):
        await asyncio.sleep(0)
        scored = tuple(replace(r, reward=self._rule(group.prompt.index, r.sibling)) for r in group.rollouts)
        return replace(group, rollouts=scored)


def fail_when(condition):
    def answer(completion, request_id):
        if condition(request_id):
            raise EngineError(
                "engines", f"engine is gone for {'odd' if condition is None else 'this'} request", "restart it"
            )
        return completion

    return answer


def make_generator(client=None, reward=None, group_size=2):
    from rlrecipes.rollout.generate import Policy, SingleTurn

    generate = SingleTurn(
        Policy(
            client or ScriptedClient(),
            tokenizer=NumberTokenizer(),
            sampling=SamplingParams(max_new_tokens=4),
            seed=5,
            run_id="run",
        )
    )
    return GroupGenerator(generate, reward or RuleReward(), group_size)


def make_rollout(prompt, sibling, num_tokens=2, status=RolloutStatus.COMPLETED, reward=1.0, **changes):
    completion = Completion(tuple(range(num_tokens)), (-0.5,) * num_tokens, "stop", 1, len(prompt.token_ids), 0, 0.5)
    turns = () if status is RolloutStatus.FAILED else (Turn(prompt.token_ids, completion),)
    return replace(Rollout(prompt, sibling, turns, "", status, reward), **changes)
