"""Desk socket: how `workbench receipt` in one terminal reaches `workbench serve` in another.

    server: a Unix socket, mode 0600, in a new directory of mode 0700; its path stands in the run's status
    client: one JSON line ──▶   ◀── {"ok": …} or {"error": message, "exit_code": n}, one line, and the end

Why a socket and no token: whoever may open it is decided by the file system, so there is no secret that could end up in
a run directory, a log or a notebook. Its directory is temporary because a socket's path may have 107 bytes only.
Not here: what is asked (desk).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from workbench.errors import DeadlineExceeded, RunStoreError, WorkbenchError
from workbench.places import make_serve_directory

LONGEST_LINE = 4 * 2**20
CONNECT_TIMEOUT_S = 5.0

Handle = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[Path]:
    """Answer requests with what `handle` returns, or with the line of the WorkbenchError that it raises."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await _answer(handle, await reader.readline())
            writer.write(orjson.dumps(answer) + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError):
            return  # the asker left, or sent a line beyond the limit: nobody is there to be told
        finally:
            writer.close()

    directory = make_serve_directory()
    try:
        path = directory / "desk"
        server = await asyncio.start_unix_server(serve, path, limit=LONGEST_LINE)
        os.chmod(path, 0o600)
        try:
            yield path
        finally:
            server.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _answer(handle: Handle, line: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(line)
        if not isinstance(request, dict):
            raise RunStoreError(f"Expected one JSON object, got {type(request).__name__}.")
        return {"ok": await handle(request)}
    except orjson.JSONDecodeError as error:
        return {"error": f"Expected one JSON line: {error}", "exit_code": 1}
    except WorkbenchError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        return {"error": f"The server failed: {type(error).__name__}: {error}", "exit_code": 1}


def ask(path: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send one request and return its answer. Blocks.

    Raises ConnectionError where nobody listens (any more), DeadlineExceeded after `timeout_s`, and the server's own
    refusal as a WorkbenchError with its exit code.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(min(CONNECT_TIMEOUT_S, timeout_s))
            connection.connect(path)
            connection.sendall(orjson.dumps(request) + b"\n")
            received = b""
            while not received.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = connection.recv(1 << 16)
                if not chunk:
                    raise ConnectionResetError("the server closed the connection before it answered")
                received += chunk
        except TimeoutError:
            raise DeadlineExceeded(f"The server did not answer within {timeout_s:g} s; see its terminal.") from None
        except OSError as error:
            raise ConnectionError(str(error)) from error
    answer = orjson.loads(received)
    if "ok" in answer:
        return answer["ok"]
    refused = WorkbenchError(str(answer.get("error")))
    refused.exit_code = int(answer.get("exit_code", 1))
    raise refused
