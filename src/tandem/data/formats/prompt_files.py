"""Reads the prompt files of a dataset into a Wording, which applies their texts to every prompt."""

import errno
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import Message
from tandem.errors import ConfigError

Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts of `prompt_file`, where {} is replaced by the prompt, and of `system_prompt_file`."""

    prompt: str | None = None
    system: str | None = None

    def of(self, prompt: Prompt) -> Prompt:
        """The prompt with its last user turn inserted into the prompt text, and a system turn first if it has none."""
        if self.prompt is not None:
            if isinstance(prompt, str):
                prompt = self.prompt.replace("{}", prompt)
            else:
                last = max(i for i, message in enumerate(prompt) if message.role == "user")
                said = replace(prompt[last], content=self.prompt.replace("{}", prompt[last].content))
                prompt = (*prompt[:last], said, *prompt[last + 1 :])
        if self.system is None:
            return prompt
        messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        return messages if messages[0].role == "system" else (Message("system", self.system), *messages)


def wording_of(keys: DatasetFields, source: str) -> Wording:
    """Read the prompt files of the dataset at `source`; ConfigError if one cannot be used."""
    prompt = _read(keys.prompt_file, f"{source}: prompt_file = {keys.prompt_file}")
    system = _read(keys.system_prompt_file, f"{source}: system_prompt_file = {keys.system_prompt_file}")
    if prompt is not None and "{}" not in prompt:
        raise ConfigError(
            f"{source}: prompt_file = {keys.prompt_file}: it has no {{}}, which is replaced by the prompt. Add {{}} to it."
        )
    if system is not None and not system.strip():
        raise ConfigError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}: the file is empty. Write the system prompt "
            "into it, or leave out the key."
        )
    return Wording(prompt, system)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Without the number of the error and the name of the file, which the message has already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def text_of(file: Path) -> str:
    """The text of a file named in the configuration. A pipe is refused: reading it could wait forever."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "Not a file")
    return file.read_text(encoding="utf-8")


def _read(file: str | None, place: str) -> str | None:
    if file is None:
        return None
    try:
        return text_of(Path(file)).removesuffix("\n")  # editors add a final newline
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read ({why_unreadable(error)}). Check the path.") from None
