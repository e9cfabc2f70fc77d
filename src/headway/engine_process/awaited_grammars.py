"""Requests that wait for their grammar, which is compiled in threads beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from headway.sampling_params import SamplingParams
from headway.structured.compiling import Compiled
from headway.structured.guides import Guides
from headway.wire.messages import AddRequest


class AwaitedGrammars:
    """Belongs to one loop."""

    def __init__(self, guides: Guides, *, on_done: Callable[[], None]) -> None:
        """`on_done` is called, in any thread, when there is something to take."""
        self._guides = guides
        self._on_done = on_done
        self._jobs: list[tuple[AddRequest, Future[Compiled]]] = []
        self._is_prepared = False  # whether the first grammar need not wait for the tokenizer's trie

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def request_ids(self) -> list[str]:
        """The requests that wait."""
        return [request.request_id for request, _ in self._jobs]

    def prepare(self) -> None:
        """Takes half a second and Python's lock, so it is done while nothing runs, or at the first grammar."""
        if not self._is_prepared:
            self._is_prepared = True
            self._guides.prepare()

    def add(self, request: AddRequest, params: SamplingParams) -> None:
        """Have a request's grammar compiled. Raises `InvalidRequestError` if that cannot be."""
        self.prepare()
        job = self._guides.compile(params)
        self._jobs.append((request, job))
        job.add_done_callback(lambda _: self._on_done())

    def take_done(self) -> list[tuple[AddRequest, BaseException | None]]:
        """Requests that wait no longer, each with what is wrong with its grammar, if anything is."""
        done = [(request, job.exception()) for request, job in self._jobs if job.done()]
        self._jobs = [(request, job) for request, job in self._jobs if not job.done()]
        return done

    def drop(self, request_ids: Collection[str]) -> None:
        """Requests are not wanted any more. A grammar for which none waits is not compiled, unless that has begun."""
        given_up = [job for request, job in self._jobs if request.request_id in request_ids]
        self._jobs = [(request, job) for request, job in self._jobs if request.request_id not in request_ids]
        wanted = {id(job) for _, job in self._jobs}
        for job in given_up:
            if id(job) not in wanted:
                job.cancel()
