"""One HTTP exchange with a server or router. Owns how a failed exchange is worded; refuses to know any endpoint."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from rlrecipes.errors import EngineError, RunError

_MAX_MESSAGE_CHARACTERS = 500
_LOG = "look at the server's log in <run_dir>/logs"
JSON_HEADERS = {"Content-Type": "application/json"}


def to_message(body: bytes) -> str:
    """What a server says in an error body, whichever of its shapes it takes.

    Args:
        body: of the answer: ``{"error": {"message": ...}}``, ``{"message": ...}``, ``{"detail": ...}`` or text.
    """
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:_MAX_MESSAGE_CHARACTERS] or "(no message)"
    if isinstance(content, dict):
        content = content.get("error") or content.get("message") or content.get("detail") or content
        if isinstance(content, dict):
            content = content.get("message", content)
    return str(content)[:_MAX_MESSAGE_CHARACTERS]


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    path: str,
    body: object = None,
    *,
    error_type: type[RunError] = EngineError,
) -> tuple[int, bytes]:
    """Send one request and read its answer, whatever its status.

    Args:
        session: open.
        method: ``GET`` or ``POST``.
        url: of the server, without a path.
        path: of the endpoint.
        body: sent as JSON; None sends none.
        error_type: of the failure.

    Returns:
        Status and body.

    Raises:
        RunError: of ``error_type``, when there is no answer at all.
    """
    data = None if body is None else orjson.dumps(body)
    headers = None if body is None else JSON_HEADERS
    try:
        async with session.request(method, url + path, data=data, headers=headers) as response:
            return response.status, await response.read()
    except TimeoutError as error:
        raise error_type(f"engine {url}", f"{path} had no answer within {session.timeout.total:g} s", _LOG) from error
    except aiohttp.ClientError as error:
        problem = f"{path} could not be reached: {error or type(error).__name__}"
        raise error_type(f"engine {url}", problem, f"the server may have died: {_LOG}") from error


def refuse(url: str, path: str, status: int, body: bytes, error_type: type[RunError] = EngineError) -> RunError:
    """The error for an answer that says no.

    Args:
        url: of the server.
        path: of the endpoint.
        status: of the answer.
        body: of the answer.
        error_type: of the failure.
    """
    return error_type(f"engine {url}", f"{path} answered {status}: {to_message(body)}", _LOG)


def to_weight_version(stated: str) -> int:
    """The number behind what a server states; SGLang calls weights it loaded at start ``default``, counted as 0."""
    return 0 if stated == "default" else int(stated)
