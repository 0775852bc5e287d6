"""Conversion to GGUF, with a stub in place of llama.cpp's converter."""

import pytest

from tandem.errors import ConfigError, TandemError
from tandem.exporting.gguf import CONVERTER, convert, find_converter

pytestmark = pytest.mark.usefixtures("of_a_command")

WRITES = """
import sys
import neighbour
folder, _, outfile, _, outtype = sys.argv[1:]
open(outfile, "w").write(f"GGUF of {folder} as {outtype}")
"""
FAILS = "import sys; sys.exit('BPE pre-tokenizer was not recognized')"


def stub(folder, code):
    (folder / "neighbour.py").touch()  # llama.cpp's imports modules of its own folder
    file = folder / CONVERTER
    file.write_text(f"#!/usr/bin/env python3\n{code}")
    file.chmod(0o755)
    return file


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("LLAMA_CPP", raising=False)


def test_the_converter_writes_a_file_into_the_export(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    written = convert(model, stub(tmp_path, WRITES), "bfloat16")
    assert written == model / "model-bf16.gguf"
    assert written.read_text().endswith(" as bf16")
    assert list(model.iterdir()) == [written]


def test_a_file_that_exists_is_not_written_again(tmp_path):
    (tmp_path / "model-f16.gguf").write_text("kept")
    assert convert(tmp_path, stub(tmp_path, FAILS), "float16").read_text() == "kept"


def test_a_converter_that_fails_is_quoted_and_leaves_nothing(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    converter = stub(tmp_path, FAILS)
    with pytest.raises(TandemError) as failed:
        convert(model, converter, "float32")
    assert str(failed.value) == (
        f"{converter} failed (exit code 1): BPE pre-tokenizer was not recognized. The export in {model} is complete; only the "
        "GGUF file is missing."
    )
    assert list(model.iterdir()) == []


def test_without_a_converter_the_message_says_where_it_comes_from(nowhere):
    with pytest.raises(ConfigError) as refused:
        find_converter()
    assert str(refused.value) == (
        f"--gguf: {CONVERTER} was not found. It is part of llama.cpp: clone https://github.com/ggml-org/llama.cpp, and give its "
        "folder by --llama-cpp DIR or LLAMA_CPP=DIR."
    )


def test_the_option_comes_before_the_variable_and_the_path(nowhere, monkeypatch, tmp_path):
    places = []
    for name in ("path", "variable", "option"):
        (tmp_path / name).mkdir()
        places.append(stub(tmp_path / name, WRITES))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_converter() == places[0]
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "variable"))
    assert find_converter() == places[1]
    assert find_converter(tmp_path / "option") == places[2]
    assert find_converter(places[2]) == places[2]


def test_a_folder_without_the_converter_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        find_converter(tmp_path)
    assert str(refused.value) == (
        f"--llama-cpp {tmp_path}: there is no {CONVERTER}. Give a checkout of llama.cpp, or the path of that file."
    )
