"""Brings a model of the hub into the cache: what is missing, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from headway.errors import CorruptModelError, ModelNotFoundError
from headway.loader.folder_files import INDEX_NAME, has_tokenizer
from headway.loader.hub.cache import CachedModel, HubFile
from headway.loader.hub.choice import Choice, choose
from headway.loader.hub.download import ByteCount, Download
from headway.loader.hub.hub import Hub, Listing
from headway.loader.hub.model_id import HubModel
from headway.progress import Meter, meter

Show = Callable[[int], AbstractContextManager[Meter]]
"""Shows the progress of work on this many bytes."""


@dataclass(frozen=True)
class Pulled:
    """A model that is here whole."""

    path: Path
    """Its folder, or its GGUF file."""
    commit: str
    num_files: int
    num_bytes: int
    fetched_bytes: int = 0
    """Bytes of files that were missing or damaged."""
    damaged: tuple[str, ...] = ()
    """The names of files that were here with a wrong content, and were fetched again."""


class Pulling:
    """Brings one model, at the commit that its revision has now."""

    def __init__(self, hub: Hub, model: HubModel, load_format: str) -> None:
        self._hub, self._model = hub, model
        self._cached = CachedModel(hub.cache, model.repo)
        self._listing: Listing = hub.listing(model)
        sizes = {name: file.size for name, file in self._listing.files.items()}
        self._choice = choose(model, self._listing.files, load_format, sizes)

    def run(self, *, show: Show, show_check: Show | None, on_wait: Callable[[], object]) -> Pulled:
        """Fetch what is missing; with `show_check` also check the content of all that is here. `on_wait` is called if
        another process is fetching this model."""
        commit, cached = self._listing.commit, self._cached
        with cached.held(on_wait):
            for file in self._listing.files.values():
                cached.link(commit, file)
            small = self._named(self._choice.small)
            damaged = [] if show_check is None else self._drop_damaged(small, unshown)
            self._fetch([file for file in small if file.name == INDEX_NAME], (), unshown)
            weights = self._named(self._choice.weights(cached.snapshot(commit)))
            damaged += [] if show_check is None else self._drop_damaged(weights, show_check)
            fetched_bytes = self._fetch(small, weights, show)
            cached.note(self._model.revision, commit)
        return Pulled(
            path=model_path(cached, commit, self._choice),
            commit=commit,
            num_files=len(small) + len(weights),
            num_bytes=sum(file.size for file in (*small, *weights)),
            fetched_bytes=fetched_bytes,
            damaged=tuple(damaged),
        )

    def _drop_damaged(self, files: Sequence[HubFile], show: Show) -> list[str]:
        damaged = damaged_files(self._cached, self._listing.commit, files, show)
        for file in damaged:
            self._cached.drop(self._listing.commit, file)
        return [file.name for file in damaged]

    def _named(self, names: Iterable[str]) -> list[HubFile]:
        files, listed = list(names), self._listing.files
        absent = [name for name in files if name not in listed]
        if absent:
            raise CorruptModelError(
                f"{self._model.repo} is incomplete on the hub: {INDEX_NAME} lists {absent[0]}, which is not there; "
                "choose another revision"
            )
        return [listed[name] for name in files]

    def _fetch(self, small: Sequence[HubFile], weights: Sequence[HubFile], show: Show) -> int:
        """Fetch what is missing of these files. Returns how many bytes the missing files have."""
        commit = self._listing.commit
        missing = [[file for file in some if not self._cached.has(commit, file)] for some in (small, weights)]
        num_bytes = sum(file.size for some in missing for file in some)
        if not any(missing):
            return 0
        self._check_room([*missing[0], *missing[1]])
        with show(num_bytes) as shown:
            count = ByteCount(shown, num_bytes)
            for some in missing:
                Download(self._hub, self._model, self._cached, commit, count).fetch(some)
        return num_bytes

    def _check_room(self, missing: Sequence[HubFile]) -> None:
        needed = sum(self._cached.missing_bytes(self._listing.commit, file) for file in missing)
        free = self._cached.free_bytes()
        if needed > free:
            raise ModelNotFoundError(
                f"{self._model} does not fit on the disk: {_gb(needed)} have to be fetched, and {_gb(free)} is free in "
                f"{self._cached.root}. Free some space, or choose another folder with the environment variable HF_HOME"
            )


@dataclass(frozen=True)
class KeptModel:
    """A model in the cache, with all its weights."""

    path: Path
    """Its folder, or its GGUF file."""
    commit: str
    names: tuple[str, ...]
    """Its files, as far as the cache tells."""
    has_tokenizer: bool
    """Whether it has a tokenizer. If not, only the hub can tell whether it should."""


def kept_model(cached: CachedModel, model: HubModel, load_format: str) -> KeptModel | None:
    """The model in the cache; `None` if its weights are not there, or not all of them."""
    commit = cached.commit(model.revision)
    names = [] if commit is None else cached.names(commit)
    if commit is None or not names:
        return None
    try:
        choice = choose(model, names, load_format)
        weights = choice.weights(cached.snapshot(commit))
    except (CorruptModelError, ModelNotFoundError):
        return None
    if not set(weights) <= set(names):
        return None
    return KeptModel(
        path=model_path(cached, commit, choice),
        commit=commit,
        names=(*choice.small, *weights),
        has_tokenizer=choice.is_gguf or has_tokenizer(choice.small),
    )


def check_kept(cached: CachedModel, model: HubModel, load_format: str, show_check: Show) -> Pulled | None:
    """Check the contents of a model in the cache, without asking the hub. `None`: it is not there whole. Raises
    `CorruptModelError` if a file is damaged."""
    kept = kept_model(cached, model, load_format)
    if kept is None:
        return None
    files = [file for name in kept.names if (file := cached.described(kept.commit, name)) is not None]
    damaged = damaged_files(cached, kept.commit, files, show_check)
    if damaged:
        raise CorruptModelError(
            f"{', '.join(file.name for file in damaged)} of {model.repo} is damaged in {cached.root}: its content has "
            f"another digest than the hub said. Run '{model.command}' with a network: it fetches such files again"
        )
    return Pulled(kept.path, kept.commit, len(kept.names), sum(file.size for file in files))


def damaged_files(cached: CachedModel, commit: str, files: Sequence[HubFile], show: Show) -> tuple[HubFile, ...]:
    """Those of the files that are here with another content than the hub describes."""
    here = [file for file in files if cached.has(commit, file)]
    num_bytes = sum(file.size for file in here)
    if not here:
        return ()
    with show(num_bytes) as shown:
        count = ByteCount(shown, num_bytes)
        return tuple(file for file in here if not cached.is_intact(commit, file, count.add))


def model_path(cached: CachedModel, commit: str, choice: Choice) -> Path:
    """A model's folder, or its GGUF file."""
    folder = cached.snapshot(commit)
    return folder.joinpath(*choice.known_weights or ()) if choice.is_gguf else folder


def unshown(num_bytes: int) -> AbstractContextManager[Meter]:
    """Shows nothing: for a few bytes."""
    return meter(num_bytes, "", is_shown=False)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
