"""Lines of metrics.jsonl, as tandem writes them and as a stranger might."""

import json

import pytest

from tandem.report.reporter import Reporter
from tandem.training.checkpoint.ranking import records_in

RECORD = {
    "step": 3,
    "split": "validation-default",
    "loss": 0.5,
    "grad_norm": float("nan"),
    "num_pairs": 8,
    "data": "ab",
}


def test_what_is_written_is_read():
    (found,) = records_in(json.dumps(RECORD).encode() + b"\n")
    assert repr(found) == repr(RECORD)


@pytest.mark.parametrize(
    "line",
    [
        *("", "null", "1", "[]", "{}", '{"step": 1}', "[" * 100_000, "9" * 5000, "\x00"),
        *(json.dumps({**RECORD, "step": step}) for step in (-1, 1.0, "1", None, True, 10**400, [1])),
        *(json.dumps({**RECORD, "split": split}) for split in (None, 1, ["train"], {"a": 1})),
        *(json.dumps({**RECORD, "loss": loss}) for loss in (None, "0.5", [0.5], {}, 10**400)),
        *(json.dumps({**RECORD, "data": data}) for data in (None, 1, ["ab"])),
    ],
)
def test_a_line_that_is_not_a_record_is_none(line):
    other = json.dumps(RECORD)
    found = records_in(f"{other}\n{line}\n{other}\n".encode())
    assert [one is None for one in found] == [False, True, False]


def test_bytes_that_are_not_text_are_not_a_record():
    assert records_in(b"\xf0\x28\n") == [None]


def test_the_result_as_json_leaves_out_damaged_lines(tmp_path, capsys):
    line = {"step": 4, "split": "train", "loss": 0.5}
    damaged = b'{"step": 4}\n[1]\n\xf0\n{"step": 5, "split": 7}\n'
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(line).encode() + b"\n" + damaged)
    Reporter("silent", as_json=True).result(tmp_path)
    assert json.loads(capsys.readouterr().out) == {"run_dir": str(tmp_path), "final": {"train": line}}


def test_the_result_as_json_of_a_run_without_metrics(tmp_path, capsys):
    Reporter("silent", as_json=True).result(tmp_path)
    assert json.loads(capsys.readouterr().out) == {"run_dir": str(tmp_path), "final": {}}
