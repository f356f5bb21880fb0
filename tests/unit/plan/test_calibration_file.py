"""The file of constants: its form, what a file of one's own may say, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from rlrecipes.errors import ConfigError
from rlrecipes.plan.calibration import CALIBRATION_FILE, Constant, load_calibration
from rlrecipes.plan.step_time import load_time_constants
from rlrecipes.plan.time_constants import TimeConstants


def test_every_constant_of_the_time_model_is_used_and_says_where_it_is_from():
    shipped = yaml.safe_load(CALIBRATION_FILE.read_text())["time"]
    assert set(shipped) == {field.name for field in dataclasses.fields(TimeConstants)}
    for entry in shipped.values():
        assert entry["source"].startswith(("assumed", "measured"))
        assert entry["unit"]


def test_a_file_of_ones_own_changes_what_it_names(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("time: {nic_fraction: {value: 0.5, unit: x, source: y}}\n")
    own, shipped = load_time_constants(str(path)), load_time_constants(None)
    assert own.nic_fraction == 0.5
    assert dataclasses.replace(own, nic_fraction=shipped.nic_fraction) == shipped


def test_what_is_written_is_read_back(tmp_path):
    changed = load_calibration().replace("time", {"nic_fraction": Constant(0.25, "of NIC bandwidth", "fitted: run a")})
    path = tmp_path / "again.yaml"
    path.write_text(changed.to_yaml())
    assert load_calibration(str(path)) == changed


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("time: {nic_fractoin: {value: 1, unit: x, source: y}}", "time.nic_fractoin"),
        ("tiem: {}", "tiem"),
        ("time: {nic_fraction: 0.5}", "time.nic_fraction"),
        ("time: {nic_fraction: {value: -1, unit: x, source: y}}", "time.nic_fraction"),
        ("time: {nic_fraction: {value: .nan, unit: x, source: y}}", "time.nic_fraction"),
        ("time: {nic_fraction: {value: true, unit: x, source: y}}", "time.nic_fraction"),
        ("time: [1]", "calibration"),
        ("a: [", "calibration"),
    ],
)
def test_what_is_no_calibration_is_said(tmp_path, text, where):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_calibration(str(path))
    (problem,) = caught.value.problems
    assert problem.where.endswith(where)
    assert problem.fix


def test_a_missing_file_is_said():
    with pytest.raises(ConfigError, match="nowhere"):
        load_calibration("nowhere.yaml")
