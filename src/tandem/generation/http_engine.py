"""Generates with a server that speaks OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, transformers serve, or a hosted one."""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tandem.errors import ConfigError, DataError, one_line
from tandem.generation.records import Answer, EngineSettings, Request, Sampling, as_dicts
from tandem.terminal.arguments import option
from tandem.terminal.printable import SECRETS

T = TypeVar("T")
RETRIES = 4  # of a request that failed for a reason that may pass
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 60.0
FIRST_RETRIES = 1  # to connect to a server that has not answered yet
PASSING = (408, 429, 500, 502, 503, 504)
MAX_ANSWER_BYTES = 64 * 1024 * 1024
EXAMPLE_URL = "http://localhost:8000/v1"
PATHS = {"chat": "/chat/completions", "completions": "/completions"}


def check_server(settings: EngineSettings) -> str:
    """The base URL, after checking everything that does not need the server."""
    url = settings.base_url
    if url is None:
        raise ConfigError(
            f"{option('engine', 'http')}: which server? Give its address, such as {option('base_url', EXAMPLE_URL)}."
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{option('base_url', url)}: not a URL. Give one such as {EXAMPLE_URL}.")
    _api_key(settings)
    return url.rstrip("/")


def _api_key(settings: EngineSettings) -> str | None:
    name = settings.api_key_env
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(
            f"{option('api_key_env', name)}: this environment variable is not set. Set it to the key, or leave this out."
        )
    if not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"{option('api_key_env', name)}: the value is not a key: it has characters that a header cannot hold."
        )
    SECRETS.add(name, value, ())
    return value


