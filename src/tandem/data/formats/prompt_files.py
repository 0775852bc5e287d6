"""A dataset's prompt files in; a Wording out, which puts their texts around every prompt."""

import errno
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import Message
from tandem.errors import ConfigError

Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts of `prompt_file` (its {} stands for the prompt) and of `system_prompt_file`."""

    prompt: str | None = None
    system: str | None = None

    def of(self, prompt: Prompt) -> Prompt:
        """A prompt, its last user turn put into the prompt text; a system turn before it if it has none."""
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
    """What the prompt files of the set at `source` say; ConfigError if one cannot be used."""
    prompt = _read(keys.prompt_file, f"{source}: prompt_file = {keys.prompt_file}")
    system = _read(keys.system_prompt_file, f"{source}: system_prompt_file = {keys.system_prompt_file}")
    if prompt is not None and "{}" not in prompt:
        raise ConfigError(
            f"{source}: prompt_file = {keys.prompt_file}: holds no {{}}, the place where the prompt goes."
        )
    if system is not None and not system.strip():
        raise ConfigError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}: is empty. Write a text into it, or leave it out."
        )
    return Wording(prompt, system)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Without the number of the error and the name of the file, which the message has already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def text_of(file: Path) -> str:
    """The text of a file that a configuration names. A pipe is no file: its reader would wait for whoever writes to it."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "Not a file")
    return file.read_text(encoding="utf-8")


def _read(file: str | None, place: str) -> str | None:
    if file is None:
        return None
    try:
        return text_of(Path(file)).removesuffix("\n")  # an editor's last newline is not meant
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not readable: {why_unreadable(error)}.") from None
