"""The metric log: one JSON line an event, on disk before anything else sees it. Owns metrics.jsonl.

Everything else (MLflow, curves) is a copy that can be made again from this file. It survives a kill at any byte: a
torn last line is dropped when the file is opened next. Not-a-number and infinities are written as strings
(``"nan"``, ``"inf"``), so that every JSON reader can read the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.errors import RunError


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """What was logged at once.

    Attributes:
        step: of the loop.
        time: seconds since 1970, to the millisecond; strictly rising within a log, so it names the record.
        metrics: name -> value.
    """

    step: int
    time: float
    metrics: Mapping[str, float]

    @property
    def time_ms(self) -> int:
        """``time`` in milliseconds, which MLflow counts in."""
        return round(self.time * 1000)


class MetricLog:
    """Append-only log of one run.

    Args:
        path: the JSONL file; made, with its directories, when missing.

    Raises:
        RunError: the file cannot be opened, or a line that is not the last is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
            data = path.read_bytes()
            records, num_good_bytes = _parse(data, path)
            if num_good_bytes < len(data):
                os.ftruncate(self._descriptor, num_good_bytes)
        except OSError as error:
            raise _to_run_error(path, error) from error
        self._last_time_ms = records[-1].time_ms if records else 0

    def append(self, step: int, metrics: Mapping[str, float]) -> MetricRecord:
        """Write one line and wait until the disk has it.

        Args:
            step: of the loop.
            metrics: name -> value.

        Returns:
            The record as written.

        Raises:
            RunError: the disk is full or refuses; the log then ends with the line before.
        """
        self._last_time_ms = max(self._last_time_ms + 1, time.time_ns() // 1_000_000)
        record = MetricRecord(step, self._last_time_ms / 1000, dict(metrics))
        try:
            size = os.fstat(self._descriptor).st_size
            try:
                _write_all(self._descriptor, _to_line(record))
                os.fsync(self._descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise
        except OSError as error:
            raise _to_run_error(self.path, error) from error
        return record

    def truncate_after(self, step: int) -> int:
        """Remove what was logged for later steps, atomically: a resumed run logs them again.

        Args:
            step: the last one to keep.

        Returns:
            How many records were removed.

        Raises:
            RunError: the disk is full or refuses; the log is then as before.
        """
        records = self.read()
        kept = [record for record in records if record.step <= step]
        if len(kept) == len(records):
            return 0
        try:
            write_atomically(self.path, b"".join(_to_line(record) for record in kept))
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise _to_run_error(self.path, error) from error
        os.close(self._descriptor)
        self._descriptor = descriptor
        return len(records) - len(kept)

    def read(self) -> list[MetricRecord]:
        """All records, oldest first."""
        return read_records(self.path)

    def close(self) -> None:
        """Give the file back; nothing can be appended after."""
        os.close(self._descriptor)


def read_records(path: Path) -> list[MetricRecord]:
    """Read a log, also one that a process is writing or died writing.

    Args:
        path: the JSONL file.

    Returns:
        Its records, oldest first; a torn last line is left out.

    Raises:
        RunError: the file cannot be read, or a line that is not the last is malformed (file and line are named).
    """
    try:
        return _parse(path.read_bytes(), path)[0]
    except OSError as error:
        raise _to_run_error(path, error) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a kill at any moment leaves the old or the new one, whole.

    Args:
        path: the file.
        data: what it shall hold.

    Raises:
        OSError: the disk is full or refuses; the file is then as before.
    """
    replacement = path.with_name(path.name + ".new")
    try:
        with replacement.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            replacement.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def parse_lines(lines: Iterable[bytes]) -> list[MetricRecord]:
    """Turn whole lines into records.

    Args:
        lines: JSON, one record each.

    Returns:
        One record a line.

    Raises:
        ValueError: a line is malformed.
    """
    return [_to_record(line) for line in lines]


def _parse(data: bytes, path: Path) -> tuple[list[MetricRecord], int]:
    """Give the records and how many bytes from the start hold whole lines."""
    records: list[MetricRecord] = []
    num_good_bytes = 0
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_to_record(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(
                f"{path}:{number}",
                f"is not a metric record: {error}",
                f"repair or remove line {number}; the lines around it are intact",
            ) from error
        num_good_bytes += len(line) + 1
    return records, num_good_bytes


def _to_record(line: bytes) -> MetricRecord:
    try:
        fields: dict[str, Any] = json.loads(line)
        metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
        return MetricRecord(int(fields["step"]), float(fields["time"]), metrics)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_line(record: MetricRecord) -> bytes:
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in record.metrics.items()}
    return json.dumps({"step": record.step, "time": record.time, "metrics": metrics}).encode() + b"\n"


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _to_run_error(path: Path, error: OSError) -> RunError:
    return RunError(
        str(path),
        f"the metric log cannot be used: {error.strerror or error}",
        "free space on that disk or make the directory writable, then start the same command again to continue",
    )
