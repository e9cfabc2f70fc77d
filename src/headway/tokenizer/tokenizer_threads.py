"""Threads for tokenising beside an event loop: a long prompt takes a second, and the loop goes on meanwhile.

up to 256 characters     on the spot: some tenths of a millisecond, less than it takes to change threads twice
up to 16,384 characters  `num_threads` threads
more                     one thread, so that ordinary prompts never wait behind a long text
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SHORT_CHARS = 256
"""Up to this size, text is tokenised on the spot. That takes 0.2 ms, and 0.6 ms where every character is a token."""
LONG_CHARS = 16_384
"""Beyond this size, text is tokenised by a thread that does nothing else."""

_T = TypeVar("_T")


class TokenizerThreads:
    """Runs functions where they hold up others least."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._thread_for_long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def run(self, work: Callable[[], _T], *, num_chars: int) -> _T:
        """What `work` returns. It takes as long as to tokenise `num_chars` characters."""
        if num_chars <= SHORT_CHARS:
            return work()
        threads = self._threads if num_chars <= LONG_CHARS else self._thread_for_long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Take no more work. Can be called again."""
        for threads in (self._threads, self._thread_for_long):
            threads.shutdown(wait=False, cancel_futures=True)
