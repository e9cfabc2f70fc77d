"""Makes Triton's interpreter several times faster for kernels that call other functions.

At every call of a function, not only at that of the kernel, the interpreter walks through all of the language to put
its own functions in place of the compiler's. Here it looks first whether they are there already. It also checks every
sum and product of integers for overflow, which takes a third of the time; a GPU does not, and the sizes of tests are
far from it. Both are of no effect where the interpreter is not the one that is known here.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_interpreter_quick() -> None:
    """For the rest of the process."""
    _replace_once()
    _trust_integers()


def _replace_once() -> None:
    replace_builtins = getattr(interpreter, "_patch_builtin", None)
    replace_language = getattr(interpreter, "_patch_lang", None)
    if replace_builtins is None or replace_language is None:
        return
    nothing_to_restore = getattr(interpreter, "_LangPatchScope", lambda: None)
    witness: dict[Any, str | None] = {}
    languages: dict[int, list[Any]] = {}

    def is_replaced(package: Any) -> bool:
        if package not in witness:
            builtin = (name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))
            witness[package] = next(builtin, None)
        name = witness[package]
        return name is not None and not tl.core.is_builtin(getattr(package, name))

    def replace_builtins_once(package: Any, *rest: Any) -> None:
        if not is_replaced(package):
            replace_builtins(package, *rest)

    def replace_language_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in languages:
            languages[id(names)] = [module for module in names.values() if module is tl or module is tl.core]
        seen = languages[id(names)]
        return nothing_to_restore() if seen and all(map(is_replaced, seen)) else replace_language(fn)

    interpreter._patch_builtin = replace_builtins_once
    interpreter._patch_lang = replace_language_once


def _trust_integers() -> None:
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
