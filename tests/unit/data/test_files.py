"""The files that a data path names: files, patterns, saved datasets, folders like a hub dataset, and the hub."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hub_stub import serving, use_hub
from letters import CHAT, letter_tokenizer
from run_directories import make_run

from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.data.read import files
from tandem.data.read.files import find_files
from tandem.data.store.sets import open_sets
from tandem.data.text.template import Template
from tandem.errors import DataError

HELPSTEER = [
    {"context": [{"role": "user", "content": "hi"}], "response1": "yes", "response2": "no", "overall_preference": -2},
    {"context": [{"role": "user", "content": "so"}], "response1": "a", "response2": "b", "overall_preference": 1},
    {"context": [{"role": "user", "content": "eh"}], "response1": "a", "response2": "b", "overall_preference": 0},
]
HELPSTEER_README = """---
configs:
- config_name: preference
  data_files:
  - split: train
    path: preference/train.jsonl.gz
  - split: validation
    path: preference/validation.jsonl.gz
- config_name: edit
  data_files:
  - split: train
    path: edit/train.jsonl.gz
---
"""
TULU = [
    {
        "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}],
    }
]


def as_lines(rows: list) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def helpsteer() -> dict[str, bytes | None]:
    return {
        "README.md": HELPSTEER_README.encode(),
        "preference/train.jsonl.gz": as_lines(HELPSTEER),
        "preference/validation.jsonl.gz": as_lines(HELPSTEER[:1]),
        "edit/train.jsonl.gz": as_lines([]),
    }


def tulu(folder: Path) -> dict[str, bytes | None]:
    parquet.write_table(pa.Table.from_pylist(TULU), folder / "part.parquet")
    return {f"data/train-0000{i}-of-00002.parquet": (folder / "part.parquet").read_bytes() for i in range(2)}


def put(folder: Path, files: dict[str, bytes | None]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content or b"")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with serving() as stub:
        use_hub(stub.url, tmp_path / "hub-home", monkeypatch)
        yield stub


def opened(**data):
    config = Config.model_validate({"data": {"max_filtered_share": 1.0, **data}})
    return open_sets(config, Template(letter_tokenizer(), CHAT, {}))


# The published sets, by name


def test_helpsteer3_is_fetched_by_its_name_and_its_ties_are_counted(hub):
    hub.add("nvidia/HelpSteer3", helpsteer())
    sets = opened(
        train={"dataset_name": "HelpSteer3"}, validation={"dataset_name": "HelpSteer3", "split": "validation"}
    )
    train = sets.read["train"]
    assert train.counts.filtered == {"equal ranks": 1}
    assert [train[i].pairs for i in range(2)] == [((0, 1),), ((1, 0),)]
    assert train.place(1) == "nvidia/HelpSteer3/preference/train.jsonl.gz:2"
    assert len(sets.validation["default"]) == 1


def test_tulu3_is_fetched_by_its_name_in_all_its_parts(hub, tmp_path):
    name = "allenai/llama-3.1-tulu-3-8b-preference-mixture"
    hub.add(name, tulu(tmp_path))
    train = opened(train={"dataset_name": "Tulu3Preference"}).read["train"]
    assert [train.place(i) for i in range(2)] == [f"{name}/data/train-0000{i}-of-00002.parquet:1" for i in range(2)]
    assert train.format == "Tulu3Preference"


def test_a_copy_of_the_files_reads_like_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    copy = put(tmp_path / "HelpSteer3", helpsteer())
    train = opened(train={"data_path": str(copy), "subset": "preference", "dataset_name": "HelpSteer3"}).read["train"]
    assert len(train) == 2
    assert train.place(0) == f"{copy}/preference/train.jsonl.gz:1"
    assert len(opened(train=str(put(tmp_path / "tulu", tulu(tmp_path)))).read["train"]) == 2


def test_a_revision_of_a_hub_dataset_is_read(hub):
    hub.add("me/pairs", {"train.jsonl": b'{"prompt": "hi", "chosen": "a", "rejected": "b"}\n'}, revision="v1")
    hub.add("me/pairs", {"train.jsonl": b'{"prompt": "hi", "chosen": "a", "rejected": "b"}\n' * 3})
    assert len(opened(train={"data_path": "me/pairs", "revision": "v1"}).read["train"]) == 1
    assert len(opened(train="me/pairs").read["train"]) == 3


def test_a_mistyped_path_is_neither_a_file_nor_a_hub_dataset(hub):
    with pytest.raises(DataError) as caught:
        opened(train="data/pears")
    assert str(caught.value) == (
        f"data/pears: no such file or folder, and no public dataset of this name on {hub.url}. Check the spelling, or "
        "set HF_TOKEN for a private dataset."
    )


# Saved datasets


def save(folder: Path, rows: list[dict], **state) -> Path:
    """What `Dataset.save_to_disk` writes (version 3 to 5 of the library): an Arrow stream, and the two JSON files."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    files = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(files), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")
    return folder


def names(path: Path, **given) -> list[str]:
    return [str(file.path.relative_to(path)) for file in find_files(str(path), DatasetFields(**given))]


def refusal(path: str | Path, **given) -> str:
    with pytest.raises(DataError) as caught:
        find_files(str(path), DatasetFields(**given))
    return str(caught.value)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == (
        f"{tmp_path}/pipe: a pipe or a device, not a file or a folder. Write its rows to a file."
    )


def test_a_saved_dataset_is_its_arrow_files(tmp_path):
    saved = save(tmp_path / "saved", TULU)
    assert names(saved) == ["data-00000-of-00001.arrow"]


