"""The chat: turns, commands, an interrupted answer, and two models at a time."""

import errno
import io
import json

import pytest
from rich.console import Console

from tandem.errors import DataError
from tandem.generation.chat import Chat, Speaker, read_lines
from tandem.generation.records import Answer, Request


class Ready:
    """Stands for a model that is opened. Questions of more than 20 characters are too long for it."""

    def requests(self, wanted, prompts, sampling):
        if len(wanted[0].prompt[-1].content) > 20:
            raise DataError("this conversation: the prompt is too long. Shorten it.")
        return [Request(wanted[0], 0, ())]


class Parrot:
    """Answers with how many turns it sees and the last of them."""

    name, version = "parrot", "1"

    def __init__(self, interrupted=False, answer=None, finish="stop"):
        self.interrupted, self.answer, self.finish = interrupted, answer, finish

    def stream(self, request, write):
        turns = request.prompt.prompt
        for piece in (f"{len(turns)}:", turns[-1].content) if self.answer is None else [self.answer]:
            write(piece)
            if self.interrupted:
                raise KeyboardInterrupt
        return Answer(request, "", None, self.finish)


def chat(*parrots, width=100):
    """A chat with parrots, and what it has written."""
    out = io.StringIO()
    speakers = [Speaker(f"model {i}", Ready(), parrot) for i, parrot in enumerate(parrots or (Parrot(),))]
    return Chat(speakers, Console(file=out, width=width), out.write, lambda text: out.write(f"<stderr>{text}")), out


def talk(*lines, parrots=(), width=100):
    one, out = chat(*parrots, width=width)
    going = [one.handle(line) for line in lines]
    return out.getvalue(), going[-1]


def test_every_turn_is_answered_with_the_turns_before_it():
    assert talk("hi", "  ho  ", "", "hey")[0] == "1:hi\n3:ho\n5:hey\n"


def test_reset_and_undo_forget_turns():
    assert talk("hi", "ho", "/undo", "hey")[0] == "1:hi\n3:ho\nTook back the last question.\n3:hey\n"
    assert talk("hi", "/reset", "ho")[0] == "1:hi\nNew conversation.\n1:ho\n"
    assert talk("/undo")[0] == "Nothing to take back: the conversation is empty.\n"


def test_undo_is_advised_after_a_question_that_is_too_long_only_if_there_is_one_to_take_back():
    refused = "<stderr>error: this conversation: the prompt is too long. Shorten it."
    room = " Or make room: /undo takes back the question before it, /reset all of them."
    said = talk("long " * 5, "/undo", "hi", "long " * 5, "/undo", "ho")[0]
    assert said == (
        f"{refused}\nNothing to take back: the conversation is empty.\n1:hi\n{refused}{room}\n"
        "Took back the last question.\n1:ho\n"
    )


def test_a_system_message_is_the_first_turn_and_survives_a_reset():
    said = talk("/system Be brief.", "hi", "/reset", "ho", "/system", "hey")[0]
    assert said == "System message: Be brief.\n2:hi\nNew conversation.\n2:ho\nNo system message.\n3:hey\n"


def test_exit_ends_the_chat_and_an_unknown_command_does_not():
    assert talk("/exit") == ("", False)
    assert talk("/nosuch x") == (
        "<stderr>error: /nosuch is not a command. Use /reset, /system TEXT, /undo, /save FILE, /help, /exit; to send this "
        "line, begin it with a space.\n",
        True,
    )
    assert talk(" /nosuch x")[0] == "1:/nosuch x\n"


def test_an_interrupted_answer_is_kept_as_far_as_it_came_and_the_chat_continues():
    parrot = Parrot(interrupted=True)
    one, out = chat(parrot)
    assert one.handle("hi")
    parrot.interrupted = False
    assert one.handle("ho")
    assert out.getvalue() == "1: [stopped]\n3:ho\n"


def test_a_conversation_is_saved_to_a_new_file_only(tmp_path):
    file = tmp_path / "chat.jsonl"
    said, _ = talk("/system Be brief.", "hi", f"/save {file}", f"/save {file}", "/save")
    assert said.splitlines()[2:] == [
        f"Saved to {file}.",
        f"<stderr>error: /save {file}: this file exists. Choose another name.",
        "<stderr>error: /save: no file. Write /save FILE.",
    ]
    [saved] = map(json.loads, file.read_text().splitlines())
    assert saved["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "2:hi"},
    ]


