"""Makes malicious files (mutated, symbolic links, enormous), and runs readers on them in forked child processes."""

import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.storage.cache import MANIFEST_FINGERPRINT, fingerprint, sha256_of

# Bytes of memory that a child may use in addition to its parent's.
MEMORY = 6 * 1024**3
WAITING_PER_CPU_SECOND = 30  # how long a reader may wait, compared with how long it may compute
CANARY = "canary-5f1d"

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**8, 10**400, 0.5, -0.0, 1e39, float("nan"), float("inf")),
    *("", " ", "a", "x" * 70_000, "\x1b[2J\x07", "\u202egpj.exe", "\ud800", "\x00", "nan", "null", "1e999", "-"),
    *("../victim/file.txt", "/etc/passwd", "~/.ssh", "~", ".", "..", "//", "file:///etc/passwd", "victim"),
    *("${oc.env:TANDEM_CANARY}", "${run}", "${", "${oc.create:${oc.env:TANDEM_CANARY}}", "{{ x }}", "(a+)+$", "[", "*"),
    *([], {}, [[]], {"": None}, [None] * 3, ["a", 1], {"type": "Sequence"}, {"a": {"b": {"c": [1, 2, 3]}}}),
    *("step_1", "step_²", "best", "float64", "llama", "bert", "mamba", "!!python/object:os.system", "1" * 5000),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a value, as tuples of keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, item in list(items)[:300]:
        found += [(*path, key), *paths_in(item, (*path, key))]
    return found


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Copy a tree with up to three of its values, at any depth, removed, replaced, wrapped, doubled or renamed."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.02:
            return rng.choice([*VALUES, nested(100)])
        if not (paths := paths_in(tree)):
            break
        # Prefer the upper levels, so that a large vocabulary below them does not get all the mutations.
        upper = [path for path in paths if len(path) <= 2]
        *above, last = rng.choice(upper if rng.random() < 0.7 else paths)
        holder = tree
        for key in above:
            holder = holder[key]
        change = rng.choice(["remove", "replace", "replace", "replace", "wrap", "repeat", "rename"])
        if change == "remove":
            del holder[last]
        elif change == "replace":
            holder[last] = json.loads(json.dumps(rng.choice(VALUES))) if rng.random() < 0.97 else nested(900)
        elif change == "wrap":
            holder[last] = rng.choice([[holder[last]], {"text": holder[last]}, str(holder[last])])
        elif isinstance(holder, list):
            holder.insert(last, holder[last])
        else:
            key = rng.choice(["", "a", "__class__", "\x1b[31m", "x" * 3000, *map(str, list(holder)[:5])])
            holder[key] = holder.pop(last) if change == "rename" else holder[last]
    return tree


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change, cut, double, insert or zero bytes, often near the start or the end, where formats keep their tables."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not content:
            break
        size = len(content)
        place = rng.choice(
            [rng.randrange(size), rng.randrange(min(size, 600)), size - 1 - rng.randrange(min(size, 900))]
        )
        span = rng.choice([1, 1, 4, 8, 64])
        match rng.choice(["flip", "set", "cut", "double", "insert", "zero", "ones"]):
            case "flip":
                content[place] ^= 1 << rng.randrange(8)
            case "set":
                content[place] = rng.randrange(256)
            case "cut":
                del content[place : place + span if rng.random() < 0.7 else size]
            case "double":
                content[place:place] = content[place : place + span]
            case "insert":
                content[place:place] = rng.randbytes(span)
            case "zero":
                content[place : place + span] = bytes(min(span, size - place))
            case "ones":
                content[place : place + span] = b"\xff" * min(span, size - place)
    return bytes(content)


def mutate_file(rng: random.Random, file: Path, victim: Path) -> None:
    """Change one file in place: the values of a JSON file, the bytes of any other. Sometimes replace the file instead."""
    kind = rng.random()
    if kind < 0.12:
        replace_file(rng, file, victim)
    elif file.suffix == ".json" and kind < 0.8:
        text = json.dumps(mutate_tree(rng, json.loads(file.read_text())))
        file.write_text(text if rng.random() < 0.97 else "[" * 100_000, encoding="utf-8")
    else:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))


