"""Who is let through while generation is paused or weights change."""

from __future__ import annotations

import asyncio

from rlrecipes.engines.embedded.gate import Gate


async def visit(gate: Gate, log: list[str], name: str, stay: asyncio.Event) -> None:
    async with gate:
        log.append(name)
        await stay.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_change_waits_for_those_inside_and_keeps_others_out() -> None:
    async def run() -> list[str]:
        gate, log, leave, stay = Gate(), [], asyncio.Event(), asyncio.Event()
        stay.set()

        async def change() -> None:
            async with gate.changing():
                log.append("change begins")
                await settle()
                log.append("change ends")

        tasks = [asyncio.create_task(visit(gate, log, "first", leave))]
        await settle()
        tasks.append(asyncio.create_task(change()))
        await settle()
        tasks += [asyncio.create_task(visit(gate, log, name, stay)) for name in ("second", "third")]
        await settle()
        assert log == ["first"]
        leave.set()
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(run()) == ["first", "change begins", "change ends", "second", "third"]


def test_a_pause_lets_a_change_through_and_nobody_else() -> None:
    async def run() -> list[str]:
        gate, log, stay = Gate(), [], asyncio.Event()
        inside = asyncio.create_task(visit(gate, log, "inside", stay))
        await settle()
        gate.set_paused(True)
        outside = asyncio.create_task(visit(gate, log, "outside", stay))
        async with gate.changing():
            await settle()
            log.append("change")
        assert gate.num_inside == 1
        gate.set_paused(False)
        stay.set()
        await asyncio.gather(inside, outside)
        assert gate.num_inside == 0
        return log

    assert asyncio.run(run()) == ["inside", "change", "outside"]


def test_a_change_given_up_while_it_waits_lets_requests_in_again() -> None:
    async def run() -> list[str]:
        gate, log, stay = Gate(), [], asyncio.Event()
        inside = asyncio.create_task(visit(gate, log, "inside", stay))
        await settle()

        async def change() -> None:
            async with gate.changing():
                log.append("change")

        changing = asyncio.create_task(change())
        await settle()
        outside = asyncio.create_task(visit(gate, log, "outside", stay))
        await settle()
        changing.cancel()
        await settle()
        stay.set()
        await asyncio.wait_for(asyncio.gather(inside, outside), 5)
        return log

    assert asyncio.run(run()) == ["inside", "outside"]
