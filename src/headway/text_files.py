"""Small text files that an operator names: options, keys, service classes, chat templates."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

from headway.errors import ConfigError


def read_small_text(path: str | os.PathLike[str], *, most_bytes: int = 2**20) -> str:
    """The file's text, which is UTF-8. No more than `most_bytes` are read, whatever the file is. Raises `ConfigError`
    with a sentence about the file that does not name it."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):  # Windows and some file systems open folders
                raise IsADirectoryError
            content = file.read(most_bytes + 1)
    except IsADirectoryError:
        raise ConfigError("the file cannot be read: it is a folder.") from None
    except (OSError, ValueError) as error:  # ValueError: the name has a NUL
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"the file cannot be read: {reason}.") from None
    if len(content) > most_bytes:
        raise ConfigError(f"the file cannot be read: it has more than {most_bytes:,} bytes.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file cannot be read: it is not UTF-8 text (byte {error.start:,}).") from None


def read_decoded(
    path: str | os.PathLike[str], decode: Callable[[str], Any], kind: str, *, most_bytes: int = 2**20
) -> Any:
    """What `decode` makes of the file's text. `kind` names the format in the error about a file that has another."""
    text = read_small_text(path, most_bytes=most_bytes)
    try:
        return decode(text)
    except RecursionError:
        raise ConfigError("it is nested too deeply.") from None
    except ValueError as error:
        raise ConfigError(f"it is not valid {kind}: {error}") from None
