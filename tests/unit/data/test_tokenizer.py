"""Tokenizers by their path: folders, SentencePiece files, what exports hold, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from letters import ids, letter_tokenizer
from sentences import library, model
from transformers import AutoConfig, AutoTokenizer

from tandem.data.text.sentencepiece_model import SentencePiece
from tandem.data.text.tokenizer import check_export, load_tokenizer, state_of
from tandem.errors import ConfigError

TEXTS = ["Hi", " how  far\n", "a</s>b", "<turn>x <extra_id_1>y", "é 東京 😀"]


def refusal(call, *given) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def without_sentencepiece(monkeypatch):
    for name in ("sentencepiece", "sentencepiece.sentencepiece_model_pb2"):
        monkeypatch.setitem(sys.modules, name, None)


def bare_folder(folder: Path, tokenizer_class: str | None) -> Path:
    """A Llama's folder with no tokenizer but tokenizer.model."""
    AutoConfig.for_model("llama").save_pretrained(folder)
    shutil.copy(model(), folder / "tokenizer.model")
    if tokenizer_class:
        named = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


# Folders


def test_a_tokenizer_is_read_back_from_its_folder(tmp_path):
    letter_tokenizer().save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path)("no!", add_special_tokens=False)["input_ids"] == ids("no!")


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = letter_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    assert refusal(load_tokenizer, tmp_path) == (
        f"{tmp_path}: the tokenizer has no EOS token, so no completion could end. Set eos_token in tokenizer_config.json."
    )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    assert refusal(load_tokenizer, tmp_path / "no") == (
        f"{tmp_path}/no: there is no tokenizer (no tokenizer.json, no tokenizer_config.json, no tokenizer.model, no "
        "vocab.json, no vocab.txt). Set policy.tokenizer.name to the folder of a tokenizer."
    )


def test_a_folder_with_only_a_sentencepiece_model_is_read_where_transformers_reads_it_rightly(tmp_path):
    tokenizer = load_tokenizer(bare_folder(tmp_path, "LlamaTokenizer"))
    assert tokenizer("How far?", add_special_tokens=False)["input_ids"] == library(model()).encode("How far?")


def test_a_folder_whose_sentencepiece_model_transformers_reads_wrongly_is_refused(tmp_path):
    # Without a class, transformers takes one that puts no space before a text.
    assert refusal(load_tokenizer, bare_folder(tmp_path, None)) == (
        f"{tmp_path}: transformers gives other ids than the SentencePiece model in this folder (tokenizer.model). Use "
        f"the model directly: policy.tokenizer.name={tmp_path}/tokenizer.model"
    )
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.model"), SentencePiece)


def test_a_folder_with_only_a_sentencepiece_model_needs_the_package(tmp_path, without_sentencepiece):
    assert refusal(load_tokenizer, bare_folder(tmp_path, "LlamaTokenizer")) == (
        f"{tmp_path}: its tokenizer.model needs the sentencepiece package. In the tandem checkout, run "
        "pip install '.[sentencepiece]'."
    )


# SentencePiece files


def test_a_sentencepiece_file_is_a_tokenizer():
    tokenizer = load_tokenizer(model())
    assert isinstance(tokenizer, SentencePiece)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert named == ("<s>", "</s>", "<unk>", "<pad>")
    assert load_tokenizer(model(pad_id=-1)).pad_token is None
    assert tokenizer.chat_template is None


def test_a_sentencepiece_file_that_does_not_exist_is_refused(tmp_path):
    assert refusal(load_tokenizer, tmp_path / "x.model") == (
        f"policy.tokenizer.name = {tmp_path}/x.model: no such file. Give the path of a SentencePiece model."
    )


@pytest.mark.parametrize("damage", ["empty", "cut", "another format"])
def test_a_damaged_sentencepiece_file_is_refused(tmp_path, damage):
    content = {"empty": b"", "cut": model().read_bytes()[:5000], "another format": b"IQ== 0\nIg== 1\n"}
    (tmp_path / "x.model").write_bytes(content[damage])
    assert refusal(load_tokenizer, tmp_path / "x.model") == (
        f"policy.tokenizer.name = {tmp_path}/x.model: not a SentencePiece model, or damaged. Copy it again, or give "
        "the folder of a tokenizer."
    )


