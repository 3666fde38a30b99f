"""Reads the pickle of a ``.metadata`` into inert values; nothing of it is imported, called or hashed at length.

In: bytes that anybody may have written. Out: Python's own plain values, and in place of every class,
function and instance of the pickle an object that only keeps what the pickle says of it. Clients build
torch's objects from these (``pannier.client.loading.torch_metadata``); services look up names of files.

Python's own unpickler isn't used, not even with harmless classes: it reserves memory by numbers in the
pickle (``LONG_BINPUT``), and hashes nested tuples, which takes time exponential in the bytes. Here each
opcode takes time and memory in proportion to the bytes that it and its operands have. Any thread; CPU-bound.
"""

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from pannier.wire.errors import IntegrityError

_LONGEST_KEY: Final = 1 << 16
"""Characters of a key: keys with equal hashes are compared."""
_LARGEST_KEY: Final = 64
"""Values in a key that is a tuple, those of inner tuples included: each look-up hashes all of them."""
_LONGEST_NUMBER: Final = 16
"""Bytes of an integer: arithmetic with longer ones takes long."""

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from


_INSTANCE: Final = b"\x81\x94}\x94("
"""After EMPTY_TUPLE: NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK, as each instance begins. Together with the next one, they
are half of all opcodes, which are faster done at once."""
_CALLED_WITH_IT: Final = b"\x94\x85\x94R\x94"
"""After TUPLE2: MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE: a ``torch.Size`` of a matrix."""


class Named:
    """A class or function of the pickle, by its name."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __repr__(self) -> str:
        return f"{self.module:.200}.{self.name:.200}"


class Record(list[Any]):
    """An instance, or what a function of the pickle would have returned: class or function, arguments, state, items.

    A list, since millions are made, and that of a class of its own, which a pickle can't make.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    @property
    def cls(self) -> Named:
        """Its class, or the function."""
        return cast("Named", self[0])

    @property
    def args(self) -> tuple[Any, ...]:
        """What ``__new__`` or the function would have got."""
        return cast("tuple[Any, ...]", self[1])

    @property
    def state(self) -> Any:
        """What ``__setstate__`` or ``__dict__`` would have got; None: nothing."""
        return self[2]

    @property
    def items(self) -> Any:
        """Of one that behaves like a list, set or dict: what was put into it, as a list or dict; else None."""
        return self[3]

    def __repr__(self) -> str:
        return f"<{self.cls!r}>"


def read_pickle(
    content: bytes, where: str, check: Callable[[Named], None] = lambda named: None
) -> Any:
    """The value of a pickle of protocol 2 or newer; see the module.

    Args:
        content: the whole pickle.
        where: its name, for errors.
        check: called with each class and function, raises for those that the caller refuses.

    Raises IntegrityError when it is damaged, or has what no ``.metadata`` has.
    """
    try:
        with _without_collections():
            return _run(content, check)
    except (_MalformedError, IndexError, ValueError, TypeError, struct.error) as error:
        raise IntegrityError(f"{where} is damaged or no checkpoint's metadata: {error}") from error


class _MalformedError(Exception):
    pass


