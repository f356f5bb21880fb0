"""The process: ``python -m rlrecipes.engines.embedded.server --model-path DIR --host H --port P``.

Owns start and exit codes. A start that cannot succeed ends with one line on stderr and code 1 (2 for the command line);
SIGTERM and SIGINT end it with code 0. What can be wrong without torch is found before torch is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence

from rlrecipes.engines.embedded.architecture import read_architecture
from rlrecipes.engines.embedded.arguments import parse_arguments
from rlrecipes.errors import EngineError, RecipeError


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow happens.

    Raises:
        EngineError: it is taken, or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise EngineError("--port", f"cannot listen on {host}:{port}: {error.strerror}", "choose a free port") from None
    return listener


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """The router first tries HTTP/2, which is refused; aiohttp tells that with a traceback each time."""
    return record.exc_info is None or getattr(record.exc_info[0], "__name__", "") != "BadHttpMessage"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.server").addFilter(_is_worth_telling)
    try:
        with bind(arguments.host, arguments.port) as listener:
            read_architecture(arguments.model_path)
            from rlrecipes.engines.embedded.application import run_server

            asyncio.run(run_server(arguments, listener))
    except RecipeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # gloo groups and worker threads may still be waiting for a trainer that is gone
