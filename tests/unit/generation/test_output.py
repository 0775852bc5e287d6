"""The output file: lines in the `scored` format, continued after a kill, never mixed with lines of other settings."""

import json
from pathlib import Path

import pytest

from tandem.cli.generate import _show
from tandem.errors import ConfigError, DataError, DiskError
from tandem.generation.generate import Generation
from tandem.generation.output import OutputFile, generated_by, record_of
from tandem.generation.records import Answer, Prompt, Request, make_sampling
from tandem.generation.show import as_json, summary

pytestmark = pytest.mark.usefixtures("of_a_command")

PROMPTS = [Prompt(i, f"p.jsonl:{i + 1}", f"Question {i}", row={"source": "x"}) for i in range(3)]


def made(model="m", **sampling):
    settings = make_sampling(**{"temperature": 1.0, "num_samples": 2, **sampling}).as_dict()
    return generated_by(model, "abc", {"engine": "transformers"}, "transformers 5", settings, "fff")


def record(index=0, by=None):
    prompt = PROMPTS[index]
    answers = [Answer(Request(prompt, sample, (1, 2)), f"text {sample}", (5, 2), "stop") for sample in (1, 0)]
    return record_of(prompt, answers, by or made())


def test_a_record_holds_the_completions_in_order_with_ids_and_finish_reason():
    assert record()["completions"] == [
        {"completion": "text 0", "completion_ids": [5, 2], "finish": "stop", "score": None},
        {"completion": "text 1", "completion_ids": [5, 2], "finish": "stop", "score": None},
    ]
    assert (record()["id"], record()["prompt"], record()["row"]) == (0, "Question 0", {"source": "x"})


