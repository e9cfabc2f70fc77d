"""Requests that wait for their grammar, which threads compile while steps run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from headway.sampling_params import SamplingParams
from headway.structured.compiling import Compiled
from headway.structured.guides import Guides
from headway.wire.messages import AddRequest


class AwaitedGrammars:
    """The waiting requests of one `EngineLoop`."""

    def __init__(self, guides: Guides, *, on_done: Callable[[], None]) -> None:
        """`on_done` is called in any thread when `take_done` has something to return."""
        self._guides = guides
        self._on_done = on_done
        self._jobs: list[tuple[AddRequest, Future[Compiled]]] = []
        self._is_prepared = False  # whether the first grammar need not wait for the tokenizer's trie

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def request_ids(self) -> list[str]:
        """The ids of the waiting requests."""
        return [request.request_id for request, _ in self._jobs]

    def prepare(self) -> None:
        """Prepare the tokenizer's trie. It takes half a second and Python's lock, so it is done while nothing runs, or
        at the first grammar."""
        if not self._is_prepared:
            self._is_prepared = True
            self._guides.prepare()

    def add(self, request: AddRequest, params: SamplingParams) -> None:
        """Start to compile a request's grammar. Raises `InvalidRequestError` if that is not possible."""
        self.prepare()
        job = self._guides.compile(params)
        self._jobs.append((request, job))
        job.add_done_callback(lambda _: self._on_done())

    def take_done(self) -> list[tuple[AddRequest, BaseException | None]]:
        """Return the requests whose grammar is done, each with the error of its grammar, if any."""
        done = [(request, job.exception()) for request, job in self._jobs if job.done()]
        self._jobs = [(request, job) for request, job in self._jobs if not job.done()]
        return done

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop requests that are not wanted any more. A grammar that no request waits for is not compiled, unless that
        has begun."""
        given_up = [job for request, job in self._jobs if request.request_id in request_ids]
        self._jobs = [(request, job) for request, job in self._jobs if request.request_id not in request_ids]
        wanted = {id(job) for _, job in self._jobs}
        for job in given_up:
            if id(job) not in wanted:
                job.cancel()
