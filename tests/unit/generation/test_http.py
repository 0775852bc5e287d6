"""The engine http: what is sent, what is retried, and a clear message for every way in which a server can fail."""

import socket

import pytest
from chat_server import chat_server

from tandem.data.formats.preference import Message
from tandem.errors import ConfigError, DataError
from tandem.generation import http_engine
from tandem.generation.http_engine import HttpEngine
from tandem.generation.records import EngineSettings, Prompt, Request, make_sampling
from tandem.terminal.printable import SECRETS

pytestmark = pytest.mark.usefixtures("of_a_command")

KEY = "sk-very-secret-key"


@pytest.fixture
def server():
    with chat_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_engine, "FIRST_WAIT_SECONDS", 0.001)
    yield
    SECRETS.clear()


def engine(server, sampling=None, **settings):
    url = server if isinstance(server, str) else server.url
    return HttpEngine("tiny", sampling or make_sampling(), EngineSettings(name="http", base_url=url, **settings))


def requests(*prompts, samples=1):
    return [Request(Prompt(i, f"p:{i + 1}", p), s, ()) for i, p in enumerate(prompts) for s in range(samples)]


def failure(one, *prompts):
    with pytest.raises(ConfigError) as error:
        list(one.answers(requests(*(prompts or ("hi",)))))
    return str(error.value)


def test_texts_and_messages_are_sent_as_chats_with_the_sampling_settings(server):
    turns = (Message("system", "Be brief."), Message("user", "ho"))
    sampling = make_sampling(temperature=0.5, top_p=0.9, max_new_tokens=7, seed=3)
    found = list(engine(server, sampling).answers(requests("hi", turns)))
    assert sorted((one.request.prompt.index, one.text, one.ids, one.finish) for one in found) == [
        (0, "HI", None, "stop"),
        (1, "HO", None, "stop"),
    ]
    assert set(server.paths) == {"/v1/chat/completions"}
    sent = sorted(server.requests, key=lambda one: len(one["messages"]))
    assert sent[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert sent[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    chosen = {key: sent[0][key] for key in ("model", "max_tokens", "temperature", "top_p")}
    assert chosen == {"model": "tiny", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9}


def test_every_sample_has_its_own_seed_which_is_the_same_in_the_next_call(server):
    one = engine(server, make_sampling(temperature=1.0, num_samples=3, seed=3))
    for _ in range(2):
        assert len(list(one.answers(requests("hi", samples=3)))) == 3
    seeds = [asked["seed"] for asked in server.requests]
    assert len(set(seeds)) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])


def test_the_completions_endpoint_gets_plain_text_and_refuses_messages(server):
    one = engine(server, endpoint="completions", token_ids=True)
    [answer] = one.answers(requests("hi"))
    assert (answer.text, answer.ids, server.paths) == ("HI", (72, 73), ["/v1/completions"])
    with pytest.raises(DataError) as error:
        list(one.answers(requests((Message("user", "hi"),))))
    assert str(error.value) == (
        "p:1: the prompt is a list of messages or has tools, and --endpoint completions takes plain text. Use --endpoint chat."
    )


def test_an_answer_is_streamed_in_pieces(server):
    pieces = []
    answer = engine(server).stream(requests("hello")[0], pieces.append)
    assert (pieces, answer.text, answer.finish) == (list("HELLO"), "HELLO", "length")


PLAIN = '{\n "choices": [{"message": {"content": "Hi %s"}, "finish_reason": "length", "token_ids": [1, 2]}]\n}'


def test_the_answer_of_a_server_that_does_not_stream_is_written_in_one_piece(server):
    server.body = (PLAIN % "\\u00e9 \\ud800").encode()
    pieces = []
    answer = engine(server).stream(requests("hello")[0], pieces.append)
    assert (pieces, answer.text, answer.finish, answer.ids) == (["Hi é ?"], "Hi é ?", "length", (1, 2))
    [answer] = engine(server).answers(requests("hello"))
    assert (answer.text, answer.finish, answer.ids) == ("Hi é ?", "length", (1, 2))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>It works</html>",
        '{"ok": true}',
        '{"choices": []}',
        '{"choices": ["x"]}',
        '{"choices": [{"finish_reason": "stop"}]}',
        '{"choices": [{"message": {"content": 3}}]}',
        '{"choices": [{"message": 3}]}',
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_without_a_text_is_refused_whether_it_was_to_be_streamed_or_not(server, body, streams):
    server.body = body.encode()
    pieces = []
    with pytest.raises(ConfigError) as error:
        if streams:
            engine(server).stream(requests("hi")[0], pieces.append)
        else:
            list(engine(server).answers(requests("hi")))
    assert str(error.value) == (
        f"{server.url}/chat/completions: not the answer of an OpenAI-compatible server ({body or 'Exception'!r}). Check "
        "--base-url, which usually ends in /v1."
    )
    assert pieces == []


