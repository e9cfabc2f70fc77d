"""Fetches files of the hub: several at once, continued after interruptions, checked, and counted for the display."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from headway.errors import CorruptModelError
from headway.loader.hub.cache import CachedModel, HubFile, chunks_of, digest_of
from headway.loader.hub.hub import Hub
from headway.loader.hub.model_id import HubModel
from headway.loader.hub.refusals import disk_refusal, is_connection_error
from headway.progress import Meter


@dataclass(frozen=True)
class Persistence:
    """How hard a file is tried for."""

    num_at_once: int = 4
    attempts_without_bytes: int = 5
    """Consecutive connections that may fail without a byte, before the download fails."""
    pause_s: float = 1.0
    """How long to wait after a failed connection: once, then twice as long as before."""
    num_tries: int = 2
    """How often a content that arrives with a wrong digest is fetched."""


PERSISTENCE = Persistence()


class ByteCount:
    """Counts bytes of several threads, and shows the sum."""

    def __init__(self, meter: Meter, total: int) -> None:
        self._meter, self._total = meter, total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes; a negative number if they have to come again."""
        with self._lock:
            self._done += num_bytes
            self._meter.at(self._done, self._total)


class Download:
    """The download of a model's files."""

    def __init__(
        self,
        hub: Hub,
        model: HubModel,
        cached: CachedModel,
        commit: str,
        count: ByteCount,
        *,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._hub, self._model, self._cached, self._commit = hub, model, cached, commit
        self._count = count
        self._is_over = threading.Event()
        self._pause = pause or self._is_over.wait

    def fetch(self, files: Sequence[HubFile]) -> None:
        """Fetch these files. Raises a `ModelError` for the first one that fails; what has arrived is kept."""
        contents = {file.digest: file for file in files}  # several files may have the same
        with ThreadPoolExecutor(PERSISTENCE.num_at_once, thread_name_prefix="download") as pool:
            running = [pool.submit(self._fetch, file) for file in contents.values()]
            try:
                for one in as_completed(running):
                    one.result()
            finally:  # an error, or an interruption by the user: the other threads stop at their next bytes
                self._is_over.set()
                pool.shutdown(cancel_futures=True)
        for file in files:
            self._cached.link(self._commit, file)

    def _fetch(self, file: HubFile) -> None:
        path = self._cached.partial(file)
        for _ in range(PERSISTENCE.num_tries):
            try:
                with ArrivingFile(path, file) as arriving:
                    self._count.add(arriving.num_bytes)
                    self._receive(arriving)
                if arriving.is_intact:
                    self._cached.keep(file)
                    return
                if self._is_over.is_set():
                    return
                self._count.add(-arriving.num_bytes)
                path.unlink()
            except OSError as error:
                raise disk_refusal(error, self._model, self._cached.root) from error
        raise CorruptModelError(
            f"{file.name} of {self._model.repo} arrives damaged: twice it had another digest than the hub says "
            f"({file.digest}). Nothing of it was kept. Something between here and the hub changes it, such as a proxy "
            "or a mirror (HF_ENDPOINT), or this machine's memory or disk is faulty"
        )

    def _receive(self, arriving: ArrivingFile) -> None:
        """Receive the rest of a file. A lost connection is made anew, and continues where it was lost."""
        num_failures = 0
        while not (arriving.is_whole or self._is_over.is_set()):
            before, failure = arriving.num_bytes, None
            try:
                self._receive_once(arriving)
            except Exception as error:  # those of the HTTP client, whichever it is, of the library, and of the disk
                if isinstance(error, OSError) and not hasattr(error, "response") and not is_connection_error(error):
                    raise
                failure = error
                if not is_connection_error(error):
                    raise self._hub.refusal(error, self._model) from error
            num_failures = 0 if arriving.num_bytes > before else num_failures + 1
            if num_failures == PERSISTENCE.attempts_without_bytes:
                lost = failure or ConnectionError("the hub ends its answers too early")
                raise self._hub.refusal(lost, self._model) from failure
            if num_failures:
                self._pause(PERSISTENCE.pause_s * 2 ** (num_failures - 1))

    def _receive_once(self, arriving: ArrivingFile) -> None:
        with self._hub.content(self._model, self._commit, arriving.file, arriving.num_bytes) as answer:
            if answer.start != arriving.num_bytes:
                self._count.add(-arriving.num_bytes)
                arriving.restart()
            for chunk in answer.chunks:
                arriving.write(chunk)
                self._count.add(len(chunk))
                if self._is_over.is_set() or arriving.num_bytes > arriving.file.size:
                    return


class ArrivingFile:
    """The content of a file as far as it has arrived, and its digest so far. A context: it is open for writing."""

    def __init__(self, path: Path, file: HubFile) -> None:
        self.file = file
        self.num_bytes = 0
        self._digest = digest_of(file)
        self._sink = path.open("ab")
        with path.open("rb") as begun:
            for chunk in chunks_of(begun):
                self._count(chunk)

    def __enter__(self) -> ArrivingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()

    @property
    def is_whole(self) -> bool:
        """Whether no byte is missing. There may be too many."""
        return self.num_bytes >= self.file.size

    @property
    def is_intact(self) -> bool:
        """Whether the content is the one that the hub describes."""
        return self.num_bytes == self.file.size and self._digest.hexdigest() == self.file.digest

    def write(self, chunk: bytes) -> None:
        """Append bytes. They stay if the process is killed."""
        self._sink.write(chunk)
        self._sink.flush()
        self._count(chunk)

    def restart(self) -> None:
        """Drop what has arrived."""
        self._sink.truncate(0)
        self.num_bytes, self._digest = 0, digest_of(self.file)

    def _count(self, chunk: bytes) -> None:
        self.num_bytes += len(chunk)
        self._digest.update(chunk)
