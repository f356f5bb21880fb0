"""The tracker: what the loop tells metrics and artifacts. Owns the layout of tracking in a run directory.

<run_dir>/metrics.jsonl         every metric; the truth
<run_dir>/mlflow_upload.json    what MLflow shall have and has
<run_dir>/rollouts.jsonl        a few rollouts of every step and evaluation, and why others failed
<run_dir>/attempts.jsonl        every start and how it ended
<run_dir>/artifacts/            texts logged as artifacts
<run_dir>/curves.png            drawn at the end
<run_dir>/report.html           written at the end, from the files above and plan.yaml
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlrecipes.tracking.attempts import log_end, log_start
from rlrecipes.tracking.curves import draw_curves
from rlrecipes.tracking.environment import collect_git, collect_job, collect_machine, collect_packages
from rlrecipes.tracking.log import MetricLog, MetricRecord
from rlrecipes.tracking.metrics import check_metrics
from rlrecipes.tracking.mlflow_sink import METRICS_FILE, MlflowSink
from rlrecipes.tracking.report import REPORT_FILE, write_report
from rlrecipes.tracking.rollouts import (
    ROLLOUTS_FILE,
    TABLE_FILE,
    RolloutLog,
    RolloutRecord,
    read_rollouts,
    to_mlflow_table,
)
from rlrecipes.tracking.upload_state import LOGGER, ParentRun, shorten

CURVES_FILE = "curves.png"
CHECKPOINTS_FILE = "checkpoints.json"
MAX_REASON_CHARACTERS = 2000


class RunStatus(StrEnum):
    """How a run ended, in MLflow's words."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    INTERRUPTED = "KILLED"


