"""/generate: the embedded server and the real SGLang give the same answers to the same requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from live_servers import Server
from tiny_model import CONTEXT_LENGTH, EOS, Reference

pytestmark = pytest.mark.xdist_group("serving")
META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
}
OUTPUT_KEYS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
TOP_KEYS = {"input_top_logprobs", "output_top_logprobs"}


def assert_logprobs(entries: list[Any], ids: list[int], expected: torch.Tensor) -> None:
    """Entries are [logprob, id, null] of ``ids`` in rows of ``expected``."""
    assert [entry[1:] for entry in entries] == [[token, None] for token in ids]
    wanted = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([entry[0] for entry in entries]), wanted, atol=1e-5, rtol=0)


def test_greedy_tokens_and_logprobs_are_those_of_transformers(server: Server, reference: Reference) -> None:
    for prompt in (reference.prompt, reference.encode("a"), reference.encode("the quick brown fox " * 9)):
        answer = server.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert answer["output_ids"] == reference.greedy(prompt, 40)
        expected = reference.logprobs(prompt + answer["output_ids"])[len(prompt) - 1 :]
        assert_logprobs(answer["meta_info"]["output_token_logprobs"], answer["output_ids"], expected)


def test_an_answer_has_these_fields(flushed: Server, reference: Reference) -> None:
    answer = flushed.generate(reference.prompt, body={"rid": "fields", "return_logprob": False}, max_new_tokens=3)
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"} and set(meta) == META_KEYS
    assert answer["text"] == reference.decode(answer["output_ids"])
    assert meta["id"] == "fields" and meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(reference.prompt), 3, 0)
    assert meta["weight_version"] == "default" and meta["cached_tokens_details"] is None
    with_logprobs = flushed.generate(reference.prompt)["meta_info"]
    assert set(with_logprobs) == META_KEYS | OUTPUT_KEYS
    assert with_logprobs["input_token_logprobs"] == [] and with_logprobs["output_token_logprobs_length"] == 8
    assert with_logprobs["cached_tokens_details"] == {"device": len(reference.prompt) - 1, "host": 0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_of_the_temperature_scaled_distribution(
    server: Server, reference: Reference, temperature: float
) -> None:
    prompt = reference.prompt
    for cut in ({}, {"top_p": 0.6}, {"top_k": 5}):  # and not of the part that top_p and top_k leave
        answer = server.generate(prompt, temperature=temperature, max_new_tokens=20, ignore_eos=True, **cut)
        expected = reference.logprobs(prompt + answer["output_ids"], temperature)[len(prompt) - 1 :]
        assert_logprobs(answer["meta_info"]["output_token_logprobs"], answer["output_ids"], expected)


def test_top_k_and_top_p_only_keep_the_most_likely(server: Server, reference: Reference) -> None:
    prompt = reference.prompt
    expected = reference.logprobs([*prompt, 0])[-1]
    best = expected.topk(3).indices.tolist()
    nucleus = best[: int((expected.exp().sort(descending=True).values.cumsum(0) < 0.25).sum()) + 1]
    batch = [prompt] * 64
    for sampling, allowed in (({"top_k": 3}, best), ({"top_p": 0.25}, nucleus), ({"top_k": 1}, best[:1])):
        params = {"temperature": 1.0, "max_new_tokens": 1, **sampling}
        answers = server.ok("/generate", {"input_ids": batch, "sampling_params": params})
        assert {answer["output_ids"][0] for answer in answers} == set(allowed)


def test_samples_follow_the_distribution(server: Server, reference: Reference) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 1}
    answers = server.ok("/generate", {"input_ids": [reference.prompt] * 400, "sampling_params": params})
    counts = torch.bincount(torch.tensor([a["output_ids"][0] for a in answers]), minlength=99)
    probs = reference.logprobs([*reference.prompt, 0])[-1].exp()
    likely = probs > 0.02
    chi2 = (((counts - 400 * probs) ** 2) / (400 * probs))[likely].sum().item()
    assert chi2 < 3.5 * int(likely.sum()), "the counts of the likely tokens are not those of the distribution"
    assert counts[likely].sum().item() / 400 == pytest.approx(probs[likely].sum().item(), abs=0.1)


def test_top_k_one_is_greedy_with_unscaled_logprobs(server: Server, reference: Reference) -> None:
    answer = server.generate(reference.prompt, temperature=2.0, top_k=1)
    assert answer["output_ids"] == reference.greedy(reference.prompt, 8)
    expected = reference.logprobs(reference.prompt + answer["output_ids"])[len(reference.prompt) - 1 :]
    assert_logprobs(answer["meta_info"]["output_token_logprobs"], answer["output_ids"], expected)


def first_new(ids: list[int], start: int) -> int:
    """Position of the first token from ``start`` on that did not occur before it and is a character."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i] and ids[i] > EOS)


