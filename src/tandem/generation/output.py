"""The output file: one JSON line per prompt and model, in the `scored` format, appended as soon as a prompt is done."""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tandem import __version__
from tandem.errors import ConfigError, DataError, DiskError, full_disk
from tandem.generation.paths import check_out
from tandem.generation.records import Answer, Prompt, as_json_prompt
from tandem.storage.cache import fingerprint, real_path, replacing
from tandem.storage.ownership import open_own
from tandem.terminal.arguments import option, same_call
from tandem.terminal.printable import listed

# Facts about how a line was made that do not have to match when a file is continued.
NOT_COMPARED = ("tandem", "engine_version")
Record = dict[str, Any]


def record_of(prompt: Prompt, answers: Sequence[Answer], generated_by: Mapping[str, Any]) -> Record:
    """A line of the output. It is `scored` data once every `score` is a number."""
    ordered = sorted(answers, key=lambda answer: answer.request.sample)
    return {
        "id": prompt.index,
        "prompt": as_json_prompt(prompt.prompt),
        "completions": [
            {
                "completion": answer.text,
                "completion_ids": None if answer.ids is None else list(answer.ids),
                "finish": answer.finish,
                "score": None,
            }
            for answer in ordered
        ],
        **({"tools": list(prompt.tools)} if prompt.tools else {}),
        **({"row": dict(prompt.row)} if prompt.row else {}),
        "generated_by": dict(generated_by),
    }


def as_line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, default=str)


def generated_by(
    model: str, content: str, engine: Mapping[str, Any], engine_version: str, sampling: Mapping[str, Any], prompts: str
) -> dict[str, Any]:
    """How a line was made. content: a fingerprint of the model; prompts: a fingerprint of all prompts."""
    return {
        "model": model,
        "model_fingerprint": content,
        **engine,
        "engine_version": engine_version,
        "sampling": dict(sampling),
        "prompts": prompts,
        "tandem": __version__,
    }


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    return fingerprint([[as_json_prompt(one.prompt), list(one.tools)] for one in prompts])[:16]


class OutputFile:
    """Appends records. An existing file is continued if it was made in the same way, and otherwise refused."""

    def __init__(self, path: Path):
        self.path = path
        check_out(path)
        self._is_new = not path.exists()
        try:
            self._file: IO[bytes] = open_own(path, "ab")
        except OSError as error:
            raise ConfigError(f"{option('out', path)}: {error.strerror}. Choose another file.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{option('out', path)}: another process is writing to it. Choose another file."
            ) from None
        self._records = self._read()

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):  # on a full disk, closing fails after `write` has reported it
            self._file.close()
        if kind is not None and self._is_new and self.path.stat().st_size == 0:
            self.path.unlink()

    def done(self, made_now: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[int, Record]:
        """The records of one model that are already there, by the number of the prompt.

        Refuses a file of another model, other settings or other prompts. Every model of a run must be asked for.
        """
        found = {}
        for number, record in self._records:
            made = record["generated_by"]
            if made.get("model") != made_now["model"]:
                continue
            refuse_other_settings(f"{self.path}:{number}", made, made_now)
            if not (type(record.get("id")) is int and 0 <= record["id"] < len(prompts)):
                raise self._foreign(number)
            found[record["id"]] = record
        return found

    def refuse_other_models(self, models: Sequence[str]) -> None:
        for number, record in self._records:
            model = record["generated_by"].get("model")
            same = next((one for one in models if real_path(one) == real_path(str(model))), None)
            if model not in models and same is not None:
                raise ConfigError(
                    f"{self.path}:{number}: made with the model {model}, which is {same}. To continue the file, give it as "
                    f"{model}."
                )
            if model not in models:
                raise ConfigError(
                    f"{self.path}:{number}: made with the model {model}, not {listed(models)}. Choose another file."
                )

    def write(self, record: Record) -> None:
        line = (as_line(record) + "\n").encode("utf-8", "replace")
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            if full_disk(error) is None:
                raise
            raise DiskError(
                f"{self.path}: the disk is full. Every line before is complete: free some space, and repeat {same_call()} to "
                "continue."
            ) from None

    def sort(self, models: Sequence[str]) -> None:
        """Put the lines of a complete file in the order of the models and prompts."""
        records = [record for _, record in self._read()]
        ordered = sorted(records, key=lambda one: (models.index(one["generated_by"]["model"]), one["id"]))
        if ordered != records:
            with replacing(self.path) as file:
                file.writelines(as_line(record) + "\n" for record in ordered)

    def _read(self) -> list[tuple[int, Record]]:
        """The records with their line numbers. A last line that was cut off by a kill is removed from the file."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        records = []
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                record = json.loads(line)
                made = record["generated_by"]
                if not isinstance(made, dict) or "sampling" not in made:
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._foreign(number) from None
            records.append((number, record))
        if end < len(content):
            if not content[end:].startswith(b'{"id": '):
                raise self._foreign(content[:end].count(b"\n") + 1)
            os.truncate(self._file.fileno(), end)
        return records

    def _foreign(self, number: int) -> DataError:
        return DataError(
            f"{self.path}:{number}: not a line that tandem generate wrote, and files are never overwritten. Choose another "
            "file."
        )


def refuse_other_settings(place: str, made: Mapping[str, Any], made_now: Mapping[str, Any]) -> None:
    """Refuse to add to lines that were made in another way; the message lists the differences."""
    then, now = _flat(made), _flat(made_now)
    keys = [key for key in {**now, **then} if key not in NOT_COMPARED and then.get(key) != now.get(key)]
    if not keys:
        return
    # Of prompts, a hash is stored.
    changes = listed(
        "other prompts" if key == "prompts" else f"{key} {then.get(key)}, now {now.get(key)}" for key in keys
    )
    raise ConfigError(f"{place}: made with other settings ({changes}). Choose another file, or the same settings.")


def _flat(made: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in made.items() if key != "sampling"}, **made["sampling"]}
