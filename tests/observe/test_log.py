from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from pdserve.observe import log

logger = logging.getLogger("pdserve.under.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """A stream for `configure`; what it changed is put back."""
    root, ours = logging.getLogger(), logging.getLogger("pdserve")
    before = (list(root.handlers), root.level, ours.level)
    yield io.StringIO()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_json_lines_carry_the_request(lines: io.StringIO) -> None:
    log.configure("info", "json", node="d1", stream=lines)
    with log.logged("chatcmpl-1"):
        logger.info("moved %d pages", 3, extra={"fields": {"peer": "p1", "bytes": 12}})
    logger.debug("not wanted")
    (line,) = lines.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time") > 0
    assert entry == {
        "level": "info",
        "logger": "pdserve.under.test",
        "message": "moved 3 pages",
        "node": "d1",
        "peer": "p1",
        "bytes": 12,
        "request_id": "chatcmpl-1",
    }


def test_text_lines_carry_the_request(lines: io.StringIO) -> None:
    log.configure("debug", "text", node="d1", stream=lines)
    with log.logged("chatcmpl-1"):
        logger.debug("hello", extra={"fields": {"peer": "p1"}})
    line = lines.getvalue()
    assert line.endswith("DEBUG   pdserve.under.test [d1] hello peer=p1 request_id=chatcmpl-1\n")


@pytest.mark.parametrize("form", log.FORMATS)
def test_a_client_cannot_forge_a_line(lines: io.StringIO, form: str) -> None:
    log.configure("info", form, stream=lines)
    logger.info("path %s", "/x\n2026-01-01 ERROR forged\x1b[2J", extra={"fields": {"a": "b\nc"}})
    assert len(lines.getvalue().splitlines()) == 1
    assert "\x1b" not in lines.getvalue()


@pytest.mark.parametrize("form", log.FORMATS)
def test_a_long_message_is_cut(lines: io.StringIO, form: str) -> None:
    log.configure("info", form, stream=lines)
    logger.info("x" * 1_000_000)
    assert 8192 < len(lines.getvalue()) < 9000


@pytest.mark.parametrize("form", log.FORMATS)
def test_an_exception_is_shown(lines: io.StringIO, form: str) -> None:
    log.configure("info", form, stream=lines)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    assert "ValueError: broken" in lines.getvalue()


async def test_tasks_know_the_request_they_were_started_for(lines: io.StringIO) -> None:
    log.configure("info", "json", stream=lines)

    async def work() -> None:
        logger.info("working")

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            with log.logged(name):
                group.create_task(work())
    assert [json.loads(line)["request_id"] for line in lines.getvalue().splitlines()] == ["a", "b"]
    assert log.request_id.get() is None


def test_libraries_are_heard_from_warning_up(lines: io.StringIO) -> None:
    log.configure("debug", "text", stream=lines)
    logging.getLogger("aiohttp.server").info("chatter")
    logging.getLogger("aiohttp.server").warning("trouble")
    assert "chatter" not in lines.getvalue()
    assert "trouble" in lines.getvalue()


@pytest.mark.parametrize(("level", "form"), [("loud", "text"), ("info", "xml")])
def test_unknown_settings_are_refused(level: str, form: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        log.configure(level, form)
