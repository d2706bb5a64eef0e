"""The constructors of modules that are running in this thread, as their frames show them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
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


def contract_method(module: nn.Module) -> Callable[[], Any] | None:
    """The method by which a module gives its own tensors their values; None where it has none without arguments."""
    for name in CONTRACT:
        found = getattr(module, name, None)
        if callable(found) and required_arguments(found) == 0:
            return found
    return None


def required_arguments(method: Callable[..., Any]) -> int:
    """How many arguments a method must be given."""
    required = [
        one
        for one in inspect.signature(method).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return len(required)


def in_contract(frame: FrameType | None) -> bool:
    """Whether a method of initialization is running inside the innermost constructor, as it can be run again."""
    outermost = None
    while frame is not None and frame.f_code.co_name != "__init__":
        if frame.f_code.co_name in (*CONTRACT, "_init_weights"):
            outermost = frame
        frame = frame.f_back
    return outermost is not None and _is_repeatable(outermost)


def _is_repeatable(frame: FrameType) -> bool:
    """Whether a method of initialization is the one that its module has, and was called without arguments."""
    code, values = frame.f_code, frame.f_locals
    module = values.get(code.co_varnames[0]) if code.co_argcount else None
    if code.co_name == "_init_weights" or not isinstance(module, nn.Module):
        return True
    method = contract_method(module)
    if method is None or getattr(method, "__name__", "") != code.co_name:
        return False
    defaults = {name: one.default for name, one in inspect.signature(method).parameters.items()}
    return all(values.get(name, default) is default for name, default in defaults.items() if name in code.co_varnames)


def line(frame: FrameType | None) -> str:
    """File and line of the code that is running, outside of torch and of this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"


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
