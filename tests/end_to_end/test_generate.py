"""`tandem generate` and `tandem chat` from the command line: a file that can be continued and trained on, and a conversation."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from chat_server import chat_server
from models import MODEL
from vllm_stub import stub_python

from tandem.cli import main as cli
from tandem.generation.target import FoundModel

SAMPLED = ("-n", "2", "--temperature", "1", "--seed", "3", "--max-new-tokens", "6")


@pytest.fixture
def tandem(monkeypatch, capsys):
    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Hi", "topic": "greeting"}, {"messages": [{"role": "user", "content": "How far is the moon?"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "Why?"}]))
    return file


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_an_output_is_continued_after_a_kill_and_is_data_once_it_has_scores(tandem, tmp_path, prompts):
    out = tmp_path / "out.jsonl"
    command = ("generate", MODEL, "--prompts", prompts, *SAMPLED, "--out", out)
    code, printed, _ = tandem(*command)
    assert (code, printed.splitlines()[0]) == (0, f"Wrote {out}: 3 prompts with 2 completions each by {MODEL}.")
    complete = out.read_text()
    found = lines(out)
    assert [one["id"] for one in found] == [0, 1, 2]
    assert found[0]["row"] == {"topic": "greeting"}
    assert found[1]["prompt"] == [{"role": "user", "content": "How far is the moon?"}]
    made = found[0]["generated_by"]
    assert (made["model"], made["engine"]) == (str(MODEL), "transformers")
    assert made["sampling"] == {"num_samples": 2, "max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "seed": 3}

    # Killed in the middle of the second line: the same command writes the same file.
    out.write_text(complete[: len(complete.splitlines()[0]) + 40])
    code, printed, _ = tandem(*command, "--json")
    summary = json.loads(printed)
    assert (code, summary["num_resumed"], summary["num_prompts"]) == (0, 1, 3)
    assert out.read_text() == complete

    code, _, error = tandem("generate", MODEL, "--prompts", prompts, *SAMPLED[:-1], "7", "--out", out)
    assert (code, error.splitlines()[-1]) == (
        2,
        f"tandem: error: {out}:1: made with other settings (max_new_tokens 6, now 7). Choose another file, or the same "
        "settings.",
    )

    code, _, error = tandem("inspect", out, "--model", MODEL)
    assert (code, "completions[0] has no score (or reward)" in error) == (3, True)
    for one in found:
        for number, completion in enumerate(one["completions"]):
            completion["score"] = number
    out.write_text("".join(json.dumps(one) + "\n" for one in found))
    code, printed, _ = tandem("inspect", out, "--model", MODEL, "--json")
    shown = json.loads(printed)
    assert (code, shown["format"], shown["accepted"], shown["pairs"]) == (0, "scored", 3, [[1, 0]])


def test_a_single_prompt_is_streamed_and_control_characters_are_escaped(tandem):
    code, printed, error = tandem("generate", MODEL, "--prompt", "Hi", "--max-new-tokens", "5")
    assert (code, error) == (0, "Loading torch and transformers (a few seconds)\n")
    [record] = map(
        json.loads, tandem("generate", MODEL, "--prompt", "Hi", "--max-new-tokens", "5", "--json")[1].splitlines()
    )
    assert printed == f"{record['completions'][0]['completion']} [cut at the limit]\n"


def test_two_models_are_compared_side_by_side(tandem, prompts, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    code, printed, _ = tandem("generate", MODEL, "--compare", "embedded", "--prompts", prompts, "--max-new-tokens", "3")
    assert code == 0
    assert printed.splitlines()[0] == f"{prompts}:1: Hi"
    assert printed.count("embedded") == 3


def test_a_server_answers_prompts_and_a_chat(tandem, prompts):
    with chat_server() as server:
        options = ("--engine", "http", "--base-url", server.url)
        code, printed, error = tandem("generate", "any", "--prompts", prompts, *options, "--json")
        found = [json.loads(line) for line in printed.splitlines()]
        assert (code, error) == (0, "")
        assert [one["completions"][0]["completion"] for one in found] == ["HI", "HOW FAR IS THE MOON?", "WHY?"]
        assert found[0]["completions"][0]["completion_ids"] is None
        code, printed, _ = tandem("chat", "any", *options, stdin="hi\nevil \x1b[2J\n")
        assert (code, printed) == (0, "HI [cut at the limit]\nEVIL \\x1b[2J [cut at the limit]\n")
    code, _, error = tandem(
        "generate", "any", "--prompt", "Hi", "--engine", "http", "--base-url", "http://127.0.0.1:9/v1"
    )
    assert code == 2
    assert error == (
        "tandem: error: http://127.0.0.1:9/v1/chat/completions: the server does not answer ([Errno 111] Connection refused). "
        "Start it, or check --base-url.\n"
    )


def test_a_prompt_and_a_chat_use_the_answer_of_a_server_that_does_not_stream(tandem):
    with chat_server() as server:
        server.body = b'{"choices": [{"message": {"content": "Hello."}}]}'
        options = ("any", "--engine", "http", "--base-url", server.url, "--quiet")
        assert tandem("generate", *options, "--prompt", "Hi") == (0, "Hello.\n", "")
        assert tandem("chat", *options, stdin="Hi\n") == (0, "Hello.\n", "")
        server.body = b'{"choices": []}'
        for command, stdin in ((("generate", *options, "--prompt", "Hi"), ""), (("chat", *options), "Hi\n")):
            code, _, error = tandem(*command, stdin=stdin)
            assert (code, "not the answer of an OpenAI-compatible server" in error) == (2, True)


def test_a_longest_completion_beyond_the_context_is_reported(tandem, prompts, monkeypatch):
    monkeypatch.setattr(FoundModel, "max_tokens", 33)  # the prompts have 12, 17 and 13 tokens
    end = f"{MODEL} is made for at most 33 tokens, prompt included, so completions"
    command = ("generate", MODEL, "--prompts", prompts, "--quiet", "--max-new-tokens")
    assert tandem(*command, "16")[2] == ""
    assert (
        tandem(*command, "17")[2]
        == f"warning: --max-new-tokens 17: {end} to 1 of 3 prompts end after at most 16 tokens.\n"
    )
    assert (
        tandem(*command, "500")[2]
        == f"warning: --max-new-tokens 500: {end} to 3 of 3 prompts end after at most 21 tokens.\n"
    )
    code, _, error = tandem("generate", MODEL, "--prompt", "Hi", "--quiet")
    assert (code, error) == (0, f"warning: --max-new-tokens 256: {end} end after at most 21 tokens.\n")
    assert tandem("chat", MODEL, "--quiet", "--max-new-tokens", "32") == (0, "", "")
    assert tandem("chat", MODEL, "--quiet", "--max-new-tokens", "33") == (
        0,
        "",
        f"warning: --max-new-tokens 33: {end} end after at most 32 tokens.\n",
    )


@pytest.mark.parametrize("line", ["Hi", "/nosuch"])
def test_a_chat_from_a_pipe_ends_with_the_code_of_its_error(tandem, line):
    options = ("--engine", "http", "--base-url", "http://127.0.0.1:9/v1", "--quiet")
    code, printed, error = tandem("chat", "any", *options, stdin=f"{line}\n/help\n")
    assert code == 2
    assert printed.startswith("  /reset")  # the lines after it are still handled
    assert error.startswith("error: ") and error.count("\n") == 1


def test_vllm_answers_in_another_interpreter(tandem, tmp_path):
    python = stub_python(tmp_path / "environment")
    code, printed, _ = tandem(
        "generate", MODEL, "--prompt", "Hi", "--engine", "vllm", "--vllm-python", python, "--json"
    )
    record = json.loads(printed)
    assert (code, record["generated_by"]["engine_version"]) == (0, "vLLM 0.stub")
    assert record["completions"][0]["finish"] == "stop"


def test_a_chat_answers_every_line_of_a_pipe(tandem, tmp_path):
    saved = tmp_path / "chat.jsonl"
    turns = f"Hi\nWhy?\n/save {saved}\n/exit\nnot sent\n"
    code, printed, error = tandem("chat", MODEL, "--max-new-tokens", "4", stdin=turns)
    assert (code, printed.splitlines()[-1]) == (0, f"Saved to {saved}.")
    assert error.splitlines()[-1] == f"{MODEL}, greedy, up to 4 tokens. /help lists commands."
    [conversation] = lines(saved)
    assert [one["role"] for one in conversation["messages"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "embedded"], 2, "Give either --prompts FILE or --prompt TEXT."),
        (
            ["generate", "embedded", "--prompt", "a", "--prompts", "b"],
            2,
            "Give either --prompts FILE or --prompt TEXT.",
        ),
        (
            ["generate", "embedded", "--prompts", "no.jsonl"],
            3,
            "no.jsonl: no such file or folder, and not the name of a hub dataset (org/name).",
        ),
        (
            ["generate", "embedded", "--prompts", "empty.jsonl"],
            3,
            "empty.jsonl: no prompts. Give a file with one prompt per line, or with rows that have a key prompt or messages.",
        ),
        (
            ["chat", "embedded", "--engine", "vllm", "--chat-template", "none"],
            2,
            "--engine vllm: chat shows answers word by word, which this engine cannot. Use transformers, or a vLLM server with "
            "--engine http; tandem generate --prompt TEXT takes vllm.",
        ),
        (
            ["generate", "embedded", "--prompt", "Hi", "--engine", "vllm"],
            2,
            "--engine vllm: vLLM needs a Python environment of its own. Give its interpreter: --vllm-python /path/to/bin/python.",
        ),
        (
            ["generate", ".", "--prompt", "Hi"],
            2,
            "MODEL .: neither a model (it has no config.json) nor a run (it has no config.yaml). Give a model folder, a hub "
            "name, or a run directory.",
        ),
        (
            ["generate", ".", "--prompt", "Hi", "--engine", "x"],
            2,
            "--engine x: not an engine. Give transformers, vllm or http.",
        ),
        (
            ["generate", "embedded", "--prompt", "Hi", "--batch-size", "x"],
            2,
            "--batch-size x: give auto or a number of sequences from 1.",
        ),
    ],
)
def test_a_mistake_ends_in_one_message(tandem, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert tandem(*arguments) == (code, "", f"tandem: error: {message}\n")


def test_a_chat_without_standard_input_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tandem", "chat", "embedded"])
    monkeypatch.setattr(sys, "stdin", None)  # as Python sets it where standard input is closed
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "tandem: error: standard input is closed, so no line can be read. Start the chat on a terminal, or pipe lines in.\n",
    )


def test_a_model_without_a_template_cannot_chat(tandem):
    assert tandem("chat", MODEL, "--chat-template", "none", "--quiet") == (
        2,
        "",
        f"tandem: error: MODEL {MODEL}: no chat template, so it cannot hold a conversation. Give one with --chat-template "
        "FILE.jinja, or continue a text with tandem generate --prompt TEXT.\n",
    )


NO_HEAVY_MODULES = """
import sys
import time
from collections.abc import Callable
from tandem.cli.main import main
try:
    main()
