"""Runs the conversation of `tandem chat` with one model, or with two models that get the same turns."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console

from tandem.config.sections.section import expand_home
from tandem.data.formats.preference import Message
from tandem.errors import ConfigError, DataError, DiskError, TandemError, full_disk
from tandem.generation.generate import Named, Opened, opened
from tandem.generation.records import Engine, EngineSettings, Prompt, Sampling, as_dicts
from tandem.generation.show import STOPPED, show_answers, shown_completion, streamed_end
from tandem.storage.cache import refuse_other_suffix, replacing
from tandem.terminal.arguments import option
from tandem.terminal.printable import byte_that_is_not_utf8

COMMANDS = {
    "/reset": "start a new conversation; the system message stays",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/undo": "take back the last question and its answer",
    "/save FILE": "write the conversation to a new JSONL file",
    "/help": "list these commands",
    "/exit": "end the chat, like Ctrl-D",
}


@dataclass(slots=True, eq=False)
class Speaker:
    """A model that answers, and the conversation from its side."""

    name: str
    ready: Opened
    engine: Engine
    turns: list[Message] = field(default_factory=list)  # without the system message


def refuse_vllm(engine: EngineSettings) -> None:
    """Raise ConfigError if the engine is vllm, which gives no answer before it is complete."""
    if engine.name == "vllm":
        raise ConfigError(
            f"{option('engine', 'vllm')}: chat shows answers word by word, which this engine cannot. Use transformers, or a "
            f"vLLM server with {option('engine', 'http')}; tandem generate --prompt TEXT takes vllm."
        )


@contextmanager
def speakers(models: Sequence[Named], sampling: Sampling, engine: EngineSettings) -> Iterator[list[Speaker]]:
    """Load the models that take part."""
    with ExitStack() as stack:
        loaded = []
        for model in models:
            ready = stack.enter_context(opened(model, sampling, engine))
            if ready.found is not None and ready.found.template.source is None:
                raise ConfigError(
                    f"{option(model.argument, model.name)}: no chat template, so it cannot hold a conversation. Give one "
                    f"with {option('chat_template', metavar='FILE.jinja')}, or continue a text with tandem generate "
                    "--prompt TEXT."
                )
            loaded.append((model, ready))
        yield [Speaker(model.name, ready, stack.enter_context(closing(ready.start()))) for model, ready in loaded]


class Chat:
    """Sends lines to the speakers and shows their answers. Lines that begin with / are commands."""

    def __init__(
        self,
        speakers: Sequence[Speaker],
        console: Console,
        write: Callable[[str], None],
        write_error: Callable[[str], None],
    ):
        self._speakers, self._console, self._write, self._write_error = speakers, console, write, write_error
        self._system: str | None = None
        self._system_of_answers: list[str | None] = []  # of each question so far
        self.exit_code = 0  # of the first turn or command that failed

    def handle(self, line: str) -> bool:
        """Answer a line, or obey a command. Returns False if the chat ends."""
        name, _, argument = line.strip().partition(" ")
        try:
            if (at := byte_that_is_not_utf8(line)) is not None:
                shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                raise DataError(f"this line is not UTF-8 at byte {at}, so it was left out: {shown}. Write it in UTF-8.")
            if line.startswith("/"):
                return self._command(name, argument.strip())
            if line.strip():
                self._ask(line.strip())
        except TandemError as error:
            self._report(error)
        except KeyboardInterrupt:  # before or after an answer, for instance while the conversation is rendered
            self._say("[stopped]")
        return True

    def _command(self, name: str, argument: str) -> bool:
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            for speaker in self._speakers:
                speaker.turns.clear()
            self._system_of_answers.clear()
            self._say("New conversation.")
        elif name == "/system":
            self._system = argument or None
            self._say(f"System message: {argument}" if argument else "No system message.")
        elif name == "/undo":
            self._undo()
        elif name == "/save":
            self._save(argument)
        elif name == "/help":
            for command, meaning in COMMANDS.items():
                self._say(f"  {command:<13} {meaning}")
        else:
            raise ConfigError(
                f"{name} is not a command. Use {', '.join(COMMANDS)}; to send this line, begin it with a space."
            )
        return True

    def _undo(self) -> None:
        if not self._speakers[0].turns:
            self._say("Nothing to take back: the conversation is empty.")
            return
        for speaker in self._speakers:
            del speaker.turns[-2:]
        self._system_of_answers.pop()
        self._say("Took back the last question.")

    def _save(self, file: str) -> None:
        if not file:
            raise ConfigError("/save: no file. Write /save FILE.")
        # With the system message that the last answer was given under, even if another one has been set since.
        system = self._system_of_answers[-1] if self._system_of_answers else self._system
        lines = [
            json.dumps({"messages": as_dicts(_messages(system, speaker)), "model": speaker.name}, ensure_ascii=False)
            for speaker in self._speakers
        ]
        if "\0" in file:
            raise ConfigError(f"/save {file}: not a name of a file. Choose another name.")
        path = Path(expand_home(file))
        refuse_other_suffix(f"/save {file}", path)
        if os.path.lexists(path):
            raise ConfigError(f"/save {file}: this file exists. Choose another name.")
        try:
            with replacing(path) as opened_file:
                opened_file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            if full_disk(error):
                raise DiskError(f"/save {file}: the disk is full. Free some space, or choose another file.") from None
            raise ConfigError(f"/save {file}: {error.strerror}. Choose another file.") from None
        note = " with the system message of the last answer; earlier answers had another one"
        self._say(f"Saved to {file}{note if len(set(self._system_of_answers)) > 1 else ''}.")

    def _ask(self, text: str) -> None:
        """Send a question to every speaker. If one cannot answer, nobody's conversation changes."""
        answers: dict[str, tuple[str, str]] = {}
        for speaker in self._speakers:
            answers[speaker.name] = self._answer(speaker, text)
        if len(self._speakers) > 1:
            texts = {name: [shown_completion(answer, end)] for name, (answer, end) in answers.items()}
            show_answers(texts, self._console)
        for speaker in self._speakers:
            speaker.turns += [Message("user", text), Message("assistant", answers[speaker.name][0])]
        self._system_of_answers.append(self._system)

    def _answer(self, speaker: Speaker, text: str) -> tuple[str, str]:
        """The answer of a speaker and how it ended, shown while it is generated if nobody else answers. Ctrl-C ends it early."""
        turns = (*_messages(self._system, speaker), Message("user", text))
        prompt = Prompt(0, "this conversation", turns)
        one = Sampling(num_samples=1)
        try:
            [request] = speaker.ready.requests([prompt], [prompt], one)
        except DataError as error:
            # The question that failed is not part of the conversation, so /undo makes room only if there is an earlier one.
            room = (
                " Or make room: /undo takes back the question before it, /reset all of them." if speaker.turns else ""
            )
            raise DataError(f"{error}{room}") from None
        pieces: list[str] = []

        def write(piece: str) -> None:
            has_begun = any(earlier.strip() for earlier in pieces)
            pieces.append(piece)
            if len(self._speakers) == 1:
                self._write(piece if has_begun else piece.lstrip())

        try:
            finish: str = speaker.engine.stream(request, write).finish
        except KeyboardInterrupt:
            finish = STOPPED
        if len(self._speakers) == 1:
            self._write(f"{streamed_end(''.join(pieces), finish)}\n")
        return "".join(pieces), finish

    def _report(self, error: TandemError) -> None:
        self._write_error(f"error: {error}\n")
        self.exit_code = self.exit_code or error.exit_code

    def _say(self, text: str) -> None:
        self._write(f"{text}\n")


def _messages(system: str | None, speaker: Speaker) -> tuple[Message, ...]:
    return (*([Message("system", system)] if system else []), *speaker.turns)


def read_lines(stream: TextIO, prompt: str = "> ") -> Iterator[str]:
    """Yield lines until the end of the input (Ctrl-D). On a terminal lines can be edited, and Ctrl-C drops the current one."""
    if isinstance(stream, io.TextIOWrapper):  # in any locale; a line that is not UTF-8 is refused by `Chat.handle`
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not stream.isatty():
        yield from (line.rstrip("\r\n") for line in stream)
        return
    with suppress(ImportError):
        import readline  # noqa: F401, makes input() edit lines and remember them
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends the chat)", file=sys.stderr)
        except EOFError:
            print()
            return
