"""Generates with vLLM in a separate process and Python environment, because vLLM requires its own version of torch."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.generation import vllm_worker
from tandem.generation.records import Answer, Request, Sampling
from tandem.generation.target import FoundModel
from tandem.generation.text import completion_text
from tandem.isolation import isolated_environment
from tandem.terminal.arguments import option

BLOCK = 256  # requests sent at a time: a kill loses at most these
ENDING_SECONDS = 30.0
SHOWN_LINES = 5  # of the worker's own output, in a message


def check_vllm(python: str | None) -> str:
    """The interpreter that has vLLM, before anything is loaded."""
    if python is None:
        raise ConfigError(
            f"{option('engine', 'vllm')}: vLLM needs a Python environment of its own. Give its interpreter: "
            f"{option('vllm_python', '/path/to/bin/python')}."
        )
    if not Path(python).is_file():
        raise ConfigError(
            f"{option('vllm_python', python)}: no such file. Give the interpreter of the environment that has vLLM."
        )
    return python


class VllmEngine:
    """Starts `vllm_worker.py` with another interpreter and exchanges JSON lines with it."""

    name = "vllm"

    def __init__(self, found: FoundModel, stops: tuple[int, ...], sampling: Sampling, python: str):
        if found.target.adapter is not None:
            raise ConfigError(
                f"{option('engine', 'vllm')}: {found.target.name} is an adapter. Export the run with "
                f"{option('form', 'merged')}, or use {option('engine', 'transformers')}."
            )
        self._found, self._stops, self._sampling, self._python = found, stops, sampling, python
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in `close`
        try:
            self._process = subprocess.Popen(
                [python, str(Path(vllm_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=isolated_environment(),
            )
        except OSError as error:
            raise ConfigError(f"{option('vllm_python', python)}: cannot be started ({error.strerror}).") from None
        self._send({"model": str(found.source.folder), "dtype": "auto", "max_model_len": found.max_tokens})
        self.version = f"vLLM {self._receive()['ready']}"

    def answers(self, requests: list[Request]) -> Iterator[Answer]:
        for start in range(0, len(requests), BLOCK):
            block = requests[start : start + BLOCK]
            self._send({"requests": [self._as_dict(number, request) for number, request in enumerate(block)]})
            while "done" not in (answer := self._receive()):
                ids, finish = answer["token_ids"], answer["finish"]
                text = completion_text(self._found.template.tokenizer, ids, self._stops)
                yield Answer(block[answer["id"]], text, tuple(ids), finish)

    def stream(self, request: Request, write: Callable[[str], None]) -> Answer:
        """The worker answers with complete texts, so this is written in one piece."""
        [answer] = self.answers([request])
        write(answer.text)
        return answer

    def close(self) -> None:
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _as_dict(self, number: int, request: Request) -> dict[str, Any]:
        limit, asked = self._found.max_tokens, self._sampling.max_new_tokens
        return {
            "id": number,
            "prompt_ids": list(request.ids),
            "max_tokens": asked if limit is None else min(asked, limit - len(request.ids)),
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "seed": None if self._sampling.is_greedy else request.seed(self._sampling.seed),
            "stop_ids": list(self._stops),
        }

    def _send(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the worker ended; reading its answer reports why
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError
        except ValueError:
            raise self._failed(
                "ended without an answer" if not line else "does not answer as vllm_worker.py does"
            ) from None
        if "error" in answer:
            hint = " Install vLLM there." if "No module named 'vllm'" in answer["error"] else ""
            raise self._failed(f"failed: {answer['error']}", hint)
        return answer

    def _failed(self, what: str, hint: str = "") -> ConfigError:
        """An error with the last lines that the worker printed."""
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        printed = self._log.read().decode("utf-8", "replace").strip().splitlines()[-SHOWN_LINES:]
        lines = "\n".join(["", *printed])
        return ConfigError(f"{option('engine', 'vllm')}: the process of {self._python} {what}.{hint}{lines}")
