"""Whether an engine's scores are of the tokens that it was asked about."""

import pytest

from rlrecipes.engines.sglang.serving import _are_same


@pytest.mark.parametrize(
    ("told", "is_same"),
    [
        ([7, 9, 8, 9], True),
        ([7, 0, 8, 0], True),  # 9 is the vocabulary's last token, and SGLang calls it 0
        ([7, 9, 8, 0], True),
        ([0, 9, 8, 0], False),  # two tokens cannot both be the last
        ([7, 1, 8, 1], False),
        ([9, 8, 9, 5], False),
        ([7, 9, 8], False),
        ([7, 9, 8, 9, 9], False),
    ],
)
def test_other_tokens_are_noticed(told, is_same):
    assert _are_same(told, [7, 9, 8, 9]) is is_same
