"""What would replace each hand-written part if a library did its work: imported by hand_written_parts.py only.

Each alternative is written as it would be in tandem, so that its length can be compared too. Libraries are imported when an
alternative is used, because tandem does not depend on them.
"""

import codecs
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.store.pool import RowMonitor

# The process pool. Work is passed to a process once, when it starts: pebble and the standard library pickle it otherwise.

_work: Callable[[Any, RowMonitor], Any] | None = None


def _start(work: Callable[[Any, RowMonitor], Any]) -> None:
    global _work
    _work = work


def _call(item: Any) -> Any:
    assert _work is not None
    return _work(item, RowMonitor())


class _WindowedPool:
    """The interface of tandem's Pool over `submit(item) -> future`. Both libraries read a whole iterable in their own `map`."""

    def __init__(self, work: Callable[[Any, RowMonitor], Any], num_workers: int, row_seconds: float):
        self._work, self._num_workers, self._row_seconds = work, num_workers, row_seconds
        self._submit: Callable[[Any], Any] | None = None

    def map(self, items: Iterable[Any], num_workers: int | None = None) -> Iterator[Any]:
        self._num_workers = num_workers or self._num_workers
        self._submit = self._submit or self._open()
        stream, under_way = iter(items), deque[Any]()
        while True:
            under_way.extend(map(self._submit, islice(stream, 2 * self._num_workers - len(under_way))))
            if not under_way:
                return
            yield under_way.popleft().result()

    def _open(self) -> Callable[[Any], Any]:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class PebblePool(_WindowedPool):
    """pebble's pool: a time limit for each item, not for each row of it."""

    def _open(self) -> Callable[[Any], Any]:
        from pebble import ProcessPool  # pyright: ignore[reportMissingImports]

        self._pool = ProcessPool(
            self._num_workers, initializer=_start, initargs=[self._work], context=get_context("fork")
        )
        return lambda item: self._pool.schedule(_call, args=[item], timeout=self._row_seconds)

    def stop(self) -> None:
        if self._submit is not None:
            self._pool.stop()
            self._pool.join()
            self._submit = None


class ExecutorPool(_WindowedPool):
    """concurrent.futures: no time limit."""

    def _open(self) -> Callable[[Any], Any]:
        self._pool = ProcessPoolExecutor(
            self._num_workers, get_context("fork"), initializer=_start, initargs=(self._work,)
        )
        return lambda item: self._pool.submit(_call, item)

    def stop(self) -> None:
        if self._submit is not None:
            self._pool.shutdown(cancel_futures=True)
            self._submit = None


# A JSON array


def ijson_elements(file: io.BufferedReader, *, refuse_duplicates: bool) -> Iterator[Any]:
    """The elements of a JSON array. ijson reports a repeated key only through a mapping type of one's own."""
    import ijson  # pyright: ignore[reportMissingImports]

    kind = {"map_type": _OneOfEachKey} if refuse_duplicates else {}
    return ijson.items(file, "item", use_float=True, buf_size=1 << 20, **kind)


class _OneOfEachKey(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise ValueError(f"the key {key!r} appears twice")
        super().__setitem__(key, value)


# The files of a dataset


def datasets_files(folder: Path, *, subset: str | None, split: str) -> list[str]:
    """The files of a split, as `datasets` resolves a local folder. It resolves no list of names: the files must exist."""
    import datasets  # pyright: ignore[reportMissingImports]

    builder = datasets.load_dataset_builder(str(folder), name=subset)
    return [str(Path(file).relative_to(folder)) for file in builder.config.data_files[split]]


# A pickle


class AllowListUnpickler(pickle.Unpickler):
    """pickle.Unpickler that finds the five names of NeMo's packed files and no others."""

    ALLOWED = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
        **{
            (module, name): getattr(import_module("numpy._core.multiarray"), name)
            for module in ("numpy.core.multiarray", "numpy._core.multiarray")
            for name in ("_reconstruct", "scalar")
        },
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")
        return self.ALLOWED[module_name, global_name]


def allow_list_objects(data: bytes) -> list[Any]:
    """The objects of a .npy file."""
    file = io.BytesIO(data)
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    return list(AllowListUnpickler(file).load())


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def attacks() -> dict[str, bytes]:
    """Pickles of a few bytes up to a megabyte. Only the first needs a name that an allow-list would refuse."""
    encode_again = _name("_codecs", "encode") + b"h\x00" + _text("latin1") + b"\x86R"
    empty_array = _name("numpy._core.multiarray", "_reconstruct") + _name("numpy", "ndarray")
    return {
        "calls os.system": _name("os", "system") + _text("true") + b"\x85R.",
        "a memo index of 2**31": b"Nr\xff\xff\xff\x7f.",
        "bytes of 3 GiB, none of which follow": b"\x8e" + (3 << 30).to_bytes(8, "little") + b".",
        "one text of 1 MiB encoded 20,000 times": b"]("
        + _text("a" * (1 << 20))
        + b"q\x00"
        + encode_again * 20_000
        + b"e.",
        "an array of 2**30 objects": empty_array + b"J" + (1 << 30).to_bytes(4, "little") + b"\x85C\x01O\x87R.",
        "a key of 1,000,000 nested tuples": b"})" + b"\x85" * 1_000_000 + b"Ns.",
        "a persistent id": b"Pany\n.",
    }


def as_npy(pickled: bytes) -> bytes:
    """A pickle with the header of a one-dimensional .npy file of objects."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return file.getvalue() + pickled
