"""Compiled layers and kernels are kept in tandem's cache."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tandem.api.process import own_process
from tandem.storage.compile_cache import INDUCTOR, TRITON, compile_caches, kept_compile_caches


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The user's folder in an empty cache of tandem, while no variable names a compile cache."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    return tmp_path / f"cache/compile-{os.getuid()}"


def torch_default() -> str:
    """What torch writes into the environment when its compiler is imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def test_both_caches_are_in_the_cache_of_tandem_and_nothing_is_created(cache):
    assert compile_caches() == {INDUCTOR: str(cache), TRITON: f"{cache}/triton"}
    assert not cache.parent.exists()


def test_folders_that_the_user_names_are_kept(cache, monkeypatch):
    monkeypatch.setenv(TRITON, "/triton")
    assert compile_caches() == {INDUCTOR: str(cache), TRITON: "/triton"}
    monkeypatch.setenv(INDUCTOR, "/inductor")
    assert compile_caches() == {INDUCTOR: "/inductor", TRITON: "/triton"}
    monkeypatch.delenv(TRITON)
    assert compile_caches() == {INDUCTOR: "/inductor", TRITON: "/inductor/triton"}


def test_folders_that_torch_names_do_not_count_as_named_by_the_user(cache, monkeypatch):
    """A Python process that has compiled or imported transformers before it calls tandem.train has them in its environment."""
    monkeypatch.setenv(INDUCTOR, torch_default())
    monkeypatch.setenv(TRITON, f"{torch_default()}/triton/0")
    assert compile_caches() == {INDUCTOR: str(cache), TRITON: f"{cache}/triton"}


def test_a_folder_of_another_user_is_not_used(cache, monkeypatch):
    """Torch loads entries with pickle: they can run any code."""
    cache.mkdir(parents=True)
    assert compile_caches()[INDUCTOR] == str(cache)
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    cache.rename(cache.with_name(f"compile-{owner + 1}"))
    assert compile_caches()[INDUCTOR] == torch_default()


def test_a_cache_that_cannot_be_written_leaves_the_choice_to_torch(cache, monkeypatch):
    cache.parent.touch()
    assert compile_caches() == {INDUCTOR: torch_default(), TRITON: f"{torch_default()}/triton"}
    monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError))
    assert compile_caches() == {}


def test_a_folder_that_cannot_be_made_is_not_used(cache, monkeypatch):
    """/proc is a directory that its owner may write to, but it takes no folders."""
    monkeypatch.setenv("TANDEM_CACHE", "/proc/tandem")
    assert compile_caches()[INDUCTOR] == torch_default()


def test_no_home_directory_is_not_an_error(cache, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", "~nobody-of-this-name/cache")
    assert compile_caches()[INDUCTOR] == torch_default()


def test_the_environment_is_restored_afterwards(cache, monkeypatch):
    monkeypatch.setenv(INDUCTOR, torch_default())
    before = dict(os.environ)
    with kept_compile_caches():
        assert {name: os.environ[name] for name in (INDUCTOR, TRITON)} == {
            INDUCTOR: str(cache),
            TRITON: f"{cache}/triton",
        }
    assert dict(os.environ) == before


def test_a_call_from_python_compiles_into_the_cache_and_leaves_the_environment_as_it_was(cache):
    before = dict(os.environ)
    with own_process("tandem.train"):
        assert os.environ[INDUCTOR] == str(cache)
        os.environ[TRITON] = f"{cache}/triton/0"  # as torch does when it compiles
    assert dict(os.environ) == before


def test_a_command_sets_the_folders_before_torch_is_imported(cache, tmp_path):
    """Importing torch's compiler, as transformers does, would otherwise create a folder in the temporary one."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", LAST_WORDS, "train", "--quiet", "policy.model_name=/nowhere"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{cache}\n{cache}/triton\n", done


# Runs a command, whose error ends it before torch is imported, and prints the folders that torch would have used.
LAST_WORDS = f"""
import os, sys
from tandem.cli import main as command
command._exit = lambda code: print(os.environ[{INDUCTOR!r}], os.environ[{TRITON!r}], sep="\\n")
command.main()
"""
