"""Only what tandem wrote is removed, and only once its process is dead; nothing is written through a link."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import CheckpointError
from tandem.storage.cache import check_cache_dir, published, replacing, write_atomically
from tandem.storage.ownership import (
    MARKER,
    free_path,
    open_own,
    refuse_other_than_file,
    refuse_other_than_folder,
    remove_abandoned,
    step_in,
    temporary_folder,
)

RUN = ("config.yaml", "model", "latest", "step_[0-9]+")


# The largest that Linux gives out: machines with fewer than four million processes never had it.
DEAD = (1 << 22) - 1


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def marked(folder: Path, becomes: str, host: str | None = None) -> Path:
    """A temporary folder, half written, of a process that is dead."""
    folder.mkdir(parents=True)
    (folder / "half").write_text("half")
    (folder / MARKER).write_text(json.dumps({"becomes": becomes, "host": host or os.uname().nodename}))
    return folder


def refusal(do, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        do(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "step"),
    [("step_0", 0), ("step_10", 10), ("step_007", None), ("step_²", None), ("step_٣", None), ("step_1.damaged", None)]
    + [(name, None) for name in ("step_", "step_-1", "step_1\n", "../step_1", "step_1/x", "Step_1")],
)
def test_only_plain_digits_name_a_step(name, step):
    assert step_in(name) == step


# What is removed


def test_temporary_files_links_and_folders_of_dead_processes_are_removed(tmp_path):
    (tmp_path / f".config.yaml.{DEAD}").write_text("half")
    (tmp_path / f".latest.{DEAD}").symlink_to("step_1")
    marked(tmp_path / f".model.{DEAD}", "model")
    marked(tmp_path / f".step_3.2.{DEAD}", "step_3")
    (tmp_path / "model").mkdir()
    remove_abandoned(tmp_path, *RUN, is_held=True)
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "name",
    [
        *(".step_1.backup", ".best.txt", ".config.yaml.swp", ".config.yaml.20261117", ".model.bak", ".modeling"),
        *(f".other.{DEAD}", f"config.yaml.{DEAD}", f".config.yaml.{DEAD}.bak", f".config.yaml.0{DEAD}", ".latest"),
        ".config.yaml.²",
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_files_without_a_temporary_name_stay(tmp_path, name, is_folder):
    mine = tmp_path / name
    if is_folder:
        mine.mkdir()
        mine = mine / "file"
    mine.write_text("mine")
    remove_abandoned(tmp_path, *RUN, is_held=True)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "marker", [None, "", "[]", '{"becomes": "other"}', '{"becomes": 1}', '{"becomes": "mode."}', "\udcff"]
)
def test_a_folder_without_the_marker_of_its_name_stays(tmp_path, marker):
    folder = tmp_path / f".model.{DEAD}"
    folder.mkdir()
    (folder / "file").write_text("mine")
    if marker is not None:
        (folder / MARKER).write_bytes(os.fsencode(marker))
    remove_abandoned(tmp_path, *RUN, is_held=True)
    assert (folder / "file").read_text() == "mine"


def test_a_link_to_anything_but_a_step_and_its_target_stay(tmp_path):
    elsewhere = marked(tmp_path / "elsewhere", "model")
    folder = tmp_path / "run"
    folder.mkdir()
    for name, target in ((".latest", "../elsewhere"), (".model", elsewhere), (".config.yaml", elsewhere / "half")):
        (folder / f"{name}.{DEAD}").symlink_to(target)
    remove_abandoned(folder, *RUN, is_held=True)
    assert len(names(folder)) == 3
    assert (elsewhere / "half").read_text() == "half"


WRITING = (
    "import sys; from pathlib import Path; from tandem.storage.cache import published, replacing\n"
    "folder = Path(sys.argv[1])\n"
    "with published(folder / 'model', 'model') as aside, replacing(folder / 'config.yaml') as file:\n"
    "    (aside / 'file').write_text('half'); print(flush=True); sys.stdin.read()\n"
)


@pytest.fixture
def writer(tmp_path):
    """A process that writes a folder and a file into tmp_path until it is terminated."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_held", [False, True])
def test_files_of_a_live_process_stay_and_are_removed_once_it_is_killed(tmp_path, writer, is_held):
    temporary = [f".config.yaml.{writer.pid}", f".model.{writer.pid}"]
    remove_abandoned(tmp_path, *RUN, is_held=is_held)
    assert names(tmp_path) == temporary
    writer.kill()
    writer.wait()
    remove_abandoned(tmp_path, *RUN, is_held=is_held)
    # Where other machines may write, nothing says on which of them a file's process runs.
    assert names(tmp_path) == ([] if is_held else temporary[:1])


def test_a_live_process_can_publish_after_another_removed_files_of_dead_ones(tmp_path, writer):
    remove_abandoned(tmp_path, *RUN, is_held=True)
    writer.communicate(b"")
    assert writer.returncode == 0
    assert names(tmp_path) == ["config.yaml", "model"]


def test_temporary_files_of_this_process_stay(tmp_path):
    with temporary_folder(tmp_path / "model") as aside, replacing(tmp_path / "config.yaml"):
        remove_abandoned(tmp_path, *RUN, is_held=True)
        assert names(tmp_path) == [f".config.yaml.{os.getpid()}", aside.name]


def test_a_folder_of_a_dead_process_with_the_id_of_this_one_is_removed(tmp_path):
    """In a container every run is process number 1."""
    marked(tmp_path / f".model.{os.getpid()}", "model")
    remove_abandoned(tmp_path, *RUN, is_held=True)
    assert names(tmp_path) == []


