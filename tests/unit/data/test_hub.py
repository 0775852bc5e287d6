"""Hub datasets: fetched once, found again offline, and refused with one-line messages."""

import errno
import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_stub import StubHub, serving, use_hub
from huggingface_hub import constants, errors

from tandem.data.read.hub import HubFiles, hub_files, is_hub_name
from tandem.errors import DataError

NAME = "acme/pairs"
ONE = {"train.jsonl": b'{"a": 1}\n'}
HELPSTEER3 = b"""---
license: cc-by-4.0
configs:
- config_name: preference
  default: true
  data_files:
  - split: train
    path: preference/train.jsonl.gz
  - split: validation
    path: preference/validation.jsonl.gz
- config_name: feedback
  data_files:
  - split: train
    path: feedback/train.jsonl.gz
---
# HelpSteer3
"""
TULU3 = b"""---
dataset_info:
  splits:
  - name: train
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "tandem"))
    with serving() as hub:
        use_hub(hub.url, tmp_path / "huggingface", monkeypatch)
        yield hub


def fetch(
    name: str = NAME, *, subset: str | None = None, split: str | None = None, revision: str | None = None
) -> HubFiles:
    return hub_files(name, subset=subset, split=split, revision=revision)


def refusal(name: str = NAME, **given: str) -> str:
    with pytest.raises(DataError) as caught:
        fetch(name, **given)
    assert caught.value.__cause__ is None  # no traceback of the library's
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def contents(found: HubFiles) -> list[bytes]:
    return [path.read_bytes() for path in found.files.values()]


def remembered(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (tmp_path / "tandem" / "hub").glob("*")]


@pytest.mark.parametrize("name", ["nvidia/HelpSteer3", "allenai/llama-3.1-tulu-3-8b-preference-mixture", "a/b_c.d"])
def test_a_name_of_the_form_org_slash_name_is_a_hub_dataset(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "path",
    [
        *["data/train.jsonl", "data/train.jsonl.gz", "data/t.json.zst", "data/t.CSV", "data/t.parquet", "data/t.arrow"],
        *["data/train-*", "data/train?", "data/[ab]", "embedded", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "a/.b"],
        *["a/b--c", "a/b..c", "a/b-", "a-/b", "a/b.git", "a/bä", "a/b c", "a/b\n", f"a/{'b' * 97}", ""],
    ],
)
def test_files_patterns_and_illegal_names_are_not_hub_datasets(path):
    assert not is_hub_name(path)


def test_a_path_that_exists_is_not_a_hub_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("acme/pairs")
    (tmp_path / "acme" / "pairs").mkdir(parents=True)
    assert not is_hub_name("acme/pairs")
    assert is_hub_name("acme/others")


def test_subset_and_split_are_read_from_the_readme(hub: StubHub):
    files = {
        "README.md": HELPSTEER3,
        "preference/train.jsonl.gz": gzip.compress(b"train"),
        "preference/validation.jsonl.gz": gzip.compress(b"validation"),
        "feedback/train.jsonl.gz": gzip.compress(b"feedback"),
    }
    commit = hub.add("nvidia/HelpSteer3", files)
    asked = {
        "preference/train.jsonl.gz": [{}, {"subset": "preference"}, {"subset": "preference", "split": "train"}],
        "preference/validation.jsonl.gz": [{"split": "validation"}, {"subset": "preference", "split": "validation"}],
        "feedback/train.jsonl.gz": [{"subset": "feedback"}],
    }
    for file, ways in asked.items():
        for given in ways:
            found = fetch("nvidia/HelpSteer3", **given)
            assert found.commit == commit
            assert contents(found) == [files[file]]
            assert next(iter(found.files.values())).parts[-2:] == tuple(
                file.split("/")
            )  # the suffix determines how a file is read


def test_shards_are_in_order_and_nothing_else_is_fetched(hub: StubHub, tmp_path):
    commit = hub.add(
        "allenai/tulu",
        {
            "data/train-00001-of-00002.parquet": b"second",
            "data/train-00000-of-00002.parquet": b"first",
            "README.md": TULU3,
            ".gitattributes": b"",
            "extra/notes.parquet": b"",
        },
    )
    found = fetch("allenai/tulu")
    assert contents(found) == [b"first", b"second"]
    kept = tmp_path / "huggingface" / "hub" / "datasets--allenai--tulu" / "snapshots" / commit
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()) == [
        "README.md",
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
    ]
    assert next(iter(found.files.values())) == kept / "data/train-00000-of-00002.parquet"


def test_without_a_readme_file_names_determine_the_splits(hub: StubHub):
    hub.add(NAME, {"test.jsonl": b"test", "train.jsonl": b"train"})
    assert contents(fetch()) == [b"train"]
    assert contents(fetch(split="test")) == [b"test"]


def test_the_second_time_only_the_listing_is_requested(hub: StubHub):
    commit = hub.add(NAME, ONE)
    first = fetch()
    place = f"/datasets/{NAME}/resolve/{commit}/train.jsonl"
    assert hub.requests == [f"GET /api/datasets/{NAME}", f"HEAD {place}", f"GET {place}"]
    assert fetch() == first
    assert hub.requests[3:] == [f"GET /api/datasets/{NAME}"]


def test_a_revision_is_a_branch_or_a_commit(hub: StubHub):
    old = hub.add(NAME, {"train.jsonl": b"old"})
    new = hub.add(NAME, {"train.jsonl": b"new"})
    branch = hub.add(NAME, {"train.jsonl": b"branch"}, revision="refs/pr/1")
    for revision, commit, content in [
        (None, new, b"new"),
        ("main", new, b"new"),
        (old, old, b"old"),
        ("refs/pr/1", branch, b"branch"),
    ]:
        found = fetch(revision=revision)
        assert (found.commit, contents(found)) == (commit, [content])


def test_a_private_dataset_needs_a_token(hub: StubHub, monkeypatch):
    hub.add(NAME, ONE, token="hf_right")
    missing = (
        f"{NAME}: no such file or folder, and no public dataset of this name on {hub.url}. Check the spelling, or "
        "set HF_TOKEN for a private dataset."
    )
    assert refusal() == missing
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal() == missing
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert contents(fetch()) == [ONE["train.jsonl"]]


def test_a_missing_dataset_is_refused_with_a_hint_for_private_ones(hub: StubHub):
    assert refusal("acme/pears") == (
        f"acme/pears: no such file or folder, and no public dataset of this name on {hub.url}. Check the spelling, "
        "or set HF_TOKEN for a private dataset."
    )


def test_a_gated_dataset_is_refused_with_the_page_of_its_terms(hub: StubHub):
    hub.add(NAME, ONE, gated=True)
    assert refusal() == (
        f"{NAME}: access requires accepting the owner's terms. Accept them at {hub.url}/datasets/{NAME}, then set "
        "HF_TOKEN to a token of that account."
    )


def test_an_unknown_revision_is_refused(hub: StubHub):
    hub.add(NAME, ONE)
    assert refusal(revision="v2") == (
        f"{NAME}: there is no revision 'v2' on {hub.url}. Give a branch, a tag or a commit."
    )


def test_available_subsets_and_splits_are_listed_nearest_first(hub: StubHub):
    hub.add(NAME, {"README.md": HELPSTEER3, "preference/train.jsonl.gz": b"", "feedback/train.jsonl.gz": b""})
    assert refusal(subset="feedbacks") == (
        f"{NAME}: there is no subset 'feedbacks'. Set subset to one of: feedback, preference."
    )
    assert refusal(split="valid") == f"{NAME}: there is no split 'valid'. Set split to one of: validation, train."


def test_a_slice_of_a_split_is_refused_before_any_request(hub: StubHub):
    hub.add(NAME, ONE)
    assert refusal(split="train[:10%]") == (
        f"{NAME}: split=train[:10%] is a slice of a split, which is not supported. Give the name of a split, such as "
        "split=train."
    )
    assert hub.requests == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_reported_but_not_printed(hub: StubHub, monkeypatch, status):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add(NAME, ONE, status=status)
    assert refusal() == f"{NAME}: {hub.url} refused access (HTTP {status}). Check HF_TOKEN."


@pytest.mark.parametrize("token", ["hf_secret\x0b1", "hf_secretä"])
def test_a_token_with_invalid_characters_is_reported_but_not_printed(hub: StubHub, monkeypatch, token):
    hub.add(NAME, ONE)
    monkeypatch.setenv("HF_TOKEN", token)
    assert refusal() == f"{NAME}: HF_TOKEN contains characters that are not allowed in a token. Set it again."


def test_any_other_answer_is_reported_by_its_http_status(hub: StubHub):
    hub.add(NAME, ONE, status=500)
    assert refusal() == f"{NAME}: {hub.url} answered HTTP 500. Try again later, or give local files as data_path."


def test_an_incomplete_answer_of_the_hub_is_refused(hub: StubHub, monkeypatch):
    info = huggingface_hub.DatasetInfo(id=NAME, sha=None, siblings=[], private=False, downloads=0, likes=0, tags=[])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    assert refusal() == (
        f"{NAME}: cannot be fetched from {hub.url} (the hub's answer has no commit or no files). Check HF_ENDPOINT and "
        "HF_HOME if they are set."
    )


def test_an_unreachable_hub_is_reported_even_if_files_were_fetched_earlier(hub: StubHub, monkeypatch):
    hub.add(NAME, ONE)
    fetch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert refusal() == (
            f"{NAME}: no such file or folder, and {url} cannot be reached ([Errno {errno.ECONNREFUSED}] Connection "
            "refused). Check the path, or the connection, or set HF_HUB_OFFLINE=1 to use files fetched by an earlier run."
        )


def test_a_hub_that_fails_between_listing_and_download_is_reported_as_unreachable(hub: StubHub, monkeypatch):
    def lost(*_, **__):
        raise errors.LocalEntryNotFoundError("Please\ncheck") from errors.HTTPError("timed\nout")

    hub.add(NAME, ONE)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lost)
    assert refusal() == (
        f"{NAME}: no such file or folder, and {hub.url} cannot be reached (timed out). Check the path, or the "
        "connection, or set HF_HUB_OFFLINE=1 to use files fetched by an earlier run."
    )


def test_a_full_disk_during_a_download_is_reported_as_a_full_disk(hub: StubHub, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add(NAME, ONE)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(OSError, match="No space left on device"):
        fetch()


@pytest.mark.parametrize("file", ["../train.jsonl", "/train.jsonl", "data/../../train.jsonl"])
def test_files_with_paths_outside_the_dataset_are_not_fetched(hub: StubHub, file):
    hub.add(NAME, {**ONE, file: b""})
    assert refusal() == (
        f"{NAME}: the hub lists {file!r}, a path outside the dataset's folder. Nothing was fetched. Give local files as "
        "data_path instead."
    )
    assert hub.requests == [f"GET /api/datasets/{NAME}"]


def test_offline_the_same_files_are_found_without_a_request(hub: StubHub, monkeypatch):
    hub.add(NAME, {**ONE, "test.jsonl": b"test"})
    train, test = fetch(), fetch(split="test")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (fetch(), fetch(split="test")) == (train, test)
    assert hub.requests == []


def test_offline_the_commit_is_the_one_fetched_last(hub: StubHub, monkeypatch, tmp_path):
    hub.add(NAME, {"train.jsonl": b"old"})
    fetch()
    commit = hub.add(NAME, {"train.jsonl": b"new"})
    last = fetch()
    assert remembered(tmp_path) == [
        {"dataset": NAME, "subset": None, "split": None, "revision": None, "commit": commit, "files": ["train.jsonl"]}
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == last


NOT_FETCHED = (
    f"{NAME}: HF_HUB_OFFLINE is set, and no earlier run fetched this dataset with the same subset, split and revision. "
    "Run once without HF_HUB_OFFLINE, or give local files as data_path."
)


def test_offline_a_dataset_that_was_not_fetched_is_refused(hub: StubHub, monkeypatch):
    hub.add(NAME, ONE)
    fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for other in ({"subset": "default"}, {"split": "train"}, {"revision": "main"}):
        assert refusal(**other) == NOT_FETCHED
    assert refusal("acme/other") == NOT_FETCHED.replace(NAME, "acme/other")


def test_an_incomplete_download_is_not_recorded(hub: StubHub, monkeypatch, tmp_path):
    hub.add(NAME, {"train-0.jsonl": b"{}", "train-1.jsonl": None})
    assert refusal() == f"{NAME}: {hub.url} answered HTTP 404. Try again later, or give local files as data_path."
    assert remembered(tmp_path) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == NOT_FETCHED


def test_a_cache_that_cannot_be_written_does_not_stop_the_download(hub: StubHub, monkeypatch, tmp_path):
    hub.add(NAME, ONE)
    (tmp_path / "tandem").write_text("")  # a file in place of the folder: nobody can write below it, not even root
    assert contents(fetch()) == [ONE["train.jsonl"]]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == NOT_FETCHED


def refuse_to_write(number: int):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_an_old_record_that_cannot_be_replaced_is_not_used_offline(hub: StubHub, monkeypatch, number):
    hub.add(NAME, {"train.jsonl": b"old"})
    fetch()
    hub.add(NAME, {"train.jsonl": b"new"})
    monkeypatch.setattr("tandem.data.read.hub.replacing", refuse_to_write(number))
    assert contents(fetch()) == [b"new"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == NOT_FETCHED


def test_a_record_that_is_up_to_date_is_kept_if_it_cannot_be_written(hub: StubHub, monkeypatch):
    hub.add(NAME, ONE)
    first = fetch()
    monkeypatch.setattr("tandem.data.read.hub.replacing", refuse_to_write(errno.EROFS))
    assert fetch() == first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"commit": "0123abc", "files": 5}',
        '{"commit": "0123abc", "files": "train.jsonl"}',
        '{"commit": "0123abc", "files": [5]}',
        '{"commit": "0123abc", "files": ["../../other/train.jsonl"]}',
        '{"commit": "../main", "files": ["train.jsonl"]}',
        '{"commit": null, "files": ["train.jsonl"]}',
    ],
)
def test_a_damaged_record_is_ignored(hub: StubHub, monkeypatch, tmp_path, text):
    hub.add(NAME, ONE)
    fetch()
    (memory,) = (tmp_path / "tandem" / "hub").iterdir()
    memory.write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == NOT_FETCHED


def test_offline_a_file_missing_from_the_cache_is_reported(hub: StubHub, monkeypatch, tmp_path):
    hub.add(NAME, ONE)
    next(iter(fetch().files.values())).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == (
        f"{NAME}: HF_HUB_OFFLINE is set, and 'train.jsonl' is no longer in the hub's cache {tmp_path}/huggingface/hub. "
        "Run once without HF_HUB_OFFLINE, or give local files as data_path."
    )


def test_the_environment_names_the_hub_its_cache_and_the_token(hub: StubHub, tmp_path):
    hub.add(NAME, ONE, token="hf_right")
    said = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_right"}
    call = f"hub_files({NAME!r}, subset=None, split=None, revision=None)"
    code = f"from tandem.data.read.hub import *; print(*{call}.files.values())"
    run = [sys.executable, "-c", code]
    online = subprocess.run(run, env=os.environ | said | {"HF_HUB_OFFLINE": "0"}, capture_output=True, text=True)
    offline = subprocess.run(run, env=os.environ | said | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert online.stdout == offline.stdout
    assert Path(online.stdout.strip()).read_bytes() == ONE["train.jsonl"]
    assert Path(online.stdout).is_relative_to(tmp_path / "home" / "hub")