class Tracker:
    """Tracks one run.

    Args:
        run_dir: the run's directory.
        log: its metric log.
        sink: of MLflow; None tracks in files alone.
    """

    def __init__(self, run_dir: Path, log: MetricLog, sink: MlflowSink | None = None) -> None:
        self._run_dir = run_dir
        self._log = log
        self._rollouts = RolloutLog(run_dir / ROLLOUTS_FILE)
        self._sink = sink

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, for the checkpoint; None without MLflow or before it answered."""
        return self._sink.run_id if self._sink else None

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics; they are on disk when this returns.

        Args:
            step: of the loop.
            metrics: name -> number; names of the registry only.

        Raises:
            ContractError: a name the registry lacks, or a value that is no number; nothing is logged then.
            RunError: the disk is full.
        """
        self._log.append(step, check_metrics(metrics))
        if self._sink:
            self._sink.notify()

    def log_rollouts(self, record: RolloutRecord) -> None:
        """Keep a few rollouts of a step or an evaluation; those of evaluations become a table in MLflow.

        Args:
            record: what is kept.
        """
        self._rollouts.append(record)
        if self._sink is None or record.purpose != "eval":
            return
        table, note = to_mlflow_table(read_rollouts(self._rollouts.path))
        self._sink.log_text(TABLE_FILE, table)
        tags = {"mlflow.loggedArtifacts": json.dumps([{"path": TABLE_FILE, "type": "table"}])}
        self._sink.log_tags(tags | ({TABLE_FILE: note} if note else {}))

    def log_checkpoints(self, paths: Sequence[Path]) -> None:
        """Tell MLflow where the checkpoints lie; they stay there.

        Args:
            paths: of those that are whole, oldest first.
        """
        if self._sink is None:
            return
        entries = [{"host": platform.node(), "path": str(path.absolute()), "num_bytes": _size(path)} for path in paths]
        self._sink.log_text(CHECKPOINTS_FILE, json.dumps(entries, indent=1) + "\n")

    def register_model(self, name: str, path: Path, step: int) -> None:
        """Make an exported model a version in MLflow's registry.

        Args:
            name: in the registry.
            path: its directory, under the run directory.
            step: completed when it was exported.
        """
        if self._sink is not None:
            self._sink.register_model(name, path, step)

    def log_plan(self, plan: Mapping[str, object], plan_yaml: str, defaults_diff: str) -> None:
        """Log what the run is and what it runs on: parameters, plan, difference to the defaults, git, environment.

        Args:
            plan: nested values; become MLflow's parameters under dotted names.
            plan_yaml: the resolved plan, whole.
            defaults_diff: what differs from the defaults.
        """
        if self._sink is None:
            return
        self._sink.log_params(plan)
        self.log_text("plan.yaml", plan_yaml)
        self.log_text("defaults_diff.txt", defaults_diff)
        self.log_text("environment/packages.txt", "\n".join(collect_packages()) + "\n")
        self.log_text("environment/machine.json", json.dumps(collect_machine(), indent=1) + "\n")
        self._sink.log_tags(collect_job())
        self._log_git("git", Path(__file__).parent)
        if not _is_same_checkout(Path.cwd(), Path(__file__)):
            self._log_git("git_of_working_directory", Path.cwd())

    def _log_git(self, name: str, directory: Path) -> None:
        state = collect_git(directory)
        if state is None or self._sink is None or "site-packages" in directory.parts:
            return
        tags = {f"{name}.commit": state.commit, f"{name}.branch": state.branch, f"{name}.is_dirty": str(state.is_dirty)}
        if name == "git":
            tags["mlflow.source.git.commit"] = state.commit
        self._sink.log_tags(tags)
        if state.is_dirty:
            self.log_text(f"{name}/status.txt", state.status)
            self.log_text(f"{name}/diff.patch", state.diff)

    def log_artifact(self, path: Path, target: str | None = None) -> None:
        """Add a file to the MLflow run.

        Args:
            path: the file; must stay where it is.
            target: path on the server, ending in the file's own name; its name alone by default.
        """
        if self._sink:
            self._sink.log_artifact(path, target)

    def log_text(self, target: str, text: str) -> None:
        """Add a text to the MLflow run, as a file.

        Args:
            target: path on the server, such as ``rollouts/step_5.txt``.
            text: its contents.
        """
        if self._sink:
            self._sink.log_text(target, text)

    def resume(self, step: int) -> int:
        """Forget what was logged after a checkpoint; the run logs it again.

        MLflow keeps both values of a step; the later one is the run's, and ``compare`` reads that one.

        Args:
            step: the last one that the checkpoint holds.

        Returns:
            How many records were removed.
        """
        num_removed = self._log.truncate_after(step)
        self._rollouts.truncate_after(step)
        log_start(self._run_dir, max(step, 0))
        if self._sink:
            self._sink.notify()
        return num_removed

    def read(self) -> list[MetricRecord]:
        """Everything logged so far, oldest first."""
        return self._log.read()

    def finish(self, status: RunStatus = RunStatus.FINISHED, reason: str = "") -> bool:
        """Draw the curves, write the report, upload what is left for a bounded time, and close.

        Args:
            status: how the run ended.
            reason: why it failed.

        Returns:
            Whether MLflow has everything (True without MLflow).
        """
        log_end(self._run_dir, status, shorten(reason, MAX_REASON_CHARACTERS, "cut"))
        try:
            curves = self._run_dir / CURVES_FILE
            if draw_curves({self._run_dir.name: [self._log.read()]}, curves):
                self.log_artifact(curves)
        except Exception as error:
            LOGGER.warning("the curves are not drawn: %s", error)
        self._write_report()
        if self._rollouts.path.exists():
            self.log_artifact(self._rollouts.path)
        self._log.close()
        return self._sink.close(status) if self._sink else True

    def _write_report(self) -> None:
        try:
            if write_report(self._run_dir):
                self.log_artifact(self._run_dir / REPORT_FILE)
        except Exception as error:
            LOGGER.warning("the report is not written: %s: %s", type(error).__name__, error)


def build_tracker(
    run_dir: Path,
    tracking_uri: str | None,
    experiment: str,
    run_name: str,
    run_id: str | None = None,
    *,
    parent: ParentRun | None = None,
) -> Tracker:
    """Build the tracker of a run, new or resumed.

    Args:
        run_dir: the run's directory; made when missing.
        tracking_uri: MLflow's; None or empty tracks in files alone.
        experiment: MLflow's experiment.
        run_name: MLflow's name of the run.
        run_id: of the MLflow run to continue, from a checkpoint; None continues the run directory's own.
        parent: MLflow's run of the sweep, in which this one is nested.

    Returns:
        A tracker whose MLflow thread has started; nothing waits for MLflow.

    Raises:
        RunError: the metric log cannot be opened.
    """
    log = MetricLog(run_dir / METRICS_FILE)
    sink = MlflowSink(tracking_uri, experiment, run_name, run_dir, run_id, parent=parent) if tracking_uri else None
    return Tracker(run_dir, log, sink)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _is_same_checkout(directory: Path, source: Path) -> bool:
    return next((p for p in (directory, *directory.parents) if (p / ".git").exists()), None) in (None, *source.parents)
