"""What a sweep keeps of its points, so that it can be interrupted and continued. Owns <runs_dir>/sweeps/NAME.

sweep.json            the sweep's own id, which names its run in MLflow
base.yaml             the Plan without the swept values
points/NUMBER.json    one point each: its recipe, its run, how it stands

One process numbers the points before any of them starts; after that a point's file is written by the process that runs
it, so that launchers may run points side by side, on other hosts too.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path

from rlrecipes.errors import InputError, RunError
from rlrecipes.tracking.upload_state import ParentRun, redact
from rlrecipes.tracking.uploader import build_client, ensure_experiment, find_or_create_run

SWEEPS_DIR = "sweeps"
_BASE = "base.yaml"
_POINTS = "points"
_SWEEP = "sweep.json"


class PointState(StrEnum):
    """How a point stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class Point:
    """One recipe of a sweep.

    Attributes:
        number: within the sweep; its run is named after it.
        plan_hash: of its Plan under the sweep's own name.
        overrides: as Hydra gets them.
        run_name: of its run.
        run_dir: of its run.
        state: how it stands; one that says RUNNING may be of a process that died.
        problem: what made it fail, or be pruned; empty otherwise.
    """

    number: int
    plan_hash: str
    overrides: tuple[str, ...]
    run_name: str
    run_dir: str
    state: PointState = PointState.WAITING
    problem: str = ""


class SweepRecord:
    """The points of one sweep on disk.

    Args:
        directory: of the sweep; made by :meth:`register`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def uid(self) -> str:
        """Names the sweep's run in MLflow, whatever else has its name.

        Raises:
            InputError: the directory is no sweep's.
        """
        try:
            return str(json.loads((self.directory / _SWEEP).read_text())["uid"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "name the directory of a sweep: <runs_dir>/sweeps/NAME"
            raise InputError(str(self.directory), f"holds no sweep ({type(error).__name__})", fix) from error

    @property
    def parent(self) -> ParentRun:
        """The sweep's run in MLflow."""
        return ParentRun(self.directory.name, self.uid)

    @property
    def base_path(self) -> Path:
        """The Plan without the swept values; absent where that is no Plan."""
        return self.directory / _BASE

    def register(self, points: Sequence[Point], base_yaml: str | None) -> list[Point]:
        """Number the points: what the sweep knows already keeps its number, its run and its state.

        Args:
            points: of this call, numbers and runs as a new sweep would give them, ``{number}`` where the number goes.
            base_yaml: the Plan without the swept values; None where that is none.

        Returns:
            The same points as the sweep has them.

        Raises:
            RunError: the disk is full or read-only.
        """
        try:
            (self.directory / _POINTS).mkdir(parents=True, exist_ok=True)
            if not (self.directory / _SWEEP).exists():
                _replace(self.directory / _SWEEP, json.dumps({"uid": uuid.uuid4().hex}))
            if base_yaml is not None:
                _replace(self.base_path, base_yaml)
            known = {point.plan_hash: point for point in self.read()}
            numbers = count(self._find_next_number())
            found = []
            for point in points:
                old = known.get(point.plan_hash)
                new = replace(old, overrides=point.overrides) if old else _number(point, next(numbers))
                known[point.plan_hash] = new
                self._write(new)
                found.append(new)
            return found
        except OSError as error:
            raise _cannot_write(self.directory, error) from error

    def read(self) -> list[Point]:
        """All points, by number; a file that cannot be read is passed over."""
        return sorted(self._iter_points(), key=lambda point: point.number)

    def find(self, overrides: Sequence[str]) -> Point:
        """The point that Hydra starts with these overrides.

        Args:
            overrides: as Hydra gives them to the job.

        Raises:
            RunError: it was not registered.
        """
        for point in self._iter_points():
            if point.overrides == tuple(overrides):
                return point
        fix = "rerun the command that started the sweep"
        raise RunError(str(self.directory), f"has no point {' '.join(overrides)}", fix)

    def set_state(self, point: Point, state: PointState, problem: str = "") -> None:
        """Keep how a point stands.

        Args:
            point: which.
            state: from now on.
            problem: what made it fail, or be pruned.

        Raises:
            RunError: the disk is full or read-only.
        """
        try:
            self._write(replace(point, state=state, problem=problem))
        except OSError as error:
            raise _cannot_write(self.directory, error) from error

    def _find_next_number(self) -> int:
        """Above all that are taken, by files that cannot be read too."""
        return 1 + max((int(path.stem) for path in (self.directory / _POINTS).glob("*.json")), default=-1)

    def _iter_points(self) -> Iterator[Point]:
        for path in (self.directory / _POINTS).glob("*.json"):
            try:
                data = json.loads(path.read_text())
                state = PointState(data.pop("state"))
                yield Point(**data | {"overrides": tuple(data["overrides"])}, state=state)
            except (OSError, ValueError, KeyError, TypeError):
                continue

    def _write(self, point: Point) -> None:
        _replace(self.directory / _POINTS / f"{point.number}.json", json.dumps(dataclasses.asdict(point), indent=1))


def find_sweep(runs_dir: Path, name: str) -> SweepRecord:
    """The record of a sweep.

    Args:
        runs_dir: of its runs.
        name: of the sweep.
    """
    return SweepRecord(runs_dir / SWEEPS_DIR / name)


def upload_sweep(record: SweepRecord, points: Sequence[Point], tracking_uri: str, experiment: str) -> str:
    """Bring the sweep's run in MLflow up to date: how its points stand, and with them the sweep. Never raises.

    Args:
        record: of the sweep.
        points: of this call.
        tracking_uri: as for ``build_client``.
        experiment: of the points' runs.

    Returns:
        Why it could not be; empty otherwise.
    """
    states = {point.state for point in points}
    status = "RUNNING"
    if not states & {PointState.WAITING, PointState.RUNNING}:
        status = "KILLED" if PointState.INTERRUPTED in states else "FINISHED"
        status = "FAILED" if PointState.FAILED in states else status
    try:
        client = build_client(tracking_uri)
        experiment_id = ensure_experiment(client, tracking_uri, experiment)
        parent = record.parent
        run_id = find_or_create_run(client, experiment_id, parent.uid, parent.name).info.run_id
        client.log_text(run_id, json.dumps([dataclasses.asdict(point) for point in points], indent=1), "points.json")
        if record.base_path.exists():
            client.log_artifact(run_id, str(record.base_path))
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status)
    except Exception as error:
        return redact(f"{type(error).__name__}: {error}")
    return ""


def find_point(runs_dir: Path, sweep: str | None, run_dir: Path) -> tuple[SweepRecord, Point] | None:
    """The point that a run is.

    Args:
        runs_dir: of the sweep's runs.
        sweep: its name; None where the run is of no sweep.
        run_dir: of the run.

    Returns:
        With its record; None where there is none, as of a saved Plan that is run elsewhere.
    """
    if sweep is None:
        return None
    record = find_sweep(runs_dir, sweep)
    return next(((record, point) for point in record.read() if Path(point.run_dir) == run_dir), None)


def _number(point: Point, number: int) -> Point:
    run_name, run_dir = (text.replace("{number}", str(number)) for text in (point.run_name, point.run_dir))
    return replace(point, number=number, run_name=run_name, run_dir=run_dir)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _cannot_write(directory: Path, error: OSError) -> RunError:
    fix = "free space or mend permissions, then rerun the same command: finished points are skipped"
    return RunError(str(directory), f"cannot be written: {error.strerror or error}", fix)
