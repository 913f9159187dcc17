"""The switch file's watch: whatever is in the file, the next change is looked at again."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import pytest

from firsttoken_runtime.api import server as server_module
from firsttoken_runtime.api.errors import ApiError
from firsttoken_runtime.api.server import Server
from firsttoken_runtime.api.service import StaleGeneration


class Switches:
    """Is offered messages; `error` is raised at the next one."""

    def __init__(self) -> None:
        self.offered: asyncio.Queue[int] = asyncio.Queue()
        self.error: Exception | None = None

    async def set_switches(self, message):
        self.offered.put_nowait(message.generation)
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def next(self) -> int:
        async with asyncio.timeout(5):
            return await self.offered.get()


@pytest.fixture
async def switches(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.001)
    found = Switches()
    server = Server(Mock(), Mock(), Mock(), Mock(), Mock(), 0.0)
    server._service = found
    task = asyncio.create_task(server._watch_switches(tmp_path / "switches.json"))
    yield found
    task.cancel()


@pytest.fixture
def write(tmp_path):
    def write(generation: int) -> None:
        (tmp_path / "switches.json").write_text(json.dumps({"generation": generation, "switches": {}}))

    return write


@pytest.mark.parametrize("error", [StaleGeneration("older than 3", 3), RuntimeError("nobody foresaw this")])
async def test_a_content_that_is_not_taken_does_not_end_the_watch(switches, write, error):
    switches.error = error
    write(1)
    assert await switches.next() == 1
    write(2)
    assert await switches.next() == 2


async def test_a_content_that_a_busy_engine_did_not_take_is_offered_again(switches, write):
    switches.error = ApiError(503, "busy", code="engine_busy")
    write(1)
    assert [await switches.next(), await switches.next()] == [1, 1]