def test_a_folder_with_a_locked_marker_stays_whatever_its_process_id(tmp_path):
    """A process of another container has a number that means nothing here."""
    with temporary_folder(tmp_path / "model") as aside:
        other = aside.rename(tmp_path / f".model.{DEAD}")
        remove_abandoned(tmp_path, *RUN, is_held=True)
        assert names(tmp_path) == [other.name]


def test_temporary_folders_of_other_machines_stay_in_a_shared_folder(tmp_path):
    marked(tmp_path / f".model.{DEAD}", "model", host="another")
    remove_abandoned(tmp_path, *RUN, is_held=False)
    assert names(tmp_path) == [f".model.{DEAD}"]


def test_only_folders_of_dead_processes_are_removed_from_the_cache_at_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    for kind in ("tokens", "packs", "reference", "models"):
        marked(tmp_path / kind / f".abc.{DEAD}", "abc")
        (tmp_path / kind / f".mine.{DEAD}").mkdir()
        (tmp_path / kind / ".notes").write_text("mine")
    check_cache_dir()
    for kind in ("tokens", "packs", "reference", "models"):
        assert names(tmp_path / kind) == [f".mine.{DEAD}", ".notes"]


# What is written


def test_a_published_folder_and_its_files_follow_the_umask(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from tandem.storage.cache import published\n"
        "os.umask(int(sys.argv[2], 8))\n"
        "with published(Path(sys.argv[1]), 'tokens') as aside:\n"
        "    (aside / 'inner').mkdir()\n"
        "    os.close(os.open(aside / 'inner/weights', os.O_CREAT, 0o600))\n"
    )
    for umask, folder_mode, file_mode in (("022", 0o755, 0o644), ("002", 0o775, 0o664), ("077", 0o700, 0o600)):
        folder = tmp_path / umask
        subprocess.run([sys.executable, "-c", script, str(folder), umask], check=True)
        assert folder.stat().st_mode & 0o777 == folder_mode
        assert (folder / "inner/weights").stat().st_mode & 0o777 == file_mode


def test_a_published_folder_holds_no_marker(tmp_path):
    with published(tmp_path / "model", "model") as aside:
        assert names(aside) == [MARKER]
        (aside / "file").write_text("x")
    assert names(tmp_path / "model") == ["file"]


def test_a_users_folder_with_the_name_of_a_temporary_one_stays(tmp_path):
    mine = tmp_path / f".model.{os.getpid()}"
    mine.mkdir()
    (mine / "file").write_text("mine")
    with published(tmp_path / "model", "model") as aside:
        assert aside.name == f".model.2.{os.getpid()}"
    assert names(tmp_path) == [mine.name, "model"]
    assert (mine / "file").read_text() == "mine"


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("victim")
    (tmp_path / f".config.yaml.{os.getpid()}").symlink_to(victim)
    write_atomically(tmp_path / "config.yaml", "new", "config")
    assert (tmp_path / "config.yaml").read_text() == "new"
    assert victim.read_text() == "victim"
    assert names(tmp_path) == ["config.yaml", "victim"]


def test_a_file_that_is_a_link_is_never_appended_to(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "metrics.jsonl"
    victim.write_text("victim")
    link.symlink_to(victim)
    message = (
        f"{link}: a symbolic link, and writing to it would change a file elsewhere. Remove the link, or replace "
        "it by a copy of the file."
    )
    for mode in ("a", "a+", "ab"):
        assert refusal(open_own, link, mode) == message
    assert refusal(refuse_other_than_file, link) == message
    victim.unlink()
    assert refusal(open_own, link, "a") == message  # nor is what it points to created
    assert not victim.exists()


def test_a_link_created_after_the_check_is_not_followed(tmp_path, monkeypatch):
    victim, link = tmp_path / "victim", tmp_path / "lock"
    victim.write_text("victim")
    link.symlink_to(victim)
    monkeypatch.setattr("tandem.storage.ownership.refuse_other_than_file", lambda path: None)
    assert refusal(open_own, link, "a").startswith(f"{link}: a symbolic link, ")


def test_other_than_a_plain_file_or_folder_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("folder")
    assert refusal(refuse_other_than_file, tmp_path / "folder") == (
        f"{tmp_path}/folder: a directory, but tandem writes a plain file with this name. Move it elsewhere."
    )
    assert refusal(refuse_other_than_file, tmp_path / "pipe") == (
        f"{tmp_path}/pipe: a special file, but tandem writes a plain file with this name. Move it elsewhere."
    )
    assert refusal(refuse_other_than_folder, tmp_path / "file") == (
        f"{tmp_path}/file: a file, but tandem writes a directory with this name. Move it elsewhere."
    )
    assert refusal(refuse_other_than_folder, tmp_path / "broken") == (
        f"{tmp_path}/broken: a link to nothing, but tandem writes a directory with this name. Move it elsewhere."
    )
    refuse_other_than_file(tmp_path / "absent")
    refuse_other_than_folder(tmp_path / "absent")
    refuse_other_than_folder(tmp_path / "linked")


def test_a_free_name_is_not_even_that_of_a_broken_link(tmp_path):
    (tmp_path / "model.step_4").mkdir()
    (tmp_path / "model.step_4.2").symlink_to("nowhere")
    assert free_path(tmp_path, "model.step_4").name == "model.step_4.3"
    assert free_path(tmp_path, "metrics.step_4", ".jsonl").name == "metrics.step_4.jsonl"
