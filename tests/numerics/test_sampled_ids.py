"""What is trained is what was sampled, id by id: no text is encoded again, no conversation rendered again."""

import json

import adapter
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.rows import RowKeys
from rlrecipes.data.sft import SftSource
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.errors import DataError

ALPHABET = "abc"
# As the templates of thinking models: what an earlier answer thought is dropped when the next question comes.
THINKING_TEMPLATE = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED_TEMPLATE = THINKING_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SPECIAL = ["<|im_start|>", "<think>", "</think>"]
WORDS = st.text(alphabet="ab 12+?\n", min_size=1, max_size=8)
ANSWERS = st.builds("<think>{}</think>\n\n{}".format, WORDS, WORDS)


def build_bpe(pairs):
    """A BPE whose merges join any two tokens there are so far."""
    tokens, merges = list(ALPHABET), []
    for left, right in pairs:
        merge = (tokens[left % len(tokens)], tokens[right % len(tokens)])
        if "".join(merge) not in tokens:
            tokens.append("".join(merge))
            merges.append(merge)
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


def build_chat_encoder(template):
    tokenizer = build_char_tokenizer(eos_token="<|im_end|>", extra_special_tokens=SPECIAL, chat_template=template)
    return PromptEncoder(tokenizer, apply_chat_template=True, max_prompt_tokens=1000)


def write_rows(directory, *rows):
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_sft(path, encoder):
    return SftSource(
        path, encoder=encoder, keys=RowKeys(), seed=0, should_shuffle=False, max_sample_tokens=2000
    ).sample(0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=6),
    drawn=st.lists(st.integers(0, 99), min_size=2, max_size=12),
    prompt=st.text(alphabet=ALPHABET, min_size=1, max_size=4),
)
def test_ids_that_their_text_does_not_encode_to_are_trained_as_sampled(pairs, drawn, prompt):
    tokenizer = build_bpe(pairs)
    prompt_ids = tokenizer(prompt)["input_ids"]
    sampled = [index % (len(tokenizer) - 1) for index in drawn]
    assume(tokenizer(tokenizer.decode(sampled))["input_ids"] != sampled)
    sampled.append(tokenizer.eos_token_id)
    logprobs = [-0.5 * (1 + index) for index in range(len(sampled))]
    assert adapter.sampled_turn(prompt_ids, sampled, logprobs, tokenizer) == {
        "sequence": prompt_ids + sampled,
        "places": list(range(len(prompt_ids), len(prompt_ids) + len(sampled))),
        "trained": sampled,
        "rollout_logprobs": logprobs,
    }


@settings(deadline=None, max_examples=40)
@given(first=st.tuples(WORDS, ANSWERS), second=st.tuples(WORDS, ANSWERS))
def test_turns_are_trained_as_sampled_though_the_template_drops_earlier_thinking(first, second):
    encoder = build_chat_encoder(THINKING_TEMPLATE)
    tokenizer = encoder.tokenizer

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    shown = [
        encode(f"<|im_start|>user\n{first[0]}<|im_end|>\n<|im_start|>assistant\n"),
        encode(f"\n<|im_start|>user\n{second[0]}<|im_end|>\n<|im_start|>assistant\n"),
    ]
    sampled = [encode(f"{answer}<|im_end|>") for _, answer in (first, second)]
    conversation = [
        message
        for question, answer in (first, second)
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    rendered = encode(tokenizer.apply_chat_template(conversation, tokenize=False))
    thinking = tokenizer.convert_tokens_to_ids("<think>")
    assert rendered.count(thinking) == 1, "the template must be one that drops earlier thinking"

    turns = [(ids, answer, [-0.25 * k for k in range(len(answer))]) for ids, answer in zip(shown, sampled, strict=True)]
    got = adapter.trained_tokens(turns)
    assert got["sequence"] == shown[0] + sampled[0] + shown[1] + sampled[1]
    assert got["trained"] == sampled[0] + sampled[1] and got["trained"].count(thinking) == 2
    assert got["rollout_logprobs"] == [*turns[0][2], *turns[1][2]]


@settings(deadline=None, max_examples=40)
@given(history=st.tuples(WORDS, ANSWERS), question=WORDS, answer=ANSWERS)
def test_an_answer_to_imitate_keeps_its_thinking_and_follows_the_prompt_of_a_rollout(
    directory, history, question, answer
):
    encoder = build_chat_encoder(THINKING_TEMPLATE)
    messages = [
        {"role": "user", "content": history[0]},
        {"role": "assistant", "content": history[1]},
        {"role": "user", "content": question},
    ]
    path = write_rows(directory, {"prompt": messages, "label": "", "response": answer})
    prompts = JsonlPromptSource(path, encoder=encoder, keys=RowKeys(), seed=0, should_shuffle=False)
    sample = read_sft(path, encoder)
    num_prompt = len(prompts.prompt(0).token_ids)
    assert sample.token_ids[:num_prompt] == prompts.prompt(0).token_ids
    assert sample.loss_mask == tuple(index >= num_prompt for index in range(len(sample.token_ids)))
    assert encoder.tokenizer.decode(sample.token_ids[num_prompt:]) == f"{answer}<|im_end|>"
    assert encoder.tokenizer.decode(sample.token_ids[:num_prompt]).count("<think>") == 0


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=6),
    prompt=st.text(alphabet=ALPHABET, min_size=1, max_size=6),
    answer=st.text(alphabet=ALPHABET, min_size=1, max_size=6),
)
def test_prompt_and_answer_to_imitate_never_share_a_token(directory, pairs, prompt, answer):
    # Joined first, so that a token spans both, unless an earlier one takes a part of it.
    seam = (ALPHABET.index(prompt[-1]), ALPHABET.index(answer[0]))
    tokenizer = build_bpe([seam, *pairs])
    own = [tokenizer(text)["input_ids"] for text in (prompt, answer)]
    assume(tokenizer(prompt + answer)["input_ids"] != own[0] + own[1])  # encoded as one text, a token would span both
    path = write_rows(directory, {"prompt": prompt, "response": answer})
    sample = read_sft(path, PromptEncoder(tokenizer, apply_chat_template=False, max_prompt_tokens=99))
    assert list(sample.token_ids) == [*own[0], *own[1], tokenizer.eos_token_id]
    assert sum(sample.loss_mask) == len(own[1]) + 1


def test_an_answer_that_opens_thinking_again_is_refused(directory):
    encoder = build_chat_encoder(OPENED_TEMPLATE)
    rows = ["<think>\n1</think>2", "\n<think>1</think>2", "1</think>2", "1<think>"]
    path = write_rows(directory, *({"prompt": "1+1", "response": response} for response in rows))
    with pytest.raises(DataError) as caught:
        read_sft(path, encoder)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:1", f"{path}:2"]
    assert all("<think>" in problem.problem for problem in caught.value.problems)
    sample = read_sft(write_rows(directory, {"prompt": "1+1", "response": rows[2]}), encoder)
    assert encoder.tokenizer.decode(sample.token_ids).endswith("assistant\n<think>\n1</think>2<|im_end|>")
