"""Tokenizers made to do harm: that expand texts without end, never come to an end, or are nested too deeply."""

import json
import multiprocessing
import os
import shutil

import pytest

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.data.store import processes
from tandem.data.store import writer as store_writer
from tandem.data.store.opening import open_store
from tandem.data.store.pool import METHOD
from tandem.data.text import tokenizer
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.errors import ConfigError, DataError
from tandem.model.files.tiny import tiny_model
from tandem.storage.cache import cache_dir

pytestmark = pytest.mark.skipif(METHOD != "fork", reason="workers are not forked on this system")


def changed(folder, **changes):
    """The embedded tokenizer with other parts."""
    shutil.copytree(tiny_model(), folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def growing(character, times):
    """A normaliser that writes a character 64**times times."""
    step = {"type": "Replace", "pattern": {"String": character}, "content": 64 * character}
    return {"type": "Sequence", "normalizers": [step] * times}


def refusal(folder):
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(folder)
    assert not multiprocessing.active_children()
    return str(refused.value)


@pytest.mark.slow  # the library shifts the text at each replacement
def test_a_tokenizer_that_expands_texts_without_end_is_ended_at_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "LOAD_BYTES", 128 * 1024**2)
    monkeypatch.setattr(tokenizer, "BYTES_PER_BYTE", 0)
    folder = changed(tmp_path / "model", normalizer=growing("東", 5))
    assert refusal(folder) == (
        f"{folder}: loading and testing the tokenizer crashed, or took over 0.1 GiB of memory. Use another tokenizer "
        "with policy.tokenizer.name."
    )


def test_a_tokenizer_that_does_not_come_to_an_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "LOAD_SECONDS", 2.0)
    monkeypatch.setattr(tokenizer, "BYTES_PER_SECOND", 10**9)
    folder = changed(tmp_path / "model", normalizer=growing("o", 60))
    assert refusal(folder) == (
        f"{folder}: loading and testing the tokenizer took over 2 seconds. Use another tokenizer with policy.tokenizer.name."
    )


def opened(folder, tmp_path, text):
    """A set whose rows hold what the tokenizer was not tried out with."""
    rows = [{"prompt": "Say it", "chosen": text, "rejected": "No."}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = make_template(load_tokenizer(folder), TokenizerConfig())
    keys, data = DatasetFields(data_path=str(tmp_path / "pairs.jsonl")), Data(num_workers=1)
    return open_store(str(tmp_path / "pairs.jsonl"), keys, template, data, 10**7)


@pytest.mark.parametrize("text", ["A plain answer.", "word " * 400_000], ids=["short", "two million characters"])
def test_texts_of_any_length_are_encoded_within_the_bounds(tmp_path, text):
    shutil.copytree(tiny_model(), tmp_path / "model")
    assert opened(tmp_path / "model", tmp_path, text)


def test_rows_that_a_tokenizer_expands_without_end_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(store_writer, "ENCODE_BYTES", 128 * 1024**2)
    monkeypatch.setattr(processes, "ENCODE_BYTES", 2 * 1024**3)
    folder = changed(tmp_path / "model", normalizer=growing("Ω", 5))
    with pytest.raises(DataError) as refused:
        opened(folder, tmp_path, "Ω")
    assert str(refused.value) == (
        f"{tmp_path}/pairs.jsonl:1-1: the tokenizer needs more than 2 GiB of memory for these rows, far more than "
        "their texts explain. Use another tokenizer with policy.tokenizer.name, or another model."
    )
    assert not multiprocessing.active_children()


def test_rows_on_which_a_tokenizer_hangs_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROW_SECONDS", 2.0)
    folder = changed(tmp_path / "model", normalizer=growing("Ω", 60))
    with pytest.raises(DataError) as refused:
        opened(folder, tmp_path, "Ω")
    assert str(refused.value) == (
        f"{tmp_path}/pairs.jsonl:1-1: the tokenizer did not finish within 2 seconds. Use another tokenizer with "
        "policy.tokenizer.name, or another model."
    )
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("depth", [200, 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_deeply_nested_file_is_one_message_or_has_no_effect(tmp_path, name, depth):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / name).write_text(f'{{"eos_token": "<|im_end|>", "normalizer": {"[" * depth}{"]" * depth}}}')
    try:
        load_tokenizer(folder)
    except ConfigError as error:
        assert str(error).startswith(f"{folder}: the tokenizer cannot be loaded: ")
        assert "\n" not in str(error)


def test_a_tokenizer_is_tried_out_once_for_its_content(tmp_path, monkeypatch):
    tried = []
    real = tokenizer._try_out
    monkeypatch.setattr(tokenizer, "_try_out", lambda *given: tried.append(given) or real(*given))
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "model_max_length": 17}')
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    load_tokenizer(shutil.copytree(folder, tmp_path / "copy"))
    assert len(tried) == 1
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    load_tokenizer(folder)
    assert len(tried) == 2
    assert any((cache_dir() / "tokenizers").iterdir())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"a": 1}, "TypeError: '>' not supported between instances of 'int' and 'dict'"),
        ("many", "TypeError: '>' not supported between instances of 'int' and 'str'"),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_refused(tmp_path, given, reason):
    folder = changed(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": given}))
    assert refusal(folder) == (
        f"{folder}: the tokenizer cannot encode and decode a text ({reason}). Download it again, or use another with "
        "policy.tokenizer.name."
    )


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    folder = changed(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    assert refusal(folder) == (
        f"{folder}/tokenizer_config.json: a pipe or a device, not a plain file. Download the tokenizer again."
    )


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja", "vocab.txt"])
def test_a_link_to_a_file_elsewhere_is_refused(tmp_path, name):
    """Else a user's own file would be in the model that is exported, as its chat template."""
    folder = changed(tmp_path / "model")
    (tmp_path / "private").write_text("mine")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    assert refusal(folder) == (
        f"{folder}/{name}: a link to {tmp_path}/private, outside the model's folder. Model files are read only from that "
        "folder. Replace the link with a copy of the file."
    )


def test_links_into_the_blobs_of_the_hubs_cache_are_read(tmp_path):
    snapshot = changed(tmp_path / "models--a--b/snapshots/c0ffee")
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.glob("*.json*"))):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert load_tokenizer(snapshot).eos_token


def test_a_refusal_does_not_quote_all_of_a_file(tmp_path):
    folder = changed(tmp_path / "model", truncation="x" * 70_000)
    assert len(refusal(folder)) < 1000
