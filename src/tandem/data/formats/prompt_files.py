"""Reads the prompt files of a dataset (`prompt_file` and `system_prompt_file`), and applies their texts to every prompt."""

import errno
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import Message, TextOrMessages
from tandem.errors import ConfigError
from tandem.terminal.printable import not_utf8


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts of `prompt_file` and `system_prompt_file`. In the text of `prompt_file`, {} is replaced by the prompt."""

    prompt: str | None = None
    system: str | None = None

    def apply(self, prompt: TextOrMessages) -> TextOrMessages:
        """Return the prompt with its last user turn inserted into the text of `prompt_file`.

        The text of `system_prompt_file` is added as a system turn, unless the prompt already has a system turn.
        """
        if self.prompt is not None:
            if isinstance(prompt, str):
                prompt = self.prompt.replace("{}", prompt)
            else:
                last = max(i for i, message in enumerate(prompt) if message.role == "user")
                worded = replace(prompt[last], content=self.prompt.replace("{}", prompt[last].content))
                prompt = (*prompt[:last], worded, *prompt[last + 1 :])
        if self.system is None:
            return prompt
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        return messages if messages[0].role == "system" else (Message("system", self.system), *messages)


def wording_of(keys: DatasetFields, source: str) -> Wording:
    """Read the prompt files of the dataset `source`. Raise a ConfigError if a file cannot be used."""
    prompt = _read(keys.prompt_file, f"{source}: prompt_file = {keys.prompt_file}")
    system = _read(keys.system_prompt_file, f"{source}: system_prompt_file = {keys.system_prompt_file}")
    if prompt is not None and "{}" not in prompt:
        raise ConfigError(
            f"{source}: prompt_file = {keys.prompt_file}: the file has no {{}}. Add {{}} where the prompt belongs."
        )
    if system is not None and not system.strip():
        raise ConfigError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}: the file is empty. Write the system prompt "
            "into it, or leave out the key."
        )
    return Wording(prompt, system)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return why a text file could not be read and what to do, as two sentences after the name of the file."""
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error}). Check the path."
    return not_utf8(error)


def read_text_file(file: Path) -> str:
    """Read a text file named in the configuration. Raise OSError for a pipe, because reading a pipe could wait forever."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "Not a file")
    return file.read_text(encoding="utf-8")


def _read(file: str | None, place: str) -> str | None:
    if file is None:
        return None
    try:
        return read_text_file(Path(file)).removesuffix("\n")  # editors add a final newline
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {why_unreadable(error)}") from None
