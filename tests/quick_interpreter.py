"""Makes Triton's interpreter several times faster for kernels that call other functions.

At every call of a function, not only at that of the kernel, the interpreter walks through all of the language to put
its own functions in place of the compiler's. Here it looks first whether they are there already. It also checks every
sum and product of integers for overflow, which takes a third of the time; a GPU does not, and the sizes of tests are
far from it. And it describes the type and the shape of every value anew, although there are few of them. All of this
has no effect where the interpreter is not the one that is known here.
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
    _describe_types_once()
    _describe_shapes_once()


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


def _describe_types_once() -> None:
    """The type of numpy for each type of Triton, and the size and the name of each type of blocks."""
    describe = getattr(interpreter, "_get_np_dtype", None)
    if describe is not None:
        known_dtypes: dict[Any, Any] = {}

        def numpy_dtype(dtype: Any) -> Any:
            element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
            if isinstance(element, tl.pointer_type):
                return describe(element)
            if element not in known_dtypes:
                known_dtypes[element] = describe(element)
            return known_dtypes[element]

        interpreter._get_np_dtype = numpy_dtype

    make = tl.block_type.__init__
    known_blocks: dict[Any, dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (str(element_ty), *sizes)
        if key not in known_blocks:
            make(self, element_ty, shape)
            known_blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(known_blocks[key], element_ty=element_ty)

    tl.block_type.__init__ = make_block_type


def _describe_shapes_once() -> None:
    """Of tensors, as Triton's constants."""
    make = tl.tensor.__init__
    known: dict[Any, Any] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = (self.shape, self.numel)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[sizes]

    tl.tensor.__init__ = make_tensor