def test_an_incomplete_file_is_continued_and_a_line_that_was_cut_off_is_removed(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        file.write(record(2))
        file.write(record(0))
    complete = out.read_bytes()
    out.write_bytes(complete + b'{"id": 1, "prompt": "Que')
    with OutputFile(out) as file:
        assert sorted(file.done(made(), PROMPTS)) == [0, 2]
        assert out.read_bytes() == complete
        file.write(record(1))
        file.sort(["m"])
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [0, 1, 2]


def test_lines_of_two_models_are_kept_apart_and_sorted_by_model(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        for one in (record(1, made("base")), record(0, made("base")), record(0)):
            file.write(one)
        file.sort(["m", "base"])
    with OutputFile(out) as file:
        assert sorted(file.done(made("base"), PROMPTS)) == [0, 1]
        assert sorted(file.done(made(), PROMPTS)) == [0]
        with pytest.raises(ConfigError) as error:
            file.refuse_other_models(["m"])
    assert str(error.value) == f"{out}:2: made with the model base, not m. Choose another file."


def test_a_model_under_another_path_is_told_how_to_continue(tmp_path):
    out, model = tmp_path / "out.jsonl", tmp_path / "m"
    model.mkdir()
    with OutputFile(out) as file:
        file.write(record(0, made(f"{tmp_path}/../{tmp_path.name}/m")))
    with OutputFile(out) as file, pytest.raises(ConfigError) as error:
        file.refuse_other_models([str(model)])
    other = f"{tmp_path}/../{tmp_path.name}/m"
    assert (
        str(error.value)
        == f"{out}:1: made with the model {other}, which is {model}. To continue the file, give it as {other}."
    )


def test_a_file_of_other_settings_is_refused_with_the_differences(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        file.write(record())
    with OutputFile(out) as file, pytest.raises(ConfigError) as error:
        file.done(made(temperature=0.5, seed=3), PROMPTS)
    assert str(error.value) == (
        f"{out}:1: made with other settings (temperature 1.0, now 0.5, seed 0, now 3). Choose another file, or the same "
        "settings."
    )


def test_other_prompts_are_said_to_be_other_prompts(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        file.write(record())
    with OutputFile(out) as file, pytest.raises(ConfigError, match=r"made with other settings \(other prompts\)\."):
        file.done({**made(), "prompts": "0123"}, PROMPTS)


def test_other_versions_of_tandem_and_the_engine_continue_a_file(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        file.write(record(0, {**made(), "tandem": "0.0.1", "engine_version": "transformers 4"}))
    with OutputFile(out) as file:
        assert list(file.done(made(), PROMPTS)) == [0]


@pytest.mark.parametrize("text", ["my notes\n", '{"prompt": "Hi", "chosen": "a", "rejected": "b"}\n', "no newline"])
def test_a_file_that_is_not_an_output_is_refused_and_unchanged(tmp_path, text):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(DataError) as error:
        OutputFile(out)
    assert str(error.value) == (
        f"{out}:1: not a line that tandem generate wrote, and files are never overwritten. Choose another file."
    )
    assert out.read_text() == text


@pytest.mark.parametrize("ending", [".csv", ".PARQUET", ".jsonl.gz"])
def test_a_name_of_another_format_is_refused(tmp_path, ending):
    with pytest.raises(ConfigError, match=r"JSON lines are written, which a \.\w+ file does not hold"):
        OutputFile(tmp_path / f"out{ending}")
    assert not list(tmp_path.iterdir())


def test_a_file_in_a_missing_folder_and_one_in_use_are_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        OutputFile(tmp_path / "no" / "out.jsonl")
    assert str(error.value) == (
        f"--out {tmp_path}/no/out.jsonl: {tmp_path}/no does not exist. Create this folder, or choose another file."
    )
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match=r"notes is a file, not a folder\. Choose another file\."):
        OutputFile(tmp_path / "notes" / "out.jsonl")
    with pytest.raises(ConfigError) as error:
        OutputFile(tmp_path)
    assert (
        str(error.value)
        == f"--out {tmp_path}: a folder. Give the name of a file, such as {tmp_path}/completions.jsonl."
    )
    with OutputFile(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match=r"another process is writing to it\."):
        OutputFile(tmp_path / "out.jsonl")


def test_a_full_disk_ends_in_one_message_and_loses_no_line(tmp_path):
    out = tmp_path / "out.jsonl"
    with OutputFile(out) as file:
        file.write(record(0))

        file._file.close()
        file._file = Path("/dev/full").open("ab")  # noqa: SIM115, closing it fails too
        with pytest.raises(DiskError) as error:
            file.write(record(1))
    assert str(error.value) == (
        f"{out}: the disk is full. Every line before is complete: free some space, and repeat the same command to continue."
    )
    assert len(out.read_text().splitlines()) == 1


def test_a_file_without_a_line_is_removed_after_an_error_unless_it_was_there_before(tmp_path):
    (tmp_path / "mine.jsonl").touch()
    for name in ("mine.jsonl", "new.jsonl"):
        with pytest.raises(DiskError), OutputFile(tmp_path / name) as file:
            file._file.close()
            file._file = Path("/dev/full").open("ab")  # noqa: SIM115
            file.write(record(0))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


@pytest.mark.parametrize(
    ("num_resumed", "num_new", "text"),
    [
        (0, 3, "Wrote out.jsonl: 3 prompts with 2 completions each by a.\n1.0 s. Completions: 2 cut at the limit."),
        (
            1,
            2,
            "Wrote out.jsonl: 3 prompts with 2 completions each by a. 1 of its 3 lines was there already, 2 are new.\n"
            "1.0 s. New completions: 2 cut at the limit.",
        ),
        (
            2,
            1,
            "Wrote out.jsonl: 3 prompts with 2 completions each by a. 2 of its 3 lines were there already, 1 is new.\n"
            "1.0 s. New completions: 2 cut at the limit.",
        ),
        (
            3,
            0,
            "out.jsonl was complete already, so nothing was generated: 3 prompts with 2 completions each by a.",
        ),
    ],
)
def test_the_summary_counts_the_lines_that_were_there_and_those_that_are_new(num_resumed, num_new, text):
    made = Generation(
        models=("a",),
        num_prompts=3,
        num_skipped=0,
        num_resumed=num_resumed,
        num_tokens=0,
        seconds=1.0,
        finishes={"length": 2} if num_new else {},
        out=Path("out.jsonl"),
    )
    assert summary(made, 2) == text
    assert (as_json(made)["num_resumed"], as_json(made)["num_new"]) == (num_resumed, num_new)


@pytest.mark.parametrize(
    ("text", "finish", "is_quiet", "printed"),
    [
        ("\n\n", "stop", False, "(white space)\n"),
        ("", "length", False, "(empty) [cut at the limit]\n"),
        ("", "stop", True, "\n"),
        ("hello", "stop", False, "\n"),
    ],
)
def test_a_streamed_completion_that_shows_nothing_is_named_as_in_a_table(capsys, text, finish, is_quiet, printed):
    request = Request(PROMPTS[0], 0, (1, 2))
    records = (record_of(PROMPTS[0], [Answer(request, text, None, finish)], made(num_samples=1)),)
    counts = {"num_prompts": 1, "num_skipped": 0, "num_resumed": 0, "num_tokens": 0, "seconds": 1.0}
    generation = Generation(models=("m",), records=records, **counts)
    _show(generation, PROMPTS[:1], 1, as_json=False, quiet=is_quiet, streamed=True)
    assert capsys.readouterr().out == printed
