"""Draws against the distributions they claim, and parameter checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlrecipes.engines.embedded.sampling import (
    TOP_K_ALL,
    MalformedParameterError,
    SamplingParameters,
    apply_penalties,
    build_draw,
    compute_uniforms,
    parse_sampling_parameters,
    sample,
    to_stream_seed,
)

NUM_DRAWS = 20_000


def draw_counts(logits: torch.Tensor, **settings: float) -> torch.Tensor:
    """Frequencies over evenly spaced uniforms: exact to one draw, so no statistical slack is needed."""
    draw = build_draw(
        np.full(NUM_DRAWS, settings.get("temperature", 1.0), dtype=np.float32),
        np.full(NUM_DRAWS, settings.get("top_p", 1.0), dtype=np.float32),
        np.full(NUM_DRAWS, settings.get("min_p", 0.0), dtype=np.float32),
        np.full(NUM_DRAWS, int(settings.get("top_k", TOP_K_ALL))),
        (torch.arange(NUM_DRAWS, dtype=torch.float64) + 0.5) / NUM_DRAWS,
    )
    tokens, _ = sample(logits.expand(NUM_DRAWS, -1).clone(), draw)
    return torch.bincount(tokens, minlength=len(logits)) / NUM_DRAWS


def expected(logits: torch.Tensor, temperature: float = 1.0, top_k: float = TOP_K_ALL, top_p: float = 1.0,
             min_p: float = 0.0) -> torch.Tensor:  # fmt: skip
    """Token by token, from the definition."""
    probabilities = torch.softmax(logits.double() / temperature, -1)
    order = probabilities.argsort(descending=True).tolist()
    kept, before = {}, 0.0
    for place, token in enumerate(order):
        mass = probabilities[token].item()
        if place < top_k and before <= top_p and mass >= min_p * probabilities[order[0]].item():
            kept[token] = mass
        before += mass
    result = torch.zeros_like(probabilities)
    for token, mass in kept.items():
        result[token] = mass / sum(kept.values())
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.9, "top_k": 4, "temperature": 1.5},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.8, "top_k": 10},
        {"top_k": 1},
        {"top_p": 0.01},
    ],
)
def test_frequencies_are_those_of_the_definition(settings: dict[str, float]) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    counts = draw_counts(logits, **settings)
    torch.testing.assert_close(counts.double(), expected(logits, **settings), atol=2 / NUM_DRAWS, rtol=0)


def test_equally_likely_tokens_count_by_id() -> None:
    logits = torch.tensor([0.0, 3.0, 0.0, 3.0, 3.0, 0.0])
    frequencies = draw_counts(logits, top_k=2)
    assert frequencies.tolist() == pytest.approx([0, 0.5, 0, 0.5, 0, 0])


def test_broken_logits_still_give_a_token() -> None:
    tokens = draw_counts(torch.full((8,), float("nan")), top_p=0.9)
    assert tokens.sum().item() == pytest.approx(1)


def test_rows_with_different_settings_do_not_mix() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    uniforms = torch.tensor([0.9, 0.2, 0.5, 0.7], dtype=torch.float64)
    columns = (
        np.array([1.0, 0.3, 2.0, 1.0], dtype=np.float32),
        np.array([1.0, 0.6, 1.0, 1.0], dtype=np.float32),
        np.zeros(4, dtype=np.float32),
        np.array([1, TOP_K_ALL, 5, TOP_K_ALL]),
    )
    together, _ = sample(logits, build_draw(*columns, uniforms))
    for row in range(4):
        one = slice(row, row + 1)
        alone = build_draw(*(column[one] for column in columns), uniforms[one])
        assert sample(logits[one], alone)[0].item() == together[row].item()


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    seeds = np.array([to_stream_seed(seed, 0) for seed in range(200)], dtype=np.uint64)
    table = torch.stack([compute_uniforms(seeds, np.full(200, position)) for position in range(200)])
    assert table.min() >= 0 and table.max() < 1
    histogram = torch.histc(table.float(), 20, 0, 1)
    assert (histogram - 2000).abs().max() < 5 * 2000**0.5
    centred = table - 0.5
    for shifted in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * shifted).mean().item() * 12) < 5 / 200
    alone = compute_uniforms(seeds[7:8], np.array([11]))
    assert alone.item() == table[11, 7].item()


def test_siblings_and_seeds_differ() -> None:
    assert len({to_stream_seed(seed, sibling) for seed in range(-5, 50) for sibling in range(8)}) == 55 * 8


def test_penalties_follow_generated_tokens_only() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    parameters = SamplingParameters(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    apply_penalties(logits, parameters, [0, 0, 1], frozenset({3}))
    torch.testing.assert_close(logits, torch.tensor([(1.0 - 1.25) * 2, (-1.0 - 0.75) * 2, 2.0, 0.5]))


def test_end_tokens_cannot_come_before_min_new_tokens() -> None:
    parameters = SamplingParameters(min_new_tokens=2, stop_token_ids=frozenset({1}), logit_bias={"2": 3.0})
    logits = torch.zeros(4)
    apply_penalties(logits, parameters, [0], frozenset({3}))
    assert logits.tolist() == [0.0, -float("inf"), 3.0, -float("inf")]
    logits = torch.zeros(4)
    apply_penalties(logits, parameters, [0, 0], frozenset({3}))
    assert logits.tolist() == [0.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0, "temperature": 1.0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"max_new_tokens": 4, "min_new_tokens": 9}, "min_new_tokens must be in [0, max_new_tokens(4)], got 9."),
        ({"repetition_penalty": 3}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 3."),
        ({"logit_bias": {"99": 1.0}}, "logit_bias must has keys in [0, 9], got 99."),
        ({"regex": "a+"}, "regex is not supported"),
    ],
)
def test_values_out_of_range_are_refused_in_sglangs_words(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_sampling_parameters(raw, 10)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("raw", ["x", {"foo": 1}, {"max_new_tokens": "4"}, {"temperature": "hot"}, {"stop": 5}])
def test_wrong_names_and_types_are_malformed(raw: object) -> None:
    with pytest.raises(MalformedParameterError):
        parse_sampling_parameters(raw, 10)


def test_temperature_zero_is_greedy_and_null_is_the_default() -> None:
    parameters = parse_sampling_parameters({"temperature": 0, "top_p": None, "max_new_tokens": None}, 10)
    assert (parameters.top_k, parameters.temperature, parameters.top_p) == (1, 1.0, 1.0)
    assert parameters.max_new_tokens is None
