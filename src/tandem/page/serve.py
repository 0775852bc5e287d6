"""Serves the page of a run to the browser of this machine, and follows the run while it trains.

Only the loopback address is listened on, only GET is answered, and only the page and its version exist: no path reaches the
disk. The Host header must name the loopback address, so that a page elsewhere cannot read it through a name that it controls
(DNS rebinding).
"""

import errno
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from tandem.errors import ConfigError, TandemError
from tandem.page.write import run_page
from tandem.runs import open_run, refuse_other_than_run, status_of

ADDRESS = "127.0.0.1"
PORTS = range(8765, 8785)  # tried in this order if no port is given
WATCHED = ("metrics.jsonl", "verdicts.json", "pairs.json", "setup.json", "config.yaml")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class LivePage:
    """The page of a run, made again only if the run has written something."""

    def __init__(self, run: Path):
        self._run, self._lock, self._made, self._page = run, Lock(), "", ""

    def version(self) -> str:
        """A text that changes when the run writes something."""
        return "-".join([status_of(self._run), *(_written(self._run / name) for name in WATCHED)])

    def page(self) -> str:
        with self._lock:
            if (now := self.version()) != self._made:
                self._page, self._made = run_page(open_run(self._run), live=True), now
            return self._page


def _written(path: Path) -> str:
    try:
        found = path.lstat()
    except OSError:
        return "0"
    return f"{found.st_mtime_ns:x}.{found.st_size:x}"


class _Handler(BaseHTTPRequestHandler):
    server: "PageServer"  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30  # seconds for a request to arrive
    server_version, sys_version = "tandem", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._answer(403, "text/plain", "Open this page by its address: the Host header names another server.\n")
        elif self.path not in ("/", "/version"):
            self._answer(404, "text/plain", "There is only one page here: /\n")
        else:
            self._answer_page()

    def _answer_page(self) -> None:
        try:
            if self.path == "/version":
                self._answer(200, "text/plain", self.server.live.version())
            else:
                self._answer(200, "text/html", self.server.live.page())
        except TandemError as error:  # the run was moved or removed
            self._answer(503, "text/plain", f"{error}\n")

    def _answer(self, code: int, kind: str, content: str) -> None:
        body = content.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a request every two seconds is not worth a line


class PageServer(ThreadingHTTPServer):
    """Serves one run. `with` closes it; `serve_forever` answers until then."""

    daemon_threads = True

    def __init__(self, live: LivePage, port: int):
        super().__init__((ADDRESS, port), _Handler)
        self.live = live
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        if self.server_port == 80:
            self.hosts |= {ADDRESS, "localhost"}

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that closes its connection is not an error


def serve_run(run: str | Path, port: int | None = None) -> PageServer:
    """Open a server for the page of a run, on the loopback address. port: None takes the first free one of PORTS."""
    folder = Path(run)
    refuse_other_than_run(folder)
    for candidate in PORTS if port is None else [port]:
        try:
            return PageServer(LivePage(folder), candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port is not None:
                why = "in use" if error.errno == errno.EADDRINUSE else error.strerror
                raise ConfigError(f"--port {candidate}: {why}. Choose another port, or leave out --port.") from None
    raise ConfigError(f"the ports {PORTS[0]} to {PORTS[-1]} are in use. Choose another one with --port N.")
