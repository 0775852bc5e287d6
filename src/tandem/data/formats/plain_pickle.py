"""Reads an untrusted .npy file of pickled objects. No code from the file is run; only plain data is accepted."""

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SHOWN_CHARACTERS = 80  # of a value in a message


class Refused(Exception):
    """Raised if a pickle is not plain data or is damaged. The message does not name the file; the caller adds the name."""


class _Name(Enum):
    """The functions and classes that a pickle may name. Their names are only compared; nothing is imported."""

    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "numpy._core.multiarray._reconstruct"
    SCALAR = "numpy._core.multiarray.scalar"
    ENCODE = "_codecs.encode"  # how older pickles write bytes


_KNOWN_NAMES = {
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
    """The type of the items of an array: a code such as `i8` for numbers, or `O8` for objects.

    `order`: the byte order, which a later instruction of the pickle sets.
    """

    code: str
    order: str = "="

    def numbers(self, raw: bytes, num: int) -> NDArray[Any]:
        if self.code not in _CODES or len(raw) != num * int(self.code[1]):
            found = f"{num} items of type {describe(self.code)} in {len(raw)} bytes"
            raise Refused(f"the file contains an array of a wrong size or type ({found})")
        return np.frombuffer(raw, np.dtype(self.order + self.code))


@dataclass(slots=True, eq=False)
class Array:
    """A one-dimensional array. A pickle creates it empty and fills it later."""

    values: list[Any] | NDArray[Any] | None = None


def describe(value: Any) -> str:
    """Return a short text that describes a value of the file, for an error message."""
    if isinstance(value, int | float | str) or value is None:
        text = ascii(value)
        return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
    return "an array" if isinstance(value, Array) else f"a {type(value).__name__.strip('_').lower()}"


_CODES = {"i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_HEADER = re.compile(rb"\{'descr': '\|O', 'fortran_order': False, 'shape': \(([0-9]{1,18}),\), \} *\n")
# Opcodes that push one number: integers of 1, 2 and 4 bytes, and floats. A list of tokens is a sequence of such opcodes.
_NUMBERS = re.compile(rb"(?:K.|M..|J.{4}|G.{8})++", re.DOTALL)
_SKIPPED = {b"\x80": 1, b"\x95": 8}  # PROTO and FRAME: size of the argument in bytes
_CONSTANTS: dict[bytes, Callable[[], Any]] = {b"]": list, b"}": dict, b")": tuple, b"N": lambda: None}
_CONSTANTS |= {b"\x88": lambda: True, b"\x89": lambda: False}
_SIZED: dict[
    bytes, tuple[int, Callable[[bytes], Any]]
] = {  # size of the length field in bytes, and a function that decodes the content
    b"X": (4, lambda raw: raw.decode("utf-8", "surrogatepass")),
    b"\x8c": (1, lambda raw: raw.decode("utf-8", "surrogatepass")),
    b"B": (4, bytes),
    b"C": (1, bytes),
    b"\x8a": (1, lambda raw: int.from_bytes(raw, "little", signed=True)),
}
_MEMO_PUT, _MEMO_GET = {b"q": 1, b"r": 4}, {b"h": 1, b"j": 4}  # size of the memo index in bytes
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


def load_objects(data: bytes) -> list[Any]:
    """Return the objects in a .npy file. `data`: the content of the file, which must be a one-dimensional array of objects."""
    # numpy.save writes a list of dicts in version 1.0 of the format: 2 bytes give the length of the header.
    header = data[10 : 10 + int.from_bytes(data[8:10], "little")]
    described = _HEADER.fullmatch(header) if data[:8] == b"\x93NUMPY\x01\x00" else None
    if described is None:
        raise Refused("the file is not a one-dimensional array of objects written by numpy.save")
    loaded = _PlainPickle(data, 10 + len(header)).load()
    if not isinstance(loaded, Array) or not isinstance(loaded.values, list):
        raise Refused("the file does not contain an array of objects")
    if not 0 < len(loaded.values) == int(described[1]):
        raise Refused(f"the file has {len(loaded.values)} packs, but its header says {int(described[1])}")
    return loaded.values


class _PlainPickle:
    """Reads a pickle of numbers, strings, lists, tuples, dicts and numpy arrays. Nothing that the pickle names is imported.

    A pickle.Unpickler with an allow-list of names is not safe for untrusted files: one changed byte makes it reserve
    gigabytes for its memo, and numpy trusts the shape in the file and reads past the end of the data.
    """

    def __init__(self, data: bytes, start: int):
        self.data, self.position = data, start
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.num_encoded = 0  # characters encoded to bytes so far

    def load(self) -> Any:
        try:
            while (code := self._next_opcode()) != b".":
                self._execute(code)
            return self.stack.pop()
        except (LookupError, TypeError, ValueError):
            raise Refused(f"the file is damaged before byte {self.position}") from None

    def _next_opcode(self) -> bytes:
        """Push any numbers at the current position to the stack, and return the opcode that follows."""
        if run := _NUMBERS.match(self.data, self.position):
            # pickle.loads is safe for numbers alone, and much faster. "(" and "t" make a tuple of them.
            self.stack += pickle.loads(b"(" + run[0] + b"t.")
            self.position = run.end()
        return self._take(1)

    def _take(self, num: int) -> bytes:
        taken = self.data[self.position : self.position + num]
        if len(taken) < num:
            raise Refused(f"the file is cut off at byte {len(self.data)}")
        self.position += num
        return taken

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _execute(self, code: bytes) -> None:
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code]())
        elif code in _SIZED:
            num_bytes, decode = _SIZED[code]
            self.stack.append(decode(self._take(self._number(num_bytes))))
        elif code in _MEMO_PUT:
            self.memo[self._number(_MEMO_PUT[code])] = self.stack[-1]
        elif code in _MEMO_GET:
            self.stack.append(self.memo[self._number(_MEMO_GET[code])])
        elif code in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[code])))
        elif code in _SKIPPED:
            self._take(_SKIPPED[code])
        elif code in _OTHERS:
            _OTHERS[code](self)
        else:
            raise Refused(
                f"the file contains a pickle instruction that packs do not use ({code!a} at byte {self.position - 1})"
            )

    def _pop(self, num: int) -> list[Any]:
        if num > len(self.stack):
            raise IndexError
        start = len(self.stack) - num
        popped = self.stack[start:]
        del self.stack[start:]
        return popped

    def _since_mark(self) -> list[Any]:
        return self._pop(max(0, len(self.stack) - self.marks.pop()))

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

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        if (module, name) not in _KNOWN_NAMES:
            raise Refused(
                f"the file names {describe(f'{module}.{name}')}, which packs do not use. No code from the file was run"
            )
        self.stack.append(_KNOWN_NAMES[module, name])

    def _read_line(self) -> str:
        end = self.data.index(b"\n", self.position)
        line = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return line

    def _reduce(self) -> None:
        match self._pop(2):
            case [_Name.RECONSTRUCT, (_Name.NDARRAY, (0,), b"b")]:
                self.stack.append(Array())
            case [_Name.DTYPE, (str(code), _, _)]:
                self.stack.append(_Dtype(code))
            case [_Name.SCALAR, (_Dtype() as dtype, bytes(raw))]:
                self.stack.append(dtype.numbers(raw, 1)[0].item())
            case [_Name.ENCODE, (str(text), "latin1")]:
                self.num_encoded += len(text)
                if self.num_encoded > len(self.data):  # the same text, encoded again and again, could fill the memory
                    raise Refused(
                        f"the file encodes a text many times, which packs do not do, before byte {self.position}"
                    )
                self.stack.append(text.encode("latin1"))
            case _:
                raise Refused(f"the file contains an object that packs do not use, before byte {self.position}")

    def _build(self) -> None:
        made, state = self._pop(2)
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
                raise Refused(f"the file fills an array in a way that packs do not use, before byte {self.position}")
        self.stack.append(made)


_OTHERS: dict[bytes, Callable[[_PlainPickle], None]] = {
    b"(": _PlainPickle._mark,
    b"\x94": _PlainPickle._memoize,
    b"t": _PlainPickle._tuple,
    b"a": lambda self: self._extend(self._pop(1)),
    b"e": lambda self: self._extend(self._since_mark()),
    b"s": lambda self: self._update(self._pop(2)),
    b"u": lambda self: self._update(self._since_mark()),
    b"c": lambda self: self._push_name(self._read_line(), self._read_line()),
    b"\x93": lambda self: self._push_name(*self._pop(2)),
    b"R": _PlainPickle._reduce,
    b"b": _PlainPickle._build,
}