def test_the_configured_split_of_a_saved_dataset_is_read(tmp_path):
    save(tmp_path / "saved/train", TULU)
    save(tmp_path / "saved/test", TULU)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    assert names(tmp_path / "saved") == ["train/data-00000-of-00001.arrow"]
    assert names(tmp_path / "saved", split="test") == ["test/data-00000-of-00001.arrow"]
    assert refusal(tmp_path / "saved", split="dev") == (
        f"{tmp_path}/saved: there is no split 'dev'. Set split to one of: train, test."
    )


def test_a_single_saved_dataset_has_only_its_split(tmp_path):
    unnamed, named = save(tmp_path / "a", TULU), save(tmp_path / "b", TULU, _split="test")
    assert names(unnamed, split="train") == names(named, split="test") == ["data-00000-of-00001.arrow"]
    for saved, split in ((unnamed, "test"), (named, "train")):
        assert refusal(saved, split=split) == (f"{saved}: the saved dataset has no split {split!r}. Leave out split.")


def test_an_incomplete_or_indexed_saved_dataset_is_refused(tmp_path):
    assert refusal(save(tmp_path / "a", TULU, _indices_data_files=[{"filename": "i.arrow"}])) == (
        f"{tmp_path}/a: the dataset was saved with an index over its rows, which tandem cannot read. Call "
        "flatten_indices() and save it again."
    )
    assert refusal(save(tmp_path / "b", TULU, _data_files=[{"filename": "../x.arrow"}])) == (
        f"{tmp_path}/b: state.json names files outside this folder, which are not read. Save the dataset again."
    )
    (save(tmp_path / "c", TULU) / "data-00000-of-00001.arrow").unlink()
    assert refusal(tmp_path / "c") == (
        f"{tmp_path}/c: state.json names data-00000-of-00001.arrow, but this file is missing. Save the dataset again."
    )
    (tmp_path / "b/state.json").write_text("{", encoding="utf-8")
    assert refusal(tmp_path / "b").startswith(f"{tmp_path}/b: not a complete folder of save_to_disk (")


def test_datasets_saved_by_the_library_are_read(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the library is no part of the environment")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    program = (
        "import sys, datasets; d = datasets.Dataset.from_list([{'prompt': 'hi', 'chosen': str(i), 'rejected': 'x'} "
        "for i in range(5)]).filter(lambda row: row['chosen'] != '2'); d.save_to_disk(sys.argv[1], num_shards=2)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "saved")], check=True, capture_output=True)
    assert len(opened(train=str(tmp_path / "saved")).read["train"]) == 4


# What a file does not have


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subset": "x"}, "subset = 'x' has no effect on a file. Leave out subset."),
        ({"revision": "v1"}, "revision = 'v1' has no effect on a file. Leave out revision."),
        ({"split": "test"}, "a file has no split 'test'. Leave out split."),
    ],
)
def test_subset_split_and_revision_are_refused_for_a_file(tmp_path, given, message):
    file = tmp_path / "pairs.jsonl"
    file.write_text("{}", encoding="utf-8")
    assert refusal(file, **given) == f"{file}: {message}"
    assert find_files(str(file), DatasetFields(split="train"))[0].path == file


def test_a_folder_without_data_is_refused(tmp_path):
    assert refusal(tmp_path) == (
        f"{tmp_path}: there are no data files that tandem can read (.jsonl, .json, .csv, .parquet or .arrow, also as "
        ".gz or .zst). Convert the data to one of these and give it as data_path."
    )


def test_a_folder_with_runs_is_not_data(tmp_path):
    run = make_run(tmp_path / "runs/a")
    (tmp_path / "runs/sweep.json").touch()
    place = f"it holds runs, such as {run}, not data. Give a file of preference pairs."
    for folder, message in (
        (run, f"{run}: a run, not data. Give a file of preference pairs."),
        (tmp_path / "runs", f"{tmp_path}/runs: {place}"),
        (tmp_path, f"{tmp_path}: {place}"),
    ):
        with pytest.raises(DataError) as refused:
            find_files(str(folder), DatasetFields())
        assert str(refused.value) == message
    (tmp_path / "pairs.csv").touch()
    with pytest.raises(DataError) as refused:
        find_files(str(tmp_path), DatasetFields())
    assert str(refused.value).endswith(f"not data. Give one of its other files, such as {tmp_path}/pairs.csv.")


def test_of_a_local_folder_with_several_kinds_of_files_those_of_each_kind_are_named(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.jsonl", "b.jsonl", "more/a.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as refused:
        find_files(str(tmp_path), DatasetFields())
    assert str(refused.value) == (
        f"{tmp_path}: the split 'train' has files of several kinds (.jsonl, .parquet). Give the files of one kind as data_path: "
        f"'{tmp_path}/*.jsonl' or '{tmp_path}/more/*.parquet'."
    )
    (tmp_path / "README.md").write_text("---\nconfigs: a\n---\n")
    with pytest.raises(DataError) as refused:
        find_files(str(tmp_path), DatasetFields())
    assert str(refused.value) == (
        f"{tmp_path}: configs in README.md is malformed. Give the files you want as data_path, such as 'FOLDER/*.jsonl'."
    )


def test_a_folder_with_too_many_files_is_refused_before_all_of_it_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILES", 3)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("{}")
    assert len(names(tmp_path)) == 3
    (tmp_path / "d.txt").touch()
    for given in (tmp_path, tmp_path / "**"):
        with pytest.raises(DataError) as refused:
            find_files(str(given), DatasetFields())
        assert str(refused.value) == (
            f"{given}: over 3 files and folders, too many for a dataset. Give a file, a smaller folder or a narrower "
            "pattern."
        )