def replace_file(rng: random.Random, file: Path, victim: Path) -> None:
    """Remove a file, or replace it with an empty file, a folder, a symbolic link or a pipe without a writer."""
    content = file.read_bytes()
    file.unlink()
    match rng.choice(["nothing", "empty", "folder", "link", "broken", "self", "pipe", "upwards"]):
        case "nothing":
            pass
        case "empty":
            file.touch()
        case "folder":
            file.mkdir()
            (file / "file.txt").write_bytes(content)
        case "link":
            file.symlink_to(victim / "file.txt")
        case "broken":
            file.symlink_to(victim / "absent.txt")
        case "self":
            file.symlink_to(file.name)
        case "pipe":
            os.mkfifo(file)
        case "upwards":
            file.symlink_to("..")


def remake_manifest(folder: Path) -> None:
    """Rewrite a manifest so that it matches the files, as an attacker would."""
    path = folder / "manifest.json"
    if not path.is_file():  # a pipe, perhaps
        return
    try:
        manifest = json.loads(path.read_text())
        manifest.pop(MANIFEST_FINGERPRINT, None)
        names = list(manifest["files"])
        manifest["files"] = {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}
        path.write_text(json.dumps({**manifest, MANIFEST_FINGERPRINT: fingerprint(manifest)}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # the manifest itself was mutated


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended. Anything but "read" and "refused" is a bug."""

    kind: str  # read, refused, raised, crashed, hung
    text: str

    @property
    def is_acceptable(self) -> bool:
        return self.kind in ("read", "refused")


def attempt(read: Callable[[], Any], cpu_seconds: int = 20) -> Outcome:
    """Run a reader in a forked child with limits on time and memory. If it hangs, its own children are killed too.

    Computing is limited in CPU time, so that a busy machine fails no test. A reader that only waits ends after much longer.
    """
    seconds = WAITING_PER_CPU_SECOND * cpu_seconds
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_child(read, writing, cpu_seconds)
    os.close(writing)
    ended, status = False, 0
    end = time.monotonic() + seconds
    text = bytearray()
    os.set_blocking(reading, False)
    while not ended and time.monotonic() < end:
        _drain(reading, text)
        ended, status = (found := os.waitpid(child, os.WNOHANG))[0] != 0, found[1]
        if not ended:
            time.sleep(0.001)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _drain(reading, text)
    os.close(reading)
    if not ended:
        return Outcome("hung", f"after {seconds} seconds")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Outcome("hung", f"after {cpu_seconds} seconds of CPU time")
    if os.WIFSIGNALED(status):
        return Outcome("crashed", signal.Signals(os.WTERMSIG(status)).name)
    kind, _, message = bytes(text).decode(errors="replace").partition("\n")
    return Outcome(kind or "crashed", message or f"exit {os.waitstatus_to_exitcode(status)}")


def _drain(pipe: int, into: bytearray) -> None:
    try:
        while piece := os.read(pipe, 65536):
            into += piece
    except BlockingIOError:
        pass


def _run_child(read: Callable[[], Any], writing: int, cpu_seconds: int) -> None:
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
        try:
            read()
            kind, message = "read", ""
        except TandemError as error:
            kind, message = "refused", str(error)
        except BaseException:
            kind, message = "raised", traceback.format_exc()
        os.write(writing, f"{kind}\n{message[-10_000:]}".encode("utf-8", "backslashreplace"))  # less than a pipe holds
    finally:
        os._exit(0)


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The mode and the content or link target of every file below a folder."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (mode, content)
    return found


@dataclass(frozen=True, slots=True)
class Attempts:
    """The result of many attempts: a description of each problem, and the number of attempts by kind of outcome."""

    problems: list[str]
    counts: dict[Any, int]

    def __str__(self) -> str:
        shown = "\n".join(self.problems[:40])
        return f"{len(self.problems)} problems in {sum(self.counts.values())} attempts {self.counts}:\n{shown}"


def try_all(kind: str, seeds: range, make: Callable[[random.Random], Callable[[], Any]], watched: Path) -> Attempts:
    """Try the input of every seed. A problem is a reader that raised, crashed, hung, leaked or changed a watched file."""
    counts: dict[str, int] = {}
    problems: list[str] = []
    before = snapshot(watched)
    for seed in seeds:
        read = make(random.Random(f"{kind} {seed}"))
        outcome = attempt(read)
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        if not outcome.is_acceptable or CANARY in outcome.text:
            problems.append(f"{kind} {seed}: {outcome.kind}: {outcome.text[-1500:]}")
        if (after := snapshot(watched)) != before:
            names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
            problems.append(f"{kind} {seed}: changed {names}")
            before = after
    return Attempts(problems, counts)