finally:
    assert not {"torch", "transformers"} & {name for name, module in sys.modules.items() if module}
"""


def test_mistakes_and_servers_need_no_heavy_modules(tmp_path):
    command = [sys.executable, "-c", NO_HEAVY_MODULES, "generate"]
    ended = subprocess.run([*command, "./no", "--prompt", "Hi"], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (
        2,
        "tandem: error: MODEL ./no: no such directory. Give a model folder, a hub name, or a run directory.\n",
    )
    with chat_server() as server:
        options = ["any", "--prompt", "Hi", "--engine", "http", "--base-url", server.url, "--quiet"]
        ended = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "HI\n", "")


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_chat():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "tandem", "chat", str(MODEL), "--max-new-tokens", "450", "--quiet"]
    # A shell starts background jobs with SIGINT ignored, which children inherit: restored, as in a terminal.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    signal.signal(signal.SIGINT, ignored)
    os.close(theirs)

    def read_until(wanted: str, again: Callable[[], None] = lambda: None) -> str:
        """Read until a text is shown. `again`: repeated each second, because a signal just before readline waits is lost."""
        shown, end = "", time.monotonic() + 120
        while wanted not in shown:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 1000).decode("utf-8", "replace")
            else:
                again()
        return shown

    def interrupt() -> None:
        process.send_signal(signal.SIGINT)

    try:
        read_until("> ")
        os.write(ours, b"Hi\n")
        read_until("Hi\r\n")
        os.read(ours, 1000)  # the answer has begun
        interrupt()
        assert "[stopped]" in read_until("> ")
        interrupt()
        read_until("(Ctrl-D or /exit ends the chat)", again=interrupt)
        os.write(ours, b"/undo\n")
        read_until("Took back the last question.\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
