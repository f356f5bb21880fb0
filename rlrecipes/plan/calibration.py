"""Constants of the memory and time models: read from one file, each with its unit and source. Owns the file's form."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlrecipes.errors import ConfigError, Problem
from rlrecipes.suggest import did_you_mean

CALIBRATION_FILE = Path(__file__).with_name("calibration.yaml")
"""The constants that hold unless a recipe names a file of its own."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant.

    Attributes:
        value: positive.
        unit: in words.
        source: measured where, or assumed, or fitted to which runs.
    """

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """All constants.

    Attributes:
        sections: section (memory, time) -> name -> constant.
    """

    sections: Mapping[str, Mapping[str, Constant]] = field(default_factory=dict)

    def values(self, section: str) -> dict[str, float]:
        """Name -> value.

        Args:
            section: memory or time.
        """
        return {name: constant.value for name, constant in self.sections[section].items()}

    def replace(self, section: str, changed: Mapping[str, Constant]) -> Calibration:
        """The same with other constants.

        Args:
            section: memory or time.
            changed: name -> what stands there instead.
        """
        return Calibration({**self.sections, section: {**self.sections[section], **changed}})

    def to_yaml(self) -> str:
        """A file that :func:`load_calibration` reads back."""
        data = {
            section: {
                name: {"value": constant.value, "unit": constant.unit, "source": constant.source}
                for name, constant in constants.items()
            }
            for section, constants in self.sections.items()
        }
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


@functools.lru_cache(maxsize=8)
def load_calibration(path: str | None = None) -> Calibration:
    """Read the constants.

    Args:
        path: a file made by ``rlrecipes calibrate``, which may leave out what it does not change; None: the shipped.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown or malformed; every problem found.
    """
    shipped = _read(CALIBRATION_FILE)
    if path is None:
        return Calibration(shipped)
    own = _read(Path(path))
    problems = [*_find_unknown(path, own, shipped)]
    if problems:
        raise ConfigError.from_problems(problems)
    return Calibration({section: {**constants, **own.get(section, {})} for section, constants in shipped.items()})


def _find_unknown(
    path: str, own: Mapping[str, Mapping[str, Constant]], shipped: Mapping[str, Mapping[str, Constant]]
) -> list[Problem]:
    problems = []
    for section, constants in own.items():
        if section not in shipped:
            problems.append(Problem(f"{path}: {section}", "is no section", did_you_mean(section, shipped)))
            continue
        for name in constants.keys() - shipped[section].keys():
            problems.append(
                Problem(f"{path}: {section}.{name}", "is no constant", did_you_mean(name, shipped[section]))
            )
    return problems


def _read(path: Path) -> dict[str, dict[str, Constant]]:
    fix = "make one with `rlrecipes calibrate RUN --save FILE`, or set calibration=null"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("calibration", f"{path} cannot be read: {error.strerror}", fix) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("calibration", f"{path} is not YAML", fix) from error
    if not isinstance(data, dict) or not all(isinstance(section, dict) for section in data.values()):
        raise ConfigError("calibration", f"{path} holds no sections of constants", fix)
    problems: list[Problem] = []
    sections = {
        str(section): {
            str(name): _to_constant(f"{path}: {section}.{name}", entry, problems) for name, entry in all_.items()
        }
        for section, all_ in data.items()
    }
    if problems:
        raise ConfigError.from_problems(problems)
    return sections


def _to_constant(where: str, entry: Any, problems: list[Problem]) -> Constant:
    """A constant, or 1 in its place and a problem told."""
    keys = {"value", "unit", "source"}
    if not isinstance(entry, dict) or set(entry) != keys:
        problems.append(Problem(where, "is not {value, unit, source}", "write value: NUMBER, unit: ..., source: ..."))
        return Constant(1.0, "", "")
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        problems.append(Problem(where, f"is {value!r}", "give a positive number"))
        return Constant(1.0, "", "")
    return Constant(float(value), str(entry["unit"]), str(entry["source"]))
