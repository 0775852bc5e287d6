"""An .npy file of foreign objects in; numbers, strings, lists, dicts and arrays out. Nothing that it names is ever run."""

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHOWN = 80  # characters of a value in a message


class Refused(Exception):
    """Why a pickle is not read; the message is the rest of a sentence that starts with the file."""


class _Name(Enum):
    """What a pickle may name. A name stands for itself: nothing is imported."""

    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "numpy._core.multiarray._reconstruct"
    SCALAR = "numpy._core.multiarray.scalar"
    ENCODE = "_codecs.encode"  # how older pickles write bytes


_NAMES = {
    ("numpy", "ndarray"): _Name.NDARRAY,
    ("numpy", "dtype"): _Name.DTYPE,
    ("numpy.core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _Name.SCALAR,
    ("numpy._core.multiarray", "scalar"): _Name.SCALAR,
    ("_codecs", "encode"): _Name.ENCODE,
}


@dataclass(slots=True, eq=False)
class _Dtype:
    """The type of an array's numbers: `i8` and the like, or `O8` of objects; then, as the pickle adds it, the byte order."""

    code: str
    order: str = "="

    def numbers(self, raw: bytes, num: int) -> NDArray[Any]:
        if self.code not in _CODES or len(raw) != num * int(self.code[1]):
            raise Refused(f"has an array of {num} {shown(self.code)} in {len(raw)} bytes")
        return np.frombuffer(raw, np.dtype(self.order + self.code))


@dataclass(slots=True, eq=False)
class Array:
    """An array of one dimension: made empty, then filled."""

    values: list[Any] | NDArray[Any] | None = None


def shown(value: Any) -> str:
    """A value of a file for a message: one short line, whatever it is."""
    if isinstance(value, int | float | str) or value is None:
        text = ascii(value)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return "an array" if isinstance(value, Array) else f"a {type(value).__name__.strip('_').lower()}"


_CODES = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_HEADER = re.compile(rb"\{'descr': '\|O', 'fortran_order': False, 'shape': \(([0-9]{1,18}),\), \} *\n")
# Instructions for one number each: of 1, 2 and 4 bytes, and a float. A list of tokens is a run of them.
_NUMBERS = re.compile(rb"(?:K.|M..|J.{4}|G.{8})++", re.DOTALL)
_SKIPPED = {b"\x80": 1, b"\x95": 8}  # protocol and frame: bytes that follow
_MADE: dict[bytes, Callable[[], Any]] = {b"]": list, b"}": dict, b")": tuple, b"N": lambda: None}
_MADE |= {b"\x88": lambda: True, b"\x89": lambda: False}
_COUNTED: dict[bytes, tuple[int, Callable[[bytes], Any]]] = {  # bytes of the length, and what is made of so many bytes
    b"X": (4, lambda raw: raw.decode("utf-8", "surrogatepass")),
    b"\x8c": (1, lambda raw: raw.decode("utf-8", "surrogatepass")),
    b"B": (4, bytes),
    b"C": (1, bytes),
    b"\x8a": (1, lambda raw: int.from_bytes(raw, "little", signed=True)),
}
_KEPT, _RECALLED = {b"q": 1, b"r": 4}, {b"h": 1, b"j": 4}  # bytes of the index into the memo
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


def load_objects(data: bytes) -> list[Any]:
    """The objects of an .npy file of one dimension."""
    # Version 1.0, which has a header of at most 65,535 bytes, is what numpy.save writes for a list of dicts.
    header = data[10 : 10 + int.from_bytes(data[8:10], "little")]
    described = _HEADER.fullmatch(header) if data[:8] == b"\x93NUMPY\x01\x00" else None
    if described is None:
        raise Refused("not an array of objects as numpy.save writes it")
    loaded = _PlainPickle(data, 10 + len(header)).load()
    if not isinstance(loaded, Array) or not isinstance(loaded.values, list):
        raise Refused("holds no array of objects")
    if not 0 < len(loaded.values) == int(described[1]):
        raise Refused(f"has {len(loaded.values)} packs where its header says {int(described[1])}")
    return loaded.values


class _PlainPickle:
    """A pickle of numbers, strings, lists, tuples, dicts and numpy arrays, read without importing or calling anything.

    pickle.Unpickler, however few names it is given, is no match for a foreign file: one changed byte makes it reserve
    gigabytes for its memo, and numpy's arrays then take their shape from the file and read past the end of their data.
    """

    def __init__(self, data: bytes, start: int):
        self.data, self.position = data, start
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.num_encoded = 0  # characters

    def load(self) -> Any:
        try:
            while (code := self._code()) != b".":
                self._follow(code)
            return self.stack.pop()
        except (LookupError, TypeError, ValueError):
            raise Refused(f"is damaged before byte {self.position}") from None

    def _code(self) -> bytes:
        """The next instruction that is not a number's."""
        if run := _NUMBERS.match(self.data, self.position):
            # Numbers alone are safe with the usual reader, which is far faster. "(" ... "t": all as a tuple.
            self.stack += pickle.loads(b"(" + run[0] + b"t.")
            self.position = run.end()
        return self._take(1)

    def _take(self, num: int) -> bytes:
        taken = self.data[self.position : self.position + num]
        if len(taken) < num:
            raise Refused(f"ends in the middle, at byte {len(self.data)}")
        self.position += num
        return taken

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _follow(self, code: bytes) -> None:
        if code in _MADE:
            self.stack.append(_MADE[code]())
        elif code in _COUNTED:
            num_bytes, made_of = _COUNTED[code]
            self.stack.append(made_of(self._take(self._number(num_bytes))))
        elif code in _KEPT:
            self.memo[self._number(_KEPT[code])] = self.stack[-1]
        elif code in _RECALLED:
            self.stack.append(self.memo[self._number(_RECALLED[code])])
        elif code in _TUPLES:
            self.stack.append(tuple(self._popped(_TUPLES[code])))
        elif code in _SKIPPED:
            self._take(_SKIPPED[code])
        elif code in _JOINS:
            _JOINS[code](self)
        else:
            raise Refused(f"has an instruction that no pack needs ({code!a} at byte {self.position - 1})")

    def _popped(self, num: int) -> list[Any]:
        if num > len(self.stack):
            raise IndexError
        start = len(self.stack) - num
        popped = self.stack[start:]
        del self.stack[start:]
        return popped

    def _since_mark(self) -> list[Any]:
        return self._popped(max(0, len(self.stack) - self.marks.pop()))

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _tuple(self) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or not all(type(key) is str for key in items[::2]):
            raise TypeError
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        if (module, name) not in _NAMES:
            raise Refused(f"names {shown(f'{module}.{name}')}, which no pack needs; nothing that it names was run")
        self.stack.append(_NAMES[module, name])

    def _line(self) -> str:
        end = self.data.index(b"\n", self.position)
        line = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return line

    def _reduce(self) -> None:
        match self._popped(2):
            case [_Name.RECONSTRUCT, (_Name.NDARRAY, (0,), b"b")]:
                self.stack.append(Array())
            case [_Name.DTYPE, (str(code), _, _)]:
                self.stack.append(_Dtype(code))
            case [_Name.SCALAR, (_Dtype() as dtype, bytes(raw))]:
                self.stack.append(dtype.numbers(raw, 1)[0].item())
            case [_Name.ENCODE, (str(text), "latin1")]:
                self.num_encoded += len(text)
                if self.num_encoded > len(self.data):  # each time it is encoded, a text takes memory
                    raise Refused(f"encodes one text many times, before byte {self.position}")
                self.stack.append(text.encode("latin1"))
            case _:
                raise Refused(f"makes what no pack needs, before byte {self.position}")

    def _build(self) -> None:
        made, state = self._popped(2)
        match made, state:
            case _Dtype(), (int(), "<" | ">" | "|" | "=" as order, None, None, None, *_):
                made.order = order
            case Array(values=None), (int(), (int(num),), _Dtype(code=str(code)), bool(), list(items)) if (
                code.startswith("O") and len(items) == num
            ):
                made.values = items
            case Array(values=None), (int(), (int(num),), _Dtype() as dtype, bool(), bytes(raw)):
                made.values = dtype.numbers(raw, num)
            case _:
                raise Refused(f"fills an array in a way that no pack needs, before byte {self.position}")
        self.stack.append(made)


_JOINS: dict[bytes, Callable[[_PlainPickle], None]] = {
    b"(": _PlainPickle._mark,
    b"\x94": _PlainPickle._memoize,
    b"t": _PlainPickle._tuple,
    b"a": lambda self: self._extend(self._popped(1)),
    b"e": lambda self: self._extend(self._since_mark()),
    b"s": lambda self: self._update(self._popped(2)),
    b"u": lambda self: self._update(self._since_mark()),
    b"c": lambda self: self._named(self._line(), self._line()),
    b"\x93": lambda self: self._named(*self._popped(2)),
    b"R": _PlainPickle._reduce,
    b"b": _PlainPickle._build,
}
