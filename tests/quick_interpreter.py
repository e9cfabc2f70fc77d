"""Makes Triton's interpreter several times faster for kernels that call other functions.

At every call of a function, not only at that of the kernel, the interpreter walks through all of the language to put
its own functions in place of the compiler's. Here it looks first whether they are there already, and knows which. It
also checks every sum and product of integers for overflow, which takes a third of the time; a GPU does not, and the
sizes of tests are far from it. It describes the type of every value anew, although there are few of them. And it finds
out again and again what comes of an operation on values of such types: here it does so once for each pair of types, and
the next time numpy operates on the numbers at once. All of this has no effect where the interpreter is not the one that
is known here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def make_interpreter_quick() -> None:
    """For the rest of the process."""
    _replace_once()
    _trust_integers()
    _describe_types_once()
    _operate_on_arrays()


def _replace_once() -> None:
    replace_builtins = getattr(interpreter, "_patch_builtin", None)
    replace_language = getattr(interpreter, "_patch_lang", None)
    if replace_builtins is None or replace_language is None:
        return
    nothing_to_restore = getattr(interpreter, "_LangPatchScope", lambda: None)
    witness: dict[Any, str | None] = {}
    replacements: dict[Any, list[tuple[str, Any]]] = {}
    languages: dict[int, list[Any]] = {}

    def is_replaced(package: Any) -> bool:
        if package not in witness:
            builtin = (name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))
            witness[package] = next(builtin, None)
        name = witness[package]
        return name is not None and not tl.core.is_builtin(getattr(package, name))

    def replace_builtins_once(package: Any, builder: Any, *scope: Any) -> None:
        if is_replaced(package):
            return
        if package in replacements and scope:
            for name, member in replacements[package]:
                scope[0].set_attr(package, name, member)
            return
        names = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        replace_builtins(package, builder, *scope)
        replacements[package] = [(name, getattr(package, name)) for name in names]

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


def _divided(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


_ON_INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": _divided,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
_ON_FLOATS: dict[str, Callable[[Any, Any], Any]] = {"truediv": np.divide}
_ON_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_OPERATIONS = {
    **{np.dtype(name): _ON_NUMBERS | _ON_INTEGERS for name in ("int32", "uint32", "int64", "uint64")},
    **{np.dtype(name): _ON_NUMBERS | _ON_FLOATS for name in ("float32", "float64")},
    np.dtype(bool): {name: _ON_INTEGERS[name] for name in ("and", "or", "xor")},
}


class _Made:
    """A tensor that was made once: what others of the same type have like it, all but their numbers."""

    def __init__(self, tensor: Any) -> None:
        self.attributes = {name: value for name, value in vars(tensor).items() if name != "handle"}
        self.handle_dtype = tensor.handle.dtype
        self.dtype = tensor.handle.data.dtype

    def of(self, data: Any) -> Any:
        tensor = object.__new__(tl.tensor)
        tensor.__dict__.update(self.attributes, handle=interpreter.TensorHandle(data, self.handle_dtype))
        return tensor


def _operate_on_arrays() -> None:
    patch = getattr(interpreter, "_patch_attr", None)
    if patch is None:
        return
    quick: dict[str, Callable[..., Any]] = {}
    known = {**_ON_NUMBERS, **_ON_INTEGERS, **_ON_FLOATS}

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        patch(obj, name, member, builder, scope)
        operation = name.strip("_")
        is_swapped = operation not in known and operation[1:] in known
        if obj is tl.tensor and name.startswith("__") and (is_swapped or operation in known):
            if name not in quick:
                quick[name] = _operator(operation[is_swapped:], getattr(obj, name), is_swapped=is_swapped)
            setattr(obj, name, quick[name])

    interpreter._patch_attr = patch_attr


def _operator(name: str, slow: Callable[..., Any], *, is_swapped: bool) -> Callable[..., Any]:
    """An operator that asks the interpreter only the first time for each pair of types."""
    known: dict[Any, _Made] = {}

    def computed(self: Any, other: Any) -> tuple[Any, Any]:
        """The types of the operands and numpy's result; nothing where it might not be the interpreter's."""
        data = self.handle.data
        if type(other) is tl.constexpr:
            other = other.value
        kind = type(other)
        if isinstance(self.dtype, tl.pointer_type):
            if name != "add" or kind is not tl.tensor or other.dtype.name not in ("int32", "int64"):
                return None, None
            num_bytes = np.uint64(max(1, self.dtype.element_ty.primitive_bitwidth // 8))
            return (self.type.name, other.type.name), data + num_bytes * other.handle.data.astype(np.uint64)
        operation = _OPERATIONS.get(data.dtype, {}).get(name)
        if operation is None:
            return None, None
        if kind is tl.tensor:
            if other.dtype.name != self.dtype.name or other.handle.data.dtype != data.dtype:
                return None, None
            key, other = (self.type.name, other.type.name), other.handle.data
        elif (kind is int and data.dtype.kind in "iu" and 0 <= other < 2**31) or (
            kind in (int, float) and data.dtype.kind == "f"
        ):
            key, other = (self.type.name, kind), data.dtype.type(other)
        else:
            return None, None
        return key, operation(other, data) if is_swapped else operation(data, other)

    def operate(self: Any, other: Any, *rest: Any, **more: Any) -> Any:
        key, data = computed(self, other)
        made = known.get(key)
        if made is not None and made.dtype == data.dtype:
            return made.of(data)
        found = slow(self, other, *rest, **more)
        if key is not None:
            known[key] = _Made(found)
        return found

    return operate
