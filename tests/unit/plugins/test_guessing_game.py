"""The example environment, played through the real generate function by a player that halves the range."""

import asyncio

import pytest

from plugins.guessing_game import answer_guess, reward_guess
from rlrecipes.custom import check_custom
from rlrecipes.data.observations import ObservationEncoder
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.plan.rules.turns import ENVIRONMENT
from rlrecipes.rollout.generate import Policy
from rlrecipes.rollout.multi_turn import MultiTurn
from rlrecipes.types import Completion, Prompt, RolloutStatus, SamplingParams

TOKENIZER = build_char_tokenizer()


class Halver:
    """Guesses the middle of what is left of 0 to 15; the words shown so far are all it knows."""

    async def generate(self, *, input_ids, **request):
        low, high = 0, 15
        middle = 7
        for word in TOKENIZER.decode(input_ids).split("<eos>")[1:]:
            low, high = (middle + 1, high) if word.startswith("higher") else (low, middle - 1)
            middle = (low + high) // 2
        ids = (*TOKENIZER(f"is it {middle}?")["input_ids"], TOKENIZER.eos_token_id)
        return Completion(ids, (-0.5,) * len(ids), "stop", 1)


def play(number, max_turns=6):
    policy = Policy(
        Halver(), tokenizer=TOKENIZER, sampling=SamplingParams(max_new_tokens=20), seed=0, run_id="run"
    )  # fmt: skip
    generate = MultiTurn(
        policy,
        answer_guess,
        name="guessing_game",
        judge=None,
        encoder=ObservationEncoder(TOKENIZER, apply_chat_template=False, role="user"),
        max_turns=max_turns,
        max_observation_tokens=8,
        timeout_s=5,
    )
    prompt = Prompt(0, tuple(TOKENIZER("0 to 15")["input_ids"]), "0 to 15", label=str(number))
    return asyncio.run(generate(prompt, 0))


@pytest.mark.parametrize(("number", "num_guesses"), [(7, 1), (11, 2), (3, 2), (0, 4), (15, 5)])
def test_a_number_is_found_and_early_guesses_are_worth_more(number, num_guesses):
    rollout = play(number)
    assert (rollout.status, rollout.reason) == (RolloutStatus.COMPLETED, "")
    assert len(rollout.turns) == num_guesses
    assert reward_guess(rollout) == 1 / num_guesses


def test_a_number_that_is_not_found_is_worth_nothing():
    assert reward_guess(play(15, max_turns=4)) == 0.0


def test_a_plan_takes_it():
    path = "plugins.guessing_game:answer_guess"
    assert check_custom(ENVIRONMENT, path, {"higher": "up", "lower": "down"}) == []
    assert check_custom(ENVIRONMENT, path, {"highr": "up"})
