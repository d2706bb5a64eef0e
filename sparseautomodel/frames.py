"""The constructors of modules that are running in this thread, as their frames show them."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any

from torch import nn

CONTRACT = ("init_weights", "reset_parameters", "_reset_parameters")
"""Methods by which a module gives its own tensors their initial values, the first it has counts."""


def constructors(frame: FrameType | None) -> Iterator[tuple[FrameType, nn.Module]]:
    """The constructors of modules that are running in this thread, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, nn.Module):
                yield frame, module
        frame = frame.f_back


def in_contract(frame: FrameType | None) -> bool:
    """Whether a method of initialization is running inside the innermost constructor."""
    while frame is not None and frame.f_code.co_name != "__init__":
        if frame.f_code.co_name in (*CONTRACT, "_init_weights"):
            return True
        frame = frame.f_back
    return False


def arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a running constructor was called with; None where it assigns to one of its arguments."""
    code, values = frame.f_code, frame.f_locals
    count, by_name_count = code.co_argcount, code.co_kwonlyargcount
    positional, by_name = code.co_varnames[1:count], code.co_varnames[count : count + by_name_count]
    rest = iter(code.co_varnames[count + by_name_count :])
    more = values[next(rest)] if code.co_flags & CO_VARARGS else ()
    named = values[next(rest)] if code.co_flags & CO_VARKEYWORDS else {}
    if _assigned(code) & {*positional, *by_name}:
        return None
    return (*(values[name] for name in positional), *more), {name: values[name] for name in by_name} | dict(named)


def _assigned(code: CodeType) -> set[Any]:
    found: set[Any] = set()
    for step in dis.get_instructions(code):
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_FAST")):
            found |= set(step.argval) if isinstance(step.argval, tuple) else {step.argval}
    return found
