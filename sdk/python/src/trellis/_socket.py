"""Where the daemon's socket is, and a connection to it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import Optional

from ._errors import ConnectError, NotRunningError, TimedOutError

#: The socket of the daemon that serves the whole machine.
SYSTEM_SOCKET = Path("/run/trellis/trellis.sock")

#: Where the environment names a socket.
SOCKET_VARIABLE = "TRELLIS_SOCKET"

# How long is waited before a line of connections that is full is tried again: at first, and at most.
_PAUSE_S, _PAUSE_MAX_S = 0.001, 0.05


def user_socket(runtime_dir: Optional[str], login_dir: Path) -> Optional[Path]:
    """The socket of the user's own daemon: in the runtime directory, or in the folder that a login made.

    Relative paths are ignored, as the XDG specification asks.
    """
    if runtime_dir and os.path.isabs(runtime_dir):
        return Path(runtime_dir) / "trellis/trellis.sock"
    return login_dir / "trellis/trellis.sock" if login_dir.is_dir() else None


def candidates() -> list[Path]:
    """The sockets on which a client looks for a daemon, in that order.

    That of ``TRELLIS_SOCKET`` alone where it is set, or else the user's own and the machine's.
    """
    told = os.environ.get(SOCKET_VARIABLE)
    if told:
        return [Path(told)]
    own = user_socket(os.environ.get("XDG_RUNTIME_DIR"), Path(f"/run/user/{os.geteuid()}"))
    return [SYSTEM_SOCKET] if own is None else [own, SYSTEM_SOCKET]


async def open_first(paths: list[Path], timeout: Optional[float]) -> tuple[Path, socket.socket]:
    """A connection to the first of these sockets on which anybody listens.

    `NotRunningError` where there is none, `ConnectError` where this user may not use one, `TimedOutError` where so many wait to be
    let in that there is no room within so many seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    if not hasattr(socket, "AF_UNIX"):
        raise ConnectError(str(paths[0]), OSError(f"{sys.platform} has no Unix domain sockets"))
    tried: list[tuple[str, OSError]] = []
    for path in paths:
        try:
            return path, await _open(path, end)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            tried.append((str(path), error))
        except TimedOutError as error:
            raise TimedOutError(f"a place at {path}", timeout or 0.0) from error
        except OSError as error:
            raise ConnectError(str(path), error) from error
    raise NotRunningError(tried)


async def _open(path: Path, end: Optional[float]) -> socket.socket:
    pause = _PAUSE_S
    while True:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.setblocking(False)
        try:
            opened.connect(str(path))
            return opened
        except BlockingIOError:
            # As many wait to be let in as may; who does not block is not told when there is room.
            opened.close()
        except BaseException:
            opened.close()
            raise
        if end is not None and time.monotonic() + pause > end:
            raise TimedOutError("a place", 0.0)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX_S)
