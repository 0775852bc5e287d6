"""A stub of the Hugging Face hub on the loopback interface. It serves datasets from memory and refuses them as the hub does."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROUTE = re.compile(r"(/api)?/datasets/([^/]+/[^/]+)(?:/(?:revision|resolve)/([^/]+))?(?:/(.+))?")


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes | None]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)  # branch, tag or commit -> commit
    token: str | None = None  # of a private repository: required in every request
    gated: bool = False  # listed for everyone, but files are refused
    status: int = 200  # any other status is the response to every request


class StubHub(ThreadingHTTPServer):
    """`url` is its HF_ENDPOINT; `requests` are the methods and paths of requests for datasets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []

    def add(self, name: str, files: dict[str, bytes | None], revision: str = "main", **traits: Any) -> str:
        """Add a commit to a branch of a dataset, which is created if necessary, and return it. A None file is only listed."""
        repository = self.repositories.setdefault(name, Repository(**traits))
        commit = hashlib.sha1(repr((name, files)).encode()).hexdigest()
        repository.commits[commit] = files
        repository.revisions |= {revision: commit, commit: commit}
        return commit


class _Handler(BaseHTTPRequestHandler):
    server: StubHub

    def do_GET(self) -> None:
        route = ROUTE.fullmatch(urlsplit(self.path).path)
        if route is None:  # the library also requests things that do not matter here
            return self._send(404)
        self.server.requests.append(f"{self.command} {self.path}")
        repository = self.server.repositories.get(route[2])
        if repository is None:
            return self._send(404, error="RepoNotFound")
        if repository.token and self.headers["Authorization"] != f"Bearer {repository.token}":
            return self._send(401, error="RepoNotFound")
        if repository.status != 200:
            return self._send(repository.status)
        commit = repository.revisions.get(unquote(route[3] or "main"))
        if commit is None:
            return self._send(404, error="RevisionNotFound")
        return self._listing(repository, commit) if route[1] else self._file(repository, commit, unquote(route[4]))

    do_HEAD = do_GET

    def _listing(self, repository: Repository, commit: str) -> None:
        siblings = [{"rfilename": file} for file in repository.commits[commit]]
        self._send(200, json.dumps({"id": "it", "sha": commit, "siblings": siblings}).encode())

    def _file(self, repository: Repository, commit: str, file: str) -> None:
        content = repository.commits[commit].get(file)
        if repository.gated:
            self._send(403, error="GatedRepo")
        elif content is None:
            self._send(404, error="EntryNotFound")
        else:
            self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _send(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, error: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[StubHub]:
    with StubHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def use_hub(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library use the hub at `url` and store everything under `home`.

    It reads its environment when it is first imported, so in this process its constants are set. In other processes,
    HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE do the same.
    """
    from huggingface_hub import close_session, constants

    close_session()  # its client may use the proxies of the environment
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
