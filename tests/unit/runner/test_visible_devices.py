"""A Plan counts the GPUs it was given from 0; a job's CUDA_VISIBLE_DEVICES says which these are."""

from __future__ import annotations

import pytest

from rlrecipes.runner.machines import to_visible_devices


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        (None, "0,1", "0,1"),
        ("", "0,1", "0,1"),
        ("4,5", "0,1", "4,5"),
        ("4, 5,6", "2", "6"),
        ("GPU-a,GPU-b", "1", "GPU-b"),
        ("4,5", "", ""),
    ],
)
def test_numbers_of_the_plan_become_those_of_the_job(monkeypatch, given, wanted, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert to_visible_devices(wanted) == expected
