"""The garbage collector must not look through the engine's memory during a step.

Its settings belong to the whole process, so this is for processes of our own (`headway serve`'s engine, `headway bench`
and the like), and never for a program that uses `LLM`.
"""

from __future__ import annotations

import atexit
import gc

_YOUNG_OBJECTS = 50_000
"""So many new containers before it looks at any. A step makes some thousand, nearly all of which die by themselves."""


def spare_the_collector() -> None:
    """What is loaded now stays and need not be looked at again; what is new is looked at seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.unfreeze)  # extension modules that count what is left at the end would call it leaked