def test_a_conversation_is_saved_with_the_system_message_of_its_last_answer(tmp_path):
    said, _ = talk("/system Be kind.", "hi", "/system", f"/save {tmp_path}/a", "ho", f"/save {tmp_path}/b", "/undo")
    assert said.splitlines()[3:] == [
        f"Saved to {tmp_path}/a.",
        "3:ho",
        f"Saved to {tmp_path}/b with the system message of the last answer; earlier answers had another one.",
        "Took back the last question.",
    ]
    [kind, none] = [json.loads((tmp_path / name).read_text())["messages"][0] for name in "ab"]
    assert (kind, none) == ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"})


def test_a_conversation_is_not_saved_under_the_name_of_another_format(tmp_path):
    said, goes_on = talk(f"/save {tmp_path}/x.csv")
    assert (said, goes_on) == (
        f"<stderr>error: /save {tmp_path}/x.csv: JSON lines are written, which a .csv file does not hold. Give a name that ends "
        f"in .jsonl, such as {tmp_path}/x.jsonl.\n",
        True,
    )
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_reported_and_nothing_is_left(tmp_path, monkeypatch):
    said, goes_on = talk(f"/save {tmp_path}/no/x", "/save a\0b", "/save ~nobody\0")
    assert (said.splitlines(), goes_on) == (
        [
            f"<stderr>error: /save {tmp_path}/no/x: No such file or directory. Choose another file.",
            "<stderr>error: /save a\0b: not a name of a file. Choose another name.",
            "<stderr>error: /save ~nobody\0: not a name of a file. Choose another name.",
        ],
        True,
    )

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    one, out = chat()
    assert one.handle(f"/save {tmp_path}/x")
    assert out.getvalue() == (
        f"<stderr>error: /save {tmp_path}/x: the disk is full. Free some space, or choose another file.\n"
    )
    assert one.exit_code == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # of the locale, such as C
def test_a_line_that_is_not_utf_8_is_left_out_and_the_next_one_is_answered(encoding):
    lines = read_lines(io.TextIOWrapper(io.BytesIO(b"/system caf\xe9\nna\xc3\xafve\n"), encoding=encoding))
    one, out = chat()
    for line in lines:
        assert one.handle(line)
    assert out.getvalue() == (
        "<stderr>error: this line is not UTF-8 at byte 11, so it was left out: /system caf\\xe9. Write it in UTF-8.\n"
        "1:na\u00efve\n"
    )
    assert one.exit_code == 3


@pytest.mark.parametrize(("width", "num_lines"), [(80, 2), (79, 4)])
def test_two_models_answer_side_by_side_from_80_columns_on(width, num_lines):
    said, _ = talk("hi", parrots=(Parrot(), Parrot()), width=width)
    assert len(said.splitlines()) == num_lines
    assert (said.splitlines()[0].split() == ["model", "0", "model", "1"]) == (num_lines == 2)


@pytest.mark.parametrize("width", [80, 79])
def test_answers_of_two_models_are_shown_as_generate_shows_them(width):
    parrots = (Parrot(answer="\n\n\n"), Parrot(answer="  hello\n", finish="length"))
    lines = talk("hi", parrots=parrots, width=width)[0].splitlines()
    if width == 80:
        assert lines[1].split("  ")[0] == "(white space)"
        assert lines[1].strip().endswith("hello [cut at the limit]")
        assert len(lines) == 2
    else:
        assert lines == ["model 0:", "(white space)", "model 1:", "hello [cut at the limit]"]


@pytest.mark.parametrize(
    ("answer", "finish", "shown"),
    [
        ("\n\n\n", "stop", "(white space)\n"),
        ("\n \n", "length", "(white space) [cut at the limit]\n"),
        ("", "stop", "(empty)\n"),
        ("\n\nhello", "stop", "hello\n"),
    ],
)
def test_an_answer_that_shows_nothing_is_named_as_generate_names_it(answer, finish, shown):
    one, out = chat(Parrot(answer=answer, finish=finish))
    one.handle("hi")
    assert out.getvalue() == shown
    [speaker] = one._speakers
    assert speaker.turns[-1].content == answer  # the conversation has what the model wrote


def test_the_exit_code_is_that_of_the_first_error():
    one, _ = chat()
    assert [one.handle(line) for line in ("hi", "/help")] == [True, True]
    assert one.exit_code == 0
    one.handle("/nosuch")
    assert one.exit_code == 2
    one.handle("hi")
    assert one.exit_code == 2


def test_lines_of_a_pipe_are_read_to_the_end():
    assert list(read_lines(io.StringIO("hi\r\nho\n"))) == ["hi", "ho"]
