"""A rank in a separate process: `python -m headway.worker.rank_process CONNECTION LIFE PARENT`, started by rank 0.

CONNECTION and LIFE are inherited sockets. PARENT is the process of rank 0, and this process ends with it. Data from
CONNECTION is unpickled, which is safe because only rank 0 has its other end.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from headway.child_process import end_with_parent, show_logs, show_stacks_on_signal
from headway.errors import HeadwayError
from headway.worker.rank_life import show_life

if TYPE_CHECKING:
    from headway.worker.rank_start import RankStart

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve as a rank until rank 0 says that this is the end. Returns the exit status."""
    connection_fd, life_fd, parent_pid = map(int, sys.argv[1:4])
    end_with_parent(parent_pid)
    show_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0 too, which knows what is to be done
    for fd in (connection_fd, life_fd):
        os.set_inheritable(fd, False)
    threading.Thread(target=show_life, args=(socket.socket(fileno=life_fd),), name="life", daemon=True).start()
    from headway.worker.rank import Signal, serve  # brings torch, during which there are signs of life already

    connection = Connection(connection_fd)
    start: RankStart = connection.recv()
    if start.slots >= 0:
        os.set_inheritable(start.slots, False)
    show_logs(start.log_level, f"rank {start.rank}: %(levelname)s %(message)s")
    connection.send(Signal.STARTED)
    try:
        serve(start, connection, None)
    except HeadwayError as error:
        logger.error("%s", error)
        return 1
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # rank 0 is gone
    except Exception:
        logger.exception("rank %d failed", start.rank)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
