"""The network between machines: a small program on each, which calls all others. It is started over ssh or srun."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlrecipes.engines.sglang.process import FIRST_PORT
from rlrecipes.errors import InputError
from rlrecipes.runner.diagnosis.finding import Finding

_PEER = Path(__file__).parent / "peer.py"
_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0
_QUEUE_TIMEOUT_S = 10
"""SLURM may wait so long for a node that others have."""
_CALL_TIMEOUT_S = 10.0
"""For one machine to call another at both ports."""
_USE = "runs over several machines"


def check_network(nodes: Sequence[str], *, is_slurm: bool, partition: str | None) -> list[Finding]:
    """Try every way between machines, at a port of those that a run chooses and at one that the kernel gives away.

    Args:
        nodes: as ssh, or SLURM, knows them.
        is_slurm: whether srun starts what is to run there; else ssh does.
        partition: of SLURM; None: the default one.

    Raises:
        InputError: there is no such program here.
    """
    commands = [_to_command(node, is_slurm=is_slurm, partition=partition) for node in nodes]
    try:
        return asyncio.run(_check(nodes, commands))
    except FileNotFoundError as error:
        fix = "install it, or leave out --nodes"
        raise InputError("--nodes", f"there is no {commands[0][0]} here to reach them with", fix) from error


def _to_command(node: str, *, is_slurm: bool, partition: str | None) -> list[str]:
    peer = ["python3", "-c", _PEER.read_text(encoding="utf-8"), str(FIRST_PORT)]
    if not is_slurm:
        return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", node, shlex.join(peer)]
    place = ["--overlap"] if "SLURM_JOB_ID" in os.environ else [f"--immediate={_QUEUE_TIMEOUT_S}"]
    place += [f"--partition={partition}"] if partition is not None else []
    return ["srun", "--quiet", "--unbuffered", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *place, *peer]


async def _check(nodes: Sequence[str], commands: Sequence[Sequence[str]]) -> list[Finding]:
    processes: list[Process] = []
    try:
        for command in commands:
            processes.append(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE))
        peers = dict(zip(nodes, processes, strict=True))
        answers = await asyncio.gather(*(_read(process, _START_TIMEOUT_S) for process in processes))
        hellos = dict(zip(nodes, answers, strict=True))
        found = [_lost(node, hello) for node, hello in hellos.items() if isinstance(hello, str)]
        places = {node: (one["address"], one["ports"]) for node, one in hellos.items() if isinstance(one, dict)}
        told = await asyncio.gather(*(_ask(peers[node], node, places) for node in places))
        return [*found, *_compare(dict(zip(places, told, strict=True)))]
    finally:
        await asyncio.gather(*(_end(process) for process in processes))


async def _end(process: Process) -> None:
    """A program there ends with its input; whoever keeps it from that is killed, and not waited for."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()


async def _ask(peer: Process, node: str, places: dict[str, tuple[str, list[int]]]) -> dict[str, Any] | str:
    others = {name: place for name, place in places.items() if name != node}
    assert peer.stdin is not None
    peer.stdin.write(json.dumps(others).encode() + b"\n")
    return await _read(peer, _CALL_TIMEOUT_S * len(others) + _CALL_TIMEOUT_S)


async def _read(process: Process, timeout_s: float) -> dict[str, Any] | str:
    """The next line of a machine; or why there is none."""
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except ValueError:
        return f"answers {line.decode(errors='replace').strip()!r}"
    return said[-1] if said else "ended without a word"


def _lost(node: str, reason: str) -> Finding:
    return Finding(f"machine {node}", reason, _USE, "see that it is up, takes commands from here and has python3")


def _compare(told: dict[str, dict[str, Any] | str]) -> Iterator[Finding]:
    times = []
    for node, answer in told.items():
        if isinstance(answer, str):
            yield _lost(node, answer)
            continue
        for other, call in answer.items():
            times += [call["round_trip_s"]] if call["round_trip_s"] is not None else []
            if call["problems"]:
                fix = f"let TCP through between the machines, all ports from {FIRST_PORT} on"
                yield Finding(f"network {node} to {other}", "; ".join(call["problems"]), _USE, fix)
    if times:
        spread = f"{min(times) * 1000:.2f} to {max(times) * 1000:.2f} ms"
        yield Finding("network", f"{len(told)} machines, {len(times)} ways, round trip {spread}", _USE)
