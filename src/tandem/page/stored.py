"""Writes setup.json, what a run starts from as its page shows it: data, settings, versions, and one real pack."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem import __version__
from tandem.data.preflight import Preflight, warnings_of
from tandem.packing.layout import FILLER, Pack
from tandem.packing.packer import Packer
from tandem.storage.cache import replacing
from tandem.terminal.printable import scrubbed

if TYPE_CHECKING:
    from tandem.training.start.setup import Setup

FORMAT = 1  # of setup.json and pairs.json
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "pyarrow")
SHOWN_FILES = 20
SEGMENT_TOKENS = 48  # tokens of a segment whose text is stored
SEGMENT_CHARACTERS = 240


@dataclass(frozen=True, slots=True)
class Described:
    """What a run prints before it starts: its data, its settings and its computation in words."""

    sets: Sequence[Preflight]
    choices: Sequence[tuple[str, str]]
    computed: str
    num_ranks: int


def write_setup(run: Path, setup: "Setup", described: Described, warn: Callable[[str], None]) -> None:
    """Write setup.json. An error is reported and does not end the run."""
    try:
        write_json(run / "setup.json", setup_content(setup, described))
    except Exception as error:
        warn(f"{run}/setup.json cannot be written ({error}). report.html will lack the data, settings and versions.")


def setup_content(setup: "Setup", described: Described) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "num_steps": setup.plan.num_steps,
        "rows": setup.plan.rows,
        "choices": described.choices,
        "computed": described.computed,
        "num_ranks": described.num_ranks,
        "versions": versions(),
        "sets": [set_content(one) for one in described.sets],
        "pack": example_pack(setup),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, without values from the environment."""
    with replacing(path) as file:
        file.write(json.dumps(_scrubbed(content), ensure_ascii=False, separators=(",", ":")) + "\n")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value).encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded
    if isinstance(value, dict):
        return {_scrubbed(key): _scrubbed(one) for key, one in value.items()}
    return [_scrubbed(one) for one in value] if isinstance(value, list | tuple) else value


@cache
def versions() -> dict[str, str]:
    """Versions of tandem, Python and the packages that determine results."""
    found = {"tandem": __version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"}


def set_content(found: Preflight) -> dict[str, Any]:
    """A Preflight as JSON, with its warnings in words."""
    content = asdict(found)
    return {
        **content,
        "files": content["files"][:SHOWN_FILES],
        "num_files": len(found.files),
        "warnings": list(warnings_of(found).values()),
    }


def example_pack(setup: "Setup") -> dict[str, Any] | None:
    """The first row of the first batch, as segments: which tokens are which prompt and which completion."""
    packer, batches = setup.plan.train, setup.plan.batches.epoch(0)
    if not batches:
        return None
    pack = next(iter(packer.for_single_rank().micro_batches(batches[0].preferences, batches[0].bounds)))
    return picture(pack, packer, setup.template.tokenizer)


def picture(pack: Pack, packer: Packer, tokenizer: Any) -> dict[str, Any]:
    """The first row of a pack.

    A prompt of 4 and completions of 2 and 3 in a row of 10: segments (prompt, 0, 4), (chosen, 4, 2), (rejected, 6, 3).
    """
    tree, branch = pack.tree[0], pack.branch[0]
    changes = np.flatnonzero((np.diff(tree) != 0) | (np.diff(branch) != 0)) + 1
    # Two prompts may follow each other only in different trees, so every change of either starts a segment.
    starts = [0, *changes.tolist()]
    ends = [*changes.tolist(), len(tree)]
    segments = []
    for start, end in zip(starts, ends, strict=True):
        if tree[start] == FILLER:
            continue
        preference, completion = _belongs(pack, packer.arrangement, int(tree[start]), int(branch[start]))
        ids = pack.token_ids[0, start : min(end, start + SEGMENT_TOKENS)].tolist()
        text = tokenizer.decode(ids)
        segments.append(
            {
                "role": "prompt" if completion is None else _role(pack, completion),
                "preference": preference,
                "place": packer.store.place(int(pack.preferences[preference])),
                "start": start,
                "tokens": end - start,
                "text": clipped(text, SEGMENT_CHARACTERS, more=end - start > SEGMENT_TOKENS),
            }
        )
    return {"length": len(tree), "arrangement": packer.arrangement, "segments": segments}


def clipped(text: str, characters: int, *, more: bool = False) -> str:
    """The start of a text. more: the text itself is already cut."""
    return f"{text[:characters]}…" if more or len(text) > characters else text


def _belongs(pack: Pack, arrangement: str, tree: int, branch: int) -> tuple[int, int | None]:
    """Which preference of the pack a segment belongs to, and which completion it is; None for a prompt."""
    if arrangement != "shared":  # every tree has one completion
        completion = min(tree, len(pack.owner) - 1)
        return int(pack.owner[completion]), completion if branch else None
    preference = min(tree, len(pack.preferences) - 1)
    first = int(np.searchsorted(pack.owner, preference))
    return preference, min(first + branch - 1, len(pack.owner) - 1) if branch else None


def _role(pack: Pack, completion: int) -> str:
    wins, loses = completion in pack.winners, completion in pack.losers
    return "chosen" if wins and not loses else "rejected" if loses and not wins else "completion"