@pytest.fixture(scope="module")
def greedy(reference: Reference) -> list[int]:
    ids = reference.greedy(reference.prompt, 24)
    assert min(ids) > EOS, "these tests need characters only"
    return ids


def generated(answer: Any) -> tuple[list[int], str, Any]:
    """Ids, text and finish reason of an answer whose counts agree."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == len(ids)
    return ids, answer["text"], meta["finish_reason"]


def test_a_stop_token_stays_in_the_ids_and_leaves_the_text(
    server: Server, reference: Reference, greedy: list[int]
) -> None:
    at = first_new(greedy, 4)
    reason = {"type": "stop", "matched": greedy[at]}
    ids, text = greedy[: at + 1], reference.decode(greedy[:at])
    stop = {"stop_token_ids": [greedy[at]], "max_new_tokens": 24}
    assert generated(server.generate(reference.prompt, **stop)) == (ids, text, reason)
    kept = server.generate(reference.prompt, no_stop_trim=True, **stop)
    assert generated(kept) == (ids, reference.decode(ids), reason)


def test_a_stop_string_stays_in_the_ids_and_leaves_the_text(
    server: Server, reference: Reference, greedy: list[int]
) -> None:
    at = first_new(greedy, 4)
    text = reference.decode(greedy[: at + 2])
    stop = text[-2:]
    reason = {"type": "stop", "matched": stop}
    for given in (stop, [stop], ["not there", stop]):
        answer = server.generate(reference.prompt, stop=given, max_new_tokens=24)
        assert generated(answer) == (greedy[: at + 2], text[:-2], reason)
    kept = server.generate(reference.prompt, stop=stop, max_new_tokens=24, no_stop_trim=True)
    assert generated(kept) == (greedy[: at + 2], text, reason)


def test_the_last_token_ends_by_length_even_when_it_would_stop(
    server: Server, reference: Reference, greedy: list[int]
) -> None:
    at = first_new(greedy, 4)
    text = reference.decode(greedy[: at + 1])
    for stop in ({"stop_token_ids": [greedy[at]]}, {"stop": text[-1]}):
        answer = server.generate(reference.prompt, max_new_tokens=at + 1, **stop)
        assert generated(answer) == (greedy[: at + 1], text, {"type": "length", "length": at + 1})


def test_the_end_of_sequence_token_ends_an_answer(server: Server, reference: Reference) -> None:
    prompt, answer = reference.eos_prompt, reference.eos_answer
    got = generated(server.generate(prompt, max_new_tokens=100))
    assert got == (answer, reference.decode(answer[:-1]), {"type": "stop", "matched": EOS})


def test_ignore_eos_ignores_stop_tokens_too_but_no_stop_string(
    server: Server, reference: Reference, greedy: list[int]
) -> None:
    at = first_new(greedy, 4)
    stop = {"stop_token_ids": [greedy[at]], "ignore_eos": True, "max_new_tokens": 24}
    assert generated(server.generate(reference.prompt, **stop))[0] == greedy
    stop["stop"] = reference.decode(greedy[at : at + 2])
    assert generated(server.generate(reference.prompt, **stop))[0] == greedy[: at + 2]
    ids, _, reason = generated(server.generate(reference.eos_prompt, ignore_eos=True, max_new_tokens=60))
    assert ids[: len(reference.eos_answer)] == reference.eos_answer and reason["type"] == "length"


def test_min_new_tokens_forbids_stop_tokens_until_then(server: Server, reference: Reference) -> None:
    prompt, early = reference.eos_prompt, len(reference.eos_answer)
    answer = server.generate(prompt, min_new_tokens=early + 3, max_new_tokens=early + 4)
    ids = answer["output_ids"]
    assert len(ids) >= early + 3 and EOS not in ids[: early + 2]
    assert ids[: early - 1] == reference.eos_answer[:-1]
    logits = reference.logprobs(prompt + ids)[len(prompt) - 1 :]
    logits[: early + 3, EOS] = -math.inf  # it is taken out of the distribution, which is normalised anew
    expected = torch.log_softmax(logits, dim=-1)
    assert_logprobs(answer["meta_info"]["output_token_logprobs"], ids, expected)


def test_min_new_tokens_does_not_delay_stop_strings(server: Server, reference: Reference, greedy: list[int]) -> None:
    at = first_new(greedy, 4)
    stop = reference.decode(greedy[at : at + 2])
    answer = server.generate(reference.prompt, stop=stop, min_new_tokens=20, max_new_tokens=24)
    assert generated(answer)[0] == greedy[: at + 2]


def test_special_tokens_are_left_out_of_the_text_unless_asked(server: Server, reference: Reference) -> None:
    sampling = {"max_new_tokens": len(reference.eos_answer) + 1, "ignore_eos": True}
    answer = server.generate(reference.eos_prompt, skip_special_tokens=False, **sampling)
    assert "<|im_end|>" in answer["text"]
    assert "<|im_end|>" not in server.generate(reference.eos_prompt, **sampling)["text"]


def test_logprob_start_len_cuts_the_prompt_and_its_first_entry_is_null(server: Server, reference: Reference) -> None:
    prompt, size = reference.prompt, len(reference.prompt)
    expected = reference.logprobs(prompt)
    server.generate(prompt)
    for start in (0, 3, size - 1):
        meta = server.generate(prompt, body={"logprob_start_len": start})["meta_info"]
        first, *rest = meta["input_token_logprobs"]
        assert first == [None, prompt[start], None] and meta["cached_tokens"] <= start
        if rest:
            assert_logprobs(rest, prompt[start + 1 :], expected[start:])
    for start in (-1, size):
        assert server.generate(prompt, body={"logprob_start_len": start})["meta_info"]["input_token_logprobs"] == []
    sampling = {"temperature": 0, "max_new_tokens": 1}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": size + 1}
    status, answer = server.call("/generate", body)
    assert status == 400 and f"logprob_start_len={size + 1}" in answer["error"]["message"]


def test_prompt_logprobs_alone(server: Server, reference: Reference) -> None:
    answer = server.generate(reference.prompt, body={"logprob_start_len": 0}, max_new_tokens=0)
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"], meta["output_token_logprobs"]) == ([], "", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert_logprobs(meta["input_token_logprobs"][1:], reference.prompt[1:], reference.logprobs(reference.prompt))


def test_top_logprobs_of_prompt_and_answer(server: Server, reference: Reference) -> None:
    prompt, size = reference.prompt, len(reference.prompt)
    body = {"logprob_start_len": size - 3, "top_logprobs_num": 4}
    answer = server.generate(prompt, body=body)
    meta = answer["meta_info"]
    assert set(meta) == META_KEYS | OUTPUT_KEYS | TOP_KEYS
    assert meta["input_top_logprobs"][0] is None
    rows = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    expected = reference.logprobs(prompt + answer["output_ids"])[size - 3 :]
    assert len(rows) == len(expected) == 2 + 8
    for row, distribution in zip(rows, expected, strict=True):
        assert_logprobs(row, distribution.topk(4).indices.tolist(), distribution.expand(4, -1))


def test_logprobs_of_chosen_tokens(server: Server, reference: Reference) -> None:
    answer = server.generate(reference.prompt, body={"token_ids_logprob": [5, 9]}, max_new_tokens=3)
    expected = reference.logprobs(reference.prompt + answer["output_ids"])[len(reference.prompt) - 1 :]
    for row, distribution in zip(answer["meta_info"]["output_token_ids_logprobs"], expected, strict=True):
        assert_logprobs(row, [5, 9], distribution.expand(2, -1))


def test_text_in_logprobs(server: Server, reference: Reference) -> None:
    body = {"return_text_in_logprobs": True, "logprob_start_len": 6}
    meta = server.generate(reference.prompt, body=body)["meta_info"]
    for _, token, text in meta["input_token_logprobs"] + meta["output_token_logprobs"]:
        assert text == reference.decode([token])


def test_text_is_tokenized_as_the_ids_are(server: Server, reference: Reference) -> None:
    params = {"temperature": 0, "max_new_tokens": 5}
    by_text = server.ok("/generate", {"text": "Hello NO", "sampling_params": params})
    assert by_text["output_ids"] == server.generate(reference.prompt, max_new_tokens=5)["output_ids"]
    both = server.ok("/generate", {"text": "other", "input_ids": reference.prompt, "sampling_params": params})
    assert both["output_ids"] == by_text["output_ids"]


def test_batches_keep_order_parameters_and_ids(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt, reference.encode("xyz")]
    params = [{"temperature": 0, "max_new_tokens": size} for size in (6, 2)]
    answers = server.ok("/generate", {"input_ids": prompts, "sampling_params": params, "rid": ["first", "second"]})
    assert [answer["output_ids"] for answer in answers] == [
        reference.greedy(prompt, size) for prompt, size in zip(prompts, (6, 2), strict=True)
    ]
    assert [answer["meta_info"]["id"] for answer in answers] == ["first", "second"]
    texts = server.ok("/generate", {"text": ["Hello NO", "xyz"], "sampling_params": params})
    assert [answer["output_ids"] for answer in texts] == [answer["output_ids"] for answer in answers]


def test_n_gives_siblings_with_ids_of_their_own(server: Server, reference: Reference) -> None:
    params = {"n": 3, "temperature": 1.0, "max_new_tokens": 12}
    answers = server.ok("/generate", {"input_ids": reference.prompt, "sampling_params": params, "rid": "many"})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    ids = {answer["meta_info"]["id"] for answer in answers}
    assert len(ids) == 3 and all(name.startswith("many_") for name in ids)
    prompts = [reference.prompt, reference.encode("xyz")]
    answers = server.ok("/generate", {"input_ids": prompts, "sampling_params": params | {"n": 2, "temperature": 0}})
    first, second = (reference.greedy(prompt, 12) for prompt in prompts)
    until = [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in (first, first, second, second)]
    assert [answer["output_ids"] for answer in answers] == until


def test_many_requests_at_once_do_not_disturb_each_other(flushed: Server, reference: Reference) -> None:
    prompts = [reference.encode(f"{index:02d} and more" * (1 + index % 5)) for index in range(24)]
    futures = [flushed.start(flushed.generate, p, max_new_tokens=8 + i % 9) for i, p in enumerate(prompts)]
    for index, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        answer = future.result(60)
        expected = reference.logprobs(prompt + answer["output_ids"])[len(prompt) - 1 :]
        assert expected.argmax(-1).tolist() == answer["output_ids"], index
        assert_logprobs(answer["meta_info"]["output_token_logprobs"], answer["output_ids"], expected)


def test_a_seed_is_accepted_and_decides_where_the_server_is_deterministic(server: Server, reference: Reference) -> None:
    def sample(seed: int, num: int = 1) -> list[list[int]]:
        params = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": seed, "ignore_eos": True}
        body = {"input_ids": [reference.prompt] * num, "sampling_params": params}
        return [answer["output_ids"] for answer in server.ok("/generate", body)]

    alone, crowded, other = sample(1), sample(1, 8), sample(2)
    assert len(alone[0]) == 16
    # SGLang heeds seeds only with --enable-deterministic-inference, which its CPU attention refuses.
    if server.kind == "embedded":
        assert crowded == alone * 8 and other != alone


def test_a_stream_grows_token_by_token(server: Server, reference: Reference) -> None:
    params = {"temperature": 0, "max_new_tokens": 6}
    body = {"input_ids": reference.prompt, "sampling_params": params, "return_logprob": True, "rid": "flow"}
    events = server.stream("/generate", body)
    whole = server.generate(reference.prompt, max_new_tokens=6)
    assert [event["output_ids"] for event in events][-1] == whole["output_ids"]
    for event in events:
        size = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:size]
        assert event["text"] == reference.decode(event["output_ids"])
        meta = event["meta_info"]
        assert meta["id"] == "flow" and meta["completion_tokens"] == len(meta["output_token_logprobs"]) == size
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [{"type": "length", "length": 6}] and len(events) > 1
    assert "e2e_latency" in events[-1]["meta_info"] and "e2e_latency" not in events[0]["meta_info"]


def test_a_stream_holds_back_what_may_begin_a_stop_string(
    server: Server, reference: Reference, greedy: list[int]
) -> None:
    at = first_new(greedy, 4)
    text = reference.decode(greedy[: at + 2])
    params = {"temperature": 0, "max_new_tokens": 24, "stop": text[-2:]}
    events = server.stream("/generate", {"input_ids": reference.prompt, "sampling_params": params})
    assert all(text[:-2].startswith(event["text"]) for event in events)
    assert events[-1]["text"] == text[:-2] and events[-1]["output_ids"] == greedy[: at + 2]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[-2:]}


def test_a_streamed_batch_says_which_request_an_event_is_of(server: Server, reference: Reference) -> None:
    prompts = [reference.prompt, reference.encode("xyz")]
    params = {"temperature": 0, "max_new_tokens": 3}
    events = server.stream("/generate", {"input_ids": prompts, "sampling_params": params})
    last = {event["index"]: event["output_ids"] for event in events}
    assert last == {index: reference.greedy(prompt, 3) for index, prompt in enumerate(prompts)}


def test_a_refused_stream_is_an_event(server: Server) -> None:
    (event,) = server.stream(
        "/generate", {"input_ids": [5] * (CONTEXT_LENGTH + 88), "sampling_params": {"max_new_tokens": 1}}
    )
    assert set(event) == {"error"} and event["error"]["code"] == 400
    assert set(event["error"]) == {"message", "type", "code", "retryable"}


def test_the_prefix_cache_counts_what_it_saved(flushed: Server, reference: Reference) -> None:
    prompt = reference.encode("a prompt long enough to be worth keeping " * 4)

    def cached(ids: list[int]) -> int:
        return int(flushed.generate(ids, max_new_tokens=4)["meta_info"]["cached_tokens"])

    assert cached(prompt) == 0
    assert cached(prompt) == len(prompt) - 1  # the last token is computed again for its logits
    assert cached(prompt[:50] + reference.encode("and then")) == 50
    answer = flushed.generate(prompt, max_new_tokens=6, ignore_eos=True)["output_ids"]
    continued = flushed.generate(prompt + answer + reference.encode("!"))["meta_info"]["cached_tokens"]
    assert continued >= len(prompt) + len(answer) - 1  # an answer is kept as well, for the next turn
    flushed.ok("/flush_cache", {})
    assert cached(prompt) == 0


def test_a_cached_prefix_changes_no_logprob(flushed: Server, reference: Reference) -> None:
    prompt = reference.encode("shared beginning of two prompts") + reference.prompt
    for ids in (prompt, prompt[:-3] + [50, 60]):
        for _ in range(2):
            answer = flushed.generate(ids)
            expected = reference.logprobs(ids + answer["output_ids"])[len(ids) - 1 :]
            assert_logprobs(answer["meta_info"]["output_token_logprobs"], answer["output_ids"], expected)


def test_unknown_keys_are_ignored(server: Server, reference: Reference) -> None:
    body = {"bootstrap_room": None, "of_the_future": {"a": 1}, "priority": 3}
    assert len(server.generate(reference.prompt, body=body)["output_ids"]) == 8


PARAMS = {"max_new_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": PARAMS}, "Either text, input_ids or input_embeds should be provided"),
        ({"input_ids": [], "sampling_params": PARAMS}, "empty"),
        ({"text": "", "sampling_params": PARAMS}, "empty"),
        (
            {"input_ids": [5] * (CONTEXT_LENGTH + 88), "sampling_params": PARAMS},
            f"{CONTEXT_LENGTH + 88} tokens) is longer than the model's context length",
        ),
        ({"input_ids": [5] * CONTEXT_LENGTH, "sampling_params": PARAMS}, "context length"),
        ({"input_ids": [5] * (CONTEXT_LENGTH - 3), "sampling_params": PARAMS}, "maximum context length"),
        *(
            ({"input_ids": [5], "sampling_params": PARAMS | wrong}, next(iter(wrong)))
            for wrong in (
                {"temperature": -1},
                {"top_p": 0},
                {"top_p": 1.5},
                {"min_new_tokens": -1},
                {"min_new_tokens": 9},
                {"max_new_tokens": -1},
                {"frequency_penalty": 5},
            )
        ),
    ],
)
def test_refused_requests_say_why(server: Server, body: dict[str, Any], says: str) -> None:
    status, answer = server.call("/generate", body)
    assert status == 400 and says in answer["error"]["message"], answer


def test_malformed_bodies_are_refused(server: Server) -> None:
    for body in (b"{nope", {"input_ids": "abc", "sampling_params": PARAMS}):
        status, answer = server.call("/generate", body)
        assert status == 400 and set(answer) == {"object", "message", "type", "param", "code"}
        assert (answer["object"], answer["code"]) == ("error", 400)
    assert server.call("/generate") == (405, {"detail": "Method Not Allowed"})
    assert server.call("/no_such_path") == (404, {"detail": "Not Found"})


def test_put_is_post(server: Server, reference: Reference) -> None:
    body = {"input_ids": reference.prompt, "sampling_params": PARAMS}
    assert server.ok("/generate", body, method="PUT")["output_ids"] == reference.greedy(reference.prompt, 4)


def test_the_context_ends_two_tokens_early(server: Server, reference: Reference) -> None:
    prompt = reference.prompt * 300
    for size, num_new in ((CONTEXT_LENGTH - 12, 10), (CONTEXT_LENGTH - 10, 8)):
        answer = server.generate(prompt[:size], max_new_tokens=10, ignore_eos=True)
        assert len(answer["output_ids"]) == num_new
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": num_new}


def test_max_new_tokens_has_a_default(server: Server, reference: Reference) -> None:
    answer = server.ok("/generate", {"input_ids": reference.prompt, "sampling_params": {"ignore_eos": True}})
    assert len(answer["output_ids"]) == 128
