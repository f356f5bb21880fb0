"""What a chat template puts between two answers, and templates under which sampled ids could not stay as they are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.data.observations import ObservationEncoder
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.errors import ConfigError

WHOLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STARTED = WHOLE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif").replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n{% endif %}{{ m.content }}",
)
"""Opens the thought itself, and so do earlier answers."""
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and"
    " loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Takes the thought out of what was answered before the user's last message, as Qwen3's does."""
EMPTIED = WHOLE.replace("<|assistant|>{% endif", "<|assistant|><think></think>{% endif")
"""Says that there was no thought, and forgets that it did."""
SHOUTING = WHOLE.replace("{{ m.content }}", "{{ m.content | upper }}")
COUNTING = WHOLE.replace("<eos>", "<eos>{{ messages | length }}")
NUMBERED = WHOLE.replace("<eos>", "<eos>{{ loop.index }}")
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + WHOLE
)


def build(template, role="user", **changes):
    tokenizer = build_char_tokenizer(
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|tool|>"], chat_template=template, **changes
    )
    return ObservationEncoder(tokenizer, template is not None, role)


@pytest.mark.parametrize(
    ("template", "role"), [(WHOLE, "user"), (WHOLE, "tool"), (STARTED, "user"), (FORGETFUL, "tool"), (None, "user")]
)
def test_templates_that_keep_answers_are_taken(template, role):
    build(template, role).check()


@pytest.mark.parametrize(
    ("template", "role", "told"),
    [
        (FORGETFUL, "user", "'<think>\\nthought\\n</think>\\n\\nanswer' becomes 'answer<eos>"),
        (EMPTIED, "user", "does not leave an answer as it was sampled"),
        (SHOUTING, "user", "does not leave an answer as it was sampled"),
        (COUNTING, "user", "does not leave an answer as it was sampled"),
        (NUMBERED, "user", "does not leave an answer as it was sampled"),
        (NO_TOOLS, "tool", "refuses messages of tool after an answer: no tools"),
    ],
)
def test_templates_that_do_not_are_refused(template, role, told):
    with pytest.raises(ConfigError) as caught:
        build(template, role).check()
    assert told in str(caught.value)
    assert caught.value.problems[0].where == "rollout.generate.observation_role"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_observation_is_what_the_template_adds(role):
    encoder = build(WHOLE, role)
    end = encoder.tokenizer.eos_token_id
    ended, open_ = encoder.encode("no", (65, end)), encoder.encode("no", (65,))
    assert encoder.tokenizer.decode(open_) == f"<eos>\n<|{role}|>no<eos>\n<|assistant|>"
    assert open_ == (end, *ended), "the token that ends an answer is not said twice, nor left out"


def test_a_letter_that_an_answer_ends_with_is_said_again():
    encoder = build(None)
    (letter,) = encoder.tokenizer("a")["input_ids"]
    assert encoder.encode("ab", (letter,)) == tuple(encoder.tokenizer("ab")["input_ids"])


def test_plain_text_is_itself_and_unknown_text_is_refused():
    encoder = build(None, alphabet="ab")
    assert encoder.encode("ba", ()) == (1, 0)
    for text, told in (("c", "does not know"), ("", "empty")):
        with pytest.raises(ValueError, match=told):
            encoder.encode(text, ())


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=9)


@settings(deadline=None, max_examples=100)
@given(question=TEXT, turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), is_forgetful=st.booleans())
def test_ids_put_together_are_the_ids_of_the_conversation(question, turns, is_forgetful):
    encoder = build(FORGETFUL if is_forgetful else WHOLE, "tool")
    tokenizer = encoder.tokenizer
    messages = [{"role": "user", "content": question}]

    def render():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = render()
    for answer, observation in turns:
        sampled = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        ids = [*ids, *sampled, *encoder.encode(observation, sampled)]
        messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": observation}]
        assert ids == render()