class HttpEngine:
    """Sends one HTTP request per completion, several at a time."""

    name = "http"

    def __init__(self, model: str, sampling: Sampling, settings: EngineSettings):
        import httpx

        self._url = check_server(settings) + PATHS[settings.endpoint]
        self._model, self._sampling, self._settings = model, sampling, settings
        self._has_answered = False
        self.version = f"server {check_server(settings)}"
        key = _api_key(settings)
        timeout = httpx.Timeout(settings.timeout_seconds, connect=min(10.0, settings.timeout_seconds))
        limits = httpx.Limits(max_connections=settings.concurrency)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Redirects are not followed: they would send prompts and the key to another server.
        self._client = httpx.Client(timeout=timeout, limits=limits, headers=headers, follow_redirects=False)

    def answers(self, requests: list[Request]) -> Iterator[Answer]:
        waiting: set[Future[Answer]] = set()
        pool = ThreadPoolExecutor(self._settings.concurrency)
        try:
            for request in requests:
                if len(waiting) >= self._settings.concurrency:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (one.result() for one in done)
                waiting.add(pool.submit(self._ask, request))
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def stream(self, request: Request, write: Callable[[str], None]) -> Answer:
        return self._exchange(request, lambda response: self._read_events(request, response, write), streams=True)

    def _read_events(self, request: Request, response: Any, write: Callable[[str], None]) -> Answer:
        import httpx

        text, ids, finish = "", [], "stop"
        other = b""  # what is not an event: the answer of a server that ignores `stream`
        has_events = False
        try:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    other = (other + line.encode())[:MAX_ANSWER_BYTES]
                    continue
                if data == "[DONE]":
                    continue
                has_events = True
                choice = self._choice(data)
                if choice is None:  # a last event may hold only the usage
                    continue
                piece = self._text(choice, data)
                ids += _ids(choice) or ()
                finish = str(choice.get("finish_reason") or finish)
                text += piece
                if piece:
                    write(piece)
        except httpx.TransportError as error:  # not retried: a part of the answer is already on the screen
            raise self._unreachable(error) from None
        if has_events:
            return Answer(request, text, tuple(ids) if ids else None, finish)
        answer = self._read_answer(request, other.decode())
        write(answer.text)
        return answer

    def close(self) -> None:
        self._client.close()

    def _ask(self, request: Request) -> Answer:
        return self._read_answer(request, self._exchange(request, _limited, streams=False))

    def _read_answer(self, request: Request, body: str) -> Answer:
        choice = self._choice(body)
        if choice is None or not ("message" in choice or "text" in choice):
            raise self._garbage(body)
        return Answer(request, self._text(choice, body), _ids(choice), str(choice.get("finish_reason") or "stop"))

    def _text(self, choice: dict[str, Any], body: str) -> str:
        """The text of a choice, or the piece of it in an event. Null is an empty text, as in an answer that calls a tool."""
        part = choice.get("message") or choice.get("delta") or {}
        content = part.get("content", choice.get("text")) if isinstance(part, dict) else part
        if not (content is None or isinstance(content, str)):
            raise self._garbage(body)
        # JSON may hold a lone surrogate, which no file and no later request can.
        return (content or "").encode("utf-8", "replace").decode()

    def _payload(self, request: Request, *, streams: bool) -> dict[str, Any]:
        prompt, chosen = request.prompt.prompt, self._sampling
        if self._settings.endpoint == "completions":
            if not isinstance(prompt, str) or request.prompt.tools:
                raise DataError(
                    f"{request.prompt.place}: the prompt is a list of messages or has tools, and "
                    f"{option('endpoint', 'completions')} takes plain text. Use {option('endpoint', 'chat')}."
                )
            asked: dict[str, Any] = {"prompt": prompt}
        else:
            asked = {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_dicts(prompt)}
            if request.prompt.tools:
                asked["tools"] = list(request.prompt.tools)
        asked |= {"model": self._model, "max_tokens": chosen.max_new_tokens, "temperature": chosen.temperature}
        if not chosen.is_greedy:
            asked |= {"top_p": chosen.top_p, "seed": request.seed(chosen.seed)}
        if self._settings.token_ids:
            asked["return_token_ids"] = True
        return {**asked, "stream": True} if streams else asked

    def _exchange(self, request: Request, read: Callable[[Any], T], *, streams: bool) -> T:
        """Send a request and read the response. Failures that may pass are retried."""
        import httpx

        payload = self._payload(request, streams=streams)
        for attempt in range(RETRIES + 1):
            # A server that never answered is probably not running; one that answered before may be restarting.
            is_last = attempt == (RETRIES if self._has_answered else FIRST_RETRIES)
            try:
                with self._client.stream("POST", self._url, json=payload) as response:
                    self._has_answered = True
                    if response.status_code == 200:
                        return read(response)
                    if response.status_code not in PASSING or attempt == RETRIES:
                        raise self._refused(response.status_code, _limited(response))
                    pause = _pause(attempt, response.headers.get("retry-after"))
            except (httpx.TransportError, httpx.InvalidURL) as error:
                passing = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
                if not passing or is_last:
                    raise self._unreachable(error) from None
                pause = _pause(attempt, None)
            time.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def _choice(self, body: str) -> dict[str, Any] | None:
        """The first choice of an answer; None if its list of choices is empty."""
        try:
            choices = json.loads(body)["choices"]
            choice = choices[0] if choices else None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise self._garbage(body) from None
        if not (choice is None or isinstance(choice, dict)):
            raise self._garbage(body)
        return choice

    def _garbage(self, body: str) -> ConfigError:
        start = one_line(Exception(body))[:80]
        return ConfigError(
            f"{self._url}: not the answer of an OpenAI-compatible server ({start!r}). Check {option('base_url')}, which "
            "usually ends in /v1."
        )

    def _refused(self, status: int, body: str) -> ConfigError:
        name = self._settings.api_key_env
        if status in (401, 403):
            what = f"refuses the key in {name}" if name else "requires a key"
            hint = (
                "Check the key."
                if name
                else f"Put it into an environment variable, and name that: {option('api_key_env', metavar='NAME')}."
            )
            return ConfigError(f"{self._url}: the server {what} (HTTP {status}). {hint}")
        said = _error_text(body)
        if status == 404:
            return ConfigError(
                f"{self._url}: not found (HTTP 404{said}). Check {option('base_url')}, which usually ends in /v1, and the "
                f"name of the model: {self._model}."
            )
        if status in PASSING:
            return ConfigError(
                f"{self._url}: HTTP {status} after {RETRIES + 1} attempts{said}. Try again later, or lower "
                f"{option('concurrency')}."
            )
        return ConfigError(f"{self._url}: the server refuses the request (HTTP {status}{said}).")

    def _unreachable(self, error: Exception) -> ConfigError:
        import httpx

        if isinstance(error, httpx.ReadTimeout):
            seconds = self._settings.timeout_seconds
            return ConfigError(
                f"{self._url}: no answer within {seconds:g} seconds. Wait longer with "
                f"{option('timeout_seconds', metavar='SECONDS')}, or ask for less with {option('max_new_tokens')}."
            )
        reason = one_line(error)
        return ConfigError(
            f"{self._url}: the server does not answer ({reason}). Start it, or check {option('base_url')}."
        )


def _limited(response: Any) -> str:
    """The body of a response, up to a limit."""
    body = b""
    for part in response.iter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            break
    return body[:MAX_ANSWER_BYTES].decode("utf-8", "replace")


def _ids(choice: dict[str, Any]) -> tuple[int, ...] | None:
    """The token ids of a choice, which only some servers report."""
    ids = choice.get("token_ids")
    return tuple(ids) if isinstance(ids, list) and all(type(id) is int for id in ids) else None


def _error_text(body: str) -> str:
    """The message in an error of the server, to be put after its status; else nothing."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error if isinstance(error, str) else error["message"]
        return f": {one_line(Exception(text))}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _pause(attempt: int, asked: str | None) -> float:
    """Seconds before the next attempt: as the server asks, else 0.5, 1, 2, 4."""
    try:
        return min(LONGEST_WAIT_SECONDS, max(0.0, float(asked or "")))
    except ValueError:
        return FIRST_WAIT_SECONDS * 2**attempt
