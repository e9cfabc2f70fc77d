"""Imported by every Python process of a server under drill: a real-time signal makes its main thread stand still.

In the front end that thread is the event loop's, so this is the fault that `event_loop_stalls_total` counts.
"""

import signal
import time

STALL_S = 3.0


def _stall(number: int, frame: object) -> None:
    time.sleep(STALL_S)


signal.signal(signal.SIGRTMIN, _stall)
