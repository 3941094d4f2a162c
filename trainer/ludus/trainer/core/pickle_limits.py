"""Limits of the work that reading a pickle takes, checked before it is read.

A pickle can refer to an object again and again, so that a few bytes make an object whose hash or
comparison takes forever: a tuple of twice the same tuple, thirty times nested, has 2**30 items.
Here an object's **expanded size** counts each reference as a copy. Honest files stay far below
the limit, because they repeat only names and small values.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_SIZE_PER_BYTE = 16
"""Maximum expanded size of an object per byte of its pickle."""
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
"""Instructions that add to the object below their arguments."""


@dataclass(slots=True, eq=False)
class _Object:
    """An object on the stack of the unpickler."""

    size: int = 1
    is_referenced: bool = False


_MARK = _Object()


def check_pickle(content: bytes) -> None:
    """Check that a pickle's objects need no more memory and time than its length allows.

    Raises:
        ValueError: they need more, or the pickle is damaged.
    """
    try:
        _follow(content)
    except (IndexError, KeyError) as error:
        raise ValueError(f"it is damaged ({error!r})") from None


def _follow(content: bytes) -> None:
    """Follow the instructions of a pickle with the sizes of its objects instead of the objects."""
    stack: list[_Object] = []
    memo: dict[int, _Object] = {}
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "MARK":
            stack.append(_MARK)
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in _PUT:
            memo[_check_index(argument, content)] = stack[-1]
        elif opcode.name in _GET:
            stack.append(memo[int(str(argument))])
            stack[-1].is_referenced = True
        else:
            _apply(opcode, stack, _MAX_SIZE_PER_BYTE * len(content))


def _check_index(argument: object, content: bytes) -> int:
    """Return an index of the memo. The unpickler reserves memory up to the largest."""
    index = int(str(argument))
    if not 0 <= index <= len(content):
        raise ValueError(f"the index {index} is not that of an object")
    return index


def _apply(opcode: pickletools.OpcodeInfo, stack: list[_Object], max_size: int) -> None:
    """Replace the arguments of an instruction by its result."""
    size = 1 + sum(item.size for item in _pop_arguments(opcode, stack))
    if size > max_size:
        raise ValueError("its objects refer to each other too many times")
    if opcode.name not in _CHANGES:
        stack.extend(_Object(size) for _ in opcode.stack_after)
        return
    changed = stack[-1]
    if changed.is_referenced:
        raise ValueError("an object changes after another object refers to it")
    changed.size += size


def _pop_arguments(opcode: pickletools.OpcodeInfo, stack: list[_Object]) -> Iterator[_Object]:
    """Remove the arguments of an instruction, but not the object that it changes; return them."""
    num_single = len(opcode.stack_before) - (opcode.name in _CHANGES)
    if pickletools.markobject in opcode.stack_before:
        num_single -= len(opcode.stack_before) - opcode.stack_before.index(pickletools.markobject)
        while (item := stack.pop()) is not _MARK:
            yield item
    for _ in range(num_single):
        yield stack.pop()
