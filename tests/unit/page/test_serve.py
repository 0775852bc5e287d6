"""The server of `tandem watch`: this machine only, GET only, one page only."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from run_directories import make_run, record

from tandem.errors import ConfigError
from tandem.page.serve import PageServer, serve_run


@pytest.fixture
def served(tmp_path) -> Iterator[PageServer]:
    with serve_run(make_run(tmp_path / "run", finished=False), _free_port()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def ask(server: PageServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_the_page_is_served_with_a_policy_that_lets_it_ask_this_server_only(served):
    status, page, headers = ask(served)
    assert status == 200 and "<body data-live>" in page
    assert "default-src 'none'" in page and "connect-src 'self'" in page
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert ask(served, host=f"localhost:{served.server_port}")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example"]
)
def test_another_name_for_this_server_is_refused(served, host):
    status, body, _ = ask(served, host=host)
    assert (status, "<" in body) == (403, False)


@pytest.mark.parametrize("path", ["/config.yaml", "/../config.yaml", "/?x", "/metrics.jsonl", "/%2e%2e/etc/passwd"])
def test_no_path_reaches_the_disk(served, path):
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_answered(served, method):
    assert ask(served, method=method)[0] == 501


def test_only_the_loopback_address_is_listened_on(served):
    assert served.server_address[0] == "127.0.0.1"
    assert served.url == f"http://127.0.0.1:{served.server_port}/"


def test_a_new_step_changes_the_version_and_the_page(served, tmp_path):
    before, page = ask(served, "/version")[1], ask(served)[1]
    assert ask(served, "/version")[1] == before
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(11)) + "\n")
    assert ask(served, "/version")[1] != before
    assert ask(served)[1] != page


def test_a_run_that_was_removed_is_reported(served, tmp_path):
    (tmp_path / "run").rename(tmp_path / "moved")
    status, body, _ = ask(served)
    assert status == 503 and "there is no such directory" in body


def test_what_cannot_be_served_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such directory"):
        serve_run(tmp_path / "none")
    run = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            serve_run(run, port)
    assert str(error.value) == f"--port {port}: in use. Choose another port, or leave out --port."


def test_without_a_port_the_first_free_one_is_taken(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = _free_port()
        monkeypatch.setattr("tandem.page.serve.PORTS", [taken.getsockname()[1], free])
        with serve_run(run) as server:
            assert server.server_port == free