@contextmanager
def _without_collections() -> Iterator[None]:
    """Without automatic garbage collections, which take twice the time of all else: nothing here is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(data: bytes, check: Callable[[Named], None]) -> Any:
    # Opcodes in about the order of their frequency: a large checkpoint has ten millions of them.
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    push, pop = stack.append, stack.pop
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x6A:  # LONG_BINGET
            push(memo[_u32(data, at)[0]])
            at += 4
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x75:  # SETITEMS
            start = marks.pop()
            keys, values = stack[start::2], stack[start + 1 :: 2]
            del stack[start:]
            _set_items(stack[-1], keys, values)
        elif op == 0x62:  # BUILD
            state = pop()
            record = stack[-1]
            if type(record) is not Record or record[2] is not None:
                raise _MalformedError(f"the state of a {type(record).__name__} is set")
            record[2] = state
        elif op == 0x4A:  # BININT
            push(_i32(data, at)[0])
            at += 4
        elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE
            args = pop()
            push(_record(pop(), args))
        elif op == 0x29:  # EMPTY_TUPLE
            if data[at : at + 5] == _INSTANCE:
                state = {}
                record = _record(pop(), ())
                memo += (record, state)
                stack += (record, state)
                marks.append(len(stack))
                at += 5
            else:
                push(())
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            push(_u16(data, at)[0])
            at += 2
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            second = pop()
            value = (stack[-1], second)
            if data[at : at + 5] == _CALLED_WITH_IT:
                args = (value,)
                stack[-1:] = []
                record = _record(stack[-1], args)
                memo += (value, args, record)
                stack[-1] = record
                at += 5
            else:
                stack[-1] = value
        elif op == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif op == 0x8C:  # SHORT_BINUNICODE
            end = at + 1 + data[at]
            push(_text(data, at + 1, end))
            at = end
        elif op == 0x8A:  # LONG1
            end = at + 1 + data[at]
            push(_integer(data, at + 1, end))
            at = end
        elif op == 0x4E:  # NONE
            push(None)
        elif op == 0x71:  # BINPUT
            _put(memo, data[at], stack[-1])
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            _put(memo, _u32(data, at)[0], stack[-1])
            at += 4
        elif op == 0x65:  # APPENDS
            start = marks.pop()
            values = stack[start:]
            del stack[start:]
            _extend(stack[-1], values)
        elif op == 0x5D:  # EMPTY_LIST
            push([])
        elif op == 0x74:  # TUPLE
            start = marks.pop()
            stack[start:] = [tuple(stack[start:])]
        elif op == 0x58:  # BINUNICODE
            end = at + 4 + _u32(data, at)[0]
            push(_text(data, at + 4, end))
            at = end
        elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
            push(op == 0x88)
        elif op == 0x47:  # BINFLOAT
            push(_f64(data, at)[0])
            at += 8
        elif op == 0x93:  # STACK_GLOBAL
            name = pop()
            push(_named(pop(), name, check))
        elif op == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            end = data.index(b"\n", middle + 1)
            push(_named(_text(data, at, middle), _text(data, middle + 1, end), check))
            at = end + 1
        elif op == 0x73:  # SETITEM
            value = pop()
            key = pop()
            _set_items(stack[-1], [key], [value])
        elif op == 0x61:  # APPEND
            value = pop()
            _extend(stack[-1], [value])
        elif op == 0x92:  # NEWOBJ_EX
            named = pop()
            args = pop()
            push(_record(pop(), (args, named)))
        elif op in (0x43, 0x42, 0x8E, 0x96):  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
            begin, end = _bytes_at(data, op, at)
            push(_cut(data, begin, end))
            at = end
        elif op == 0x8D:  # BINUNICODE8
            end = at + 8 + _u64(data, at)[0]
            push(_text(data, at + 8, end))
            at = end
        elif op == 0x8B:  # LONG4
            end = at + 4 + _u32(data, at)[0]
            push(_integer(data, at + 4, end))
            at = end
        elif op == 0x8F:  # EMPTY_SET
            push(set())
        elif op == 0x90:  # ADDITEMS
            start = marks.pop()
            values = stack[start:]
            del stack[start:]
            _add(stack[-1], values)
        elif op == 0x91:  # FROZENSET
            start = marks.pop()
            values = stack[start:]
            for value in values:
                _check_key(value)
            stack[start:] = [frozenset(values)]
        elif op == 0x30:  # POP
            pop()
        elif op == 0x31:  # POP_MARK
            del stack[marks.pop() :]
        elif op == 0x32:  # DUP
            push(stack[-1])
        elif op == 0x80:  # PROTO
            if not 2 <= data[at] <= 5:
                raise _MalformedError(f"it is a pickle of protocol {data[at]}")
            at += 1
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x2E:  # STOP
            return pop()
        else:
            raise _MalformedError(f"opcode {op:#04x} at byte {at - 1}")


def _cut(data: bytes, start: int, end: int) -> bytes:
    """The bytes of an operand; no copy of more than there are is made."""
    if end > len(data):
        raise _MalformedError(f"it ends within {end - start} bytes at byte {start}")
    return data[start:end]


def _text(data: bytes, start: int, end: int) -> str:
    return str(_cut(data, start, end), "utf-8", "surrogatepass")


def _bytes_at(data: bytes, op: int, at: int) -> tuple[int, int]:
    """Where the bytes of a BINBYTES opcode begin and end."""
    if op == 0x43:
        return at + 1, at + 1 + data[at]
    if op == 0x42:
        return at + 4, at + 4 + _u32(data, at)[0]
    return at + 8, at + 8 + _u64(data, at)[0]


def _integer(data: bytes, start: int, end: int) -> int:
    if end - start > _LONGEST_NUMBER:
        raise _MalformedError(f"an integer of {end - start} bytes at byte {start}")
    return int.from_bytes(_cut(data, start, end), "little", signed=True)


def _put(memo: list[Any], number: int, value: Any) -> None:
    # Picklers number what they remember one after another, so the memo is never longer than the pickle.
    if number > len(memo):
        raise _MalformedError(f"memo {number} after {len(memo)}")
    if number == len(memo):
        memo.append(value)
    else:
        memo[number] = value


def _named(module: Any, name: Any, check: Callable[[Named], None]) -> Named:
    if type(module) is not str or type(name) is not str:
        raise _MalformedError("a class without a name")
    named = Named(module, name)
    check(named)
    return named


def _record(cls: Any, args: Any) -> Record:
    if type(cls) is not Named or type(args) is not tuple:
        raise _MalformedError(f"a {type(cls).__name__} is called")
    return Record((cls, args, None, None))


def _contents(target: Any, kind: type) -> Any:
    """The list or dict itself, or that of a record which behaves like one."""
    if type(target) is kind:
        return target
    if type(target) is not Record:
        raise _MalformedError(f"items are put into a {type(target).__name__}")
    if target[3] is None:
        target[3] = kind()
    if type(target[3]) is not kind:
        raise _MalformedError(f"items are put into {target!r} in two ways")
    return target[3]


def _set_items(target: Any, keys: list[Any], values: list[Any]) -> None:
    for key in keys:
        if type(key) is not str or len(key) > _LONGEST_KEY:
            _check_key(key)
    if len(keys) != len(values):
        raise _MalformedError("a key without a value")
    if type(target) is not dict:
        target = _contents(target, dict)
    target.update(zip(keys, values))  # noqa: B905 - of one length


def _extend(target: Any, values: list[Any]) -> None:
    _contents(target, list).extend(values)


def _add(target: Any, values: list[Any]) -> None:
    if type(target) is set:
        for value in values:
            _check_key(value)
        target.update(values)
    else:
        _extend(target, values)


def _check_key(key: Any) -> None:
    """Raises unless ``key`` is hashed, and compared with another one, in a short time."""
    left = _LARGEST_KEY
    queue = [key]
    while queue:
        each = queue.pop()
        kind = type(each)
        if kind is tuple or kind is frozenset:
            # Of a frozenset the items have been checked, when it was made.
            left -= 1 + len(each)
            if left >= 0 and kind is tuple:
                queue += each
        elif kind is str or kind is bytes:
            left -= 1 if len(each) <= _LONGEST_KEY else _LARGEST_KEY + 1
        elif kind in (int, float, bool, type(None), Named, Record):
            left -= 1
        else:
            raise _MalformedError(f"a {kind.__name__} is a key")
        if left < 0:
            raise _MalformedError("a key is too long")
