"""One undisturbed run, which tests go on from or hold other runs against."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.command_line import NUM_STEPS, SMALL, CommandLine
from tests.integration.warm_commands import WarmCommands


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """An undisturbed run of six steps, as a user starts it."""
    shell = CommandLine(tmp_path_factory.mktemp("trained"))
    shell.output = shell.run("train", "name=run", f"schedule.num_steps={NUM_STEPS}", *SMALL)
    yield shell
    shell.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    commands = WarmCommands(tmp_path_factory.mktemp("warm"))
    yield commands
    commands.close()


@pytest.fixture
def shell(tmp_path, warm):
    shell = CommandLine(tmp_path, warm)
    yield shell
    shell.close()


@pytest.fixture
def continued(trained, shell):
    """A copy of the trained run, to go on from in another way."""
    shutil.copytree(trained.cwd / "runs", shell.cwd / "runs")
    return shell