def test_a_sentencepiece_model_without_eos_is_refused():
    file = model(eos_id=-1)
    assert refusal(load_tokenizer, file) == (
        f"policy.tokenizer.name = {file}: the model has no EOS symbol, so no completion could end. "
        "Train it with --eos_id, or use another."
    )


def test_a_sentencepiece_file_needs_the_package(request):
    file = model()  # made while the package is still there
    request.getfixturevalue("without_sentencepiece")
    assert refusal(load_tokenizer, file) == (
        f"policy.tokenizer.name = {file}: a SentencePiece model needs the sentencepiece package. "
        "In the tandem checkout, run pip install '.[sentencepiece]'."
    )


# Exports


@pytest.mark.parametrize(
    ("model_type", "settings", "converts"),
    [
        ("llama", {}, True),
        ("nemotron", {}, True),
        ("mistral", {"dummy_prefix": False, "strips": True}, True),
        ("llama", {"kind": "unigram", "strips": True}, False),
        ("llama", {"normalizer": "nmt_nfkc"}, False),
    ],
)
def test_an_export_gives_the_same_ids_in_transformers_and_here(tmp_path, model_type, settings, converts):
    tokenizer = load_tokenizer(model(**settings))
    tokenizer.chat_template = "{{ messages[0].content }}"
    config = AutoConfig.for_model(model_type)
    check_export(tokenizer, model(**settings), config)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [theirs(text)["input_ids"] for text in TEXTS] == expected
    assert [again(text)["input_ids"] for text in TEXTS] == expected
    assert isinstance(again, SentencePiece)
    assert theirs.chat_template == again.chat_template == tokenizer.chat_template
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<s>", "</s>", "<pad>")
    assert (tmp_path / "tokenizer.model").read_bytes() == model(**settings).read_bytes()
    assert (tmp_path / "tokenizer.json").exists() == converts
    if converts:
        assert theirs.decode(theirs("é 東京\n on<turn>")["input_ids"]) == "é 東京\n on<turn>"


def test_a_model_that_an_export_could_not_hold_is_refused():
    file = model(kind="unigram")
    config = AutoConfig.for_model("nemotron")
    assert refusal(check_export, load_tokenizer(file), file, config) == (
        f"policy.tokenizer.name = {file}: transformers would load this SentencePiece model differently after it is "
        "exported with a nemotron model. Give a folder with a tokenizer.json instead."
    )


def test_a_tokenizer_of_transformers_own_needs_no_such_check():
    check_export(letter_tokenizer(), Path("letters"), None)


def ctrl_folder(folder: Path, merges: list[str], **settings: object) -> Path:
    """A tokenizer that transformers computes in Python, with the same vocabulary whatever its merges."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<unk>", "<eos>", *(f"{letter}@@" for letter in letters), *letters, "th@@", "the", "he"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    named = {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>", "eos_token": "<eos>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_tokenizers_with_other_merges_or_settings_have_different_states(tmp_path):
    the, he = ["t h", "th e</w>"], ["h e</w>"]
    one = load_tokenizer(ctrl_folder(tmp_path / "one", the))
    other = load_tokenizer(ctrl_folder(tmp_path / "other", he))
    lower = load_tokenizer(ctrl_folder(tmp_path / "lower", the, do_lower_case=True))
    assert one.get_vocab() == other.get_vocab()
    assert one("the")["input_ids"] != other("the")["input_ids"]
    assert len({state_of(tokenizer) for tokenizer in (one, other, lower)}) == 3


def test_a_tokenizer_computed_in_python_is_the_same_once_exported(tmp_path):
    one = load_tokenizer(ctrl_folder(tmp_path / "one", ["t h"]))
    one.save_pretrained(str(tmp_path / "exported"))
    assert state_of(load_tokenizer(tmp_path / "exported")) == state_of(one)