def test_an_event_without_a_text_is_refused(server):
    for event in ('{"choices": ["x"]}', '{"choices": [{"delta": {"content": 3}}]}', '{"error": {"message": "busy"}}'):
        server.body = f"data: {event}\n\n".encode()
        with pytest.raises(ConfigError) as error:
            engine(server).stream(requests("hi")[0], print)
        assert f"not the answer of an OpenAI-compatible server ({event!r})" in str(error.value)


def test_a_server_that_takes_too_long_is_reported_with_the_option_that_waits_longer(server):
    server.seconds = 0.5
    one = engine(server, timeout_seconds=0.05)
    assert failure(one) == (
        f"{server.url}/chat/completions: no answer within 0.05 seconds. Wait longer with --timeout SECONDS, or ask for less "
        "with --max-new-tokens."
    )


def test_no_more_requests_than_the_limit_are_under_way(server):
    assert len(list(engine(server, concurrency=2).answers(requests(*"abcdefgh")))) == 8
    assert 1 <= server.most_at_once <= 2


def test_failures_that_may_pass_are_retried(server):
    server.failures = [503, 429, 500]
    [answer] = engine(server).answers(requests("hi"))
    assert (answer.text, len(server.requests)) == ("HI", 4)


def test_a_server_that_stays_busy_is_reported_after_five_attempts(server):
    server.failures = [503] * 9
    assert failure(engine(server)) == (
        f"{server.url}/chat/completions: HTTP 503 after 5 attempts: busy. Try again later, or lower --concurrency."
    )
    assert len(server.requests) == 5


def test_a_server_that_is_down_is_reported():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    assert failure(engine(url)) == (
        f"{url}/chat/completions: the server does not answer ([Errno 111] Connection refused). Start it, or check --base-url."
    )


@pytest.mark.parametrize(
    "body", [b"<html>It works</html>", b'{"ok": true}', b'{"choices": [{"message": {"content": 3}}]}']
)
def test_an_answer_that_is_not_one_is_reported_with_its_beginning(server, body):
    server.body = body
    assert failure(engine(server)) == (
        f"{server.url}/chat/completions: not the answer of an OpenAI-compatible server ({body.decode()!r}). Check --base-url, "
        "which usually ends in /v1."
    )


def test_a_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    server.key = KEY
    [answer] = engine(server, api_key_env="MY_KEY").answers(requests("hi"))
    assert answer.text == "HI"
    server.key = "another"
    message = failure(engine(server, api_key_env="MY_KEY"))
    assert message == (
        f"{server.url}/chat/completions: the server refuses the key in MY_KEY (HTTP 401). Check the key."
    )
    assert len(server.requests) == 2  # a refused key is not tried again


def test_a_server_that_requires_a_key_says_which_option_gives_one(server):
    server.key = KEY
    assert failure(engine(server)) == (
        f"{server.url}/chat/completions: the server requires a key (HTTP 401). Put it into an environment variable, and name "
        "that: --api-key-env NAME."
    )


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            404,
            "not found (HTTP 404: busy). Check --base-url, which usually ends in /v1, and the name of the model: tiny.",
        ),
        (400, "the server refuses the request (HTTP 400: busy)."),
    ],
)
def test_a_refused_request_is_reported_with_the_words_of_the_server(server, status, message):
    server.failures = [status]
    assert failure(engine(server)) == f"{server.url}/chat/completions: {message}"


def test_a_redirect_is_not_followed_so_that_no_other_server_gets_prompts_or_the_key(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with chat_server() as other:
        server.failures, server.location = [307], f"{other.url}/chat/completions"
        assert failure(engine(server, api_key_env="MY_KEY")) == (
            f"{server.url}/chat/completions: the server refuses the request (HTTP 307: busy)."
        )
        assert other.requests == []


def test_a_key_that_the_server_repeats_is_replaced_by_the_name_of_its_variable(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    server.failures, server.said = [400], f"no rights for {KEY}"
    assert failure(engine(server, api_key_env="MY_KEY")) == (
        f"{server.url}/chat/completions: the server refuses the request (HTTP 400: no rights for $MY_KEY)."
    )
