"""What a user put into a directory of runs, checkpoints or caches stays there, byte for byte; what is in the way is named."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import SHORT, short_run

from tandem.cli.main import main
from tandem.config.load import load_config
from tandem.errors import CheckpointError
from tandem.paths import check_resumed
from tandem.report.reporter import MetricsFile
from tandem.storage.cache import cache_dir, check_cache_dir, published, write_atomically, write_manifest
from tandem.storage.ownership import MARKER, remove_abandoned
from tandem.training.checkpoint.checkpoints import (
    checkpoints,
    newest_verified,
    point,
    prune,
    refuse_taken_names,
    set_newer_aside,
)
from tandem.training.checkpoint.ranking import Ranking
from tandem.training.run.directory import FILES, TEMPORARY_NAMES, choose_run_dir, is_finished, refuse_links
from tandem.training.run.extension import begin_extension
from tandem.training.run.lock import locked

BY_AGE = Ranking(None, higher_is_better=False)


# The largest that Linux gives out: machines with fewer than four million processes never had it.
DEAD = (1 << 22) - 1


def checkpoint(folder: Path, step: int) -> Path:
    """A small folder laid out as a checkpoint is."""
    place = folder / f"step_{step}"
    (place / "tensors").mkdir(parents=True)
    (place / "tensors/rank_0.safetensors").write_bytes(b"weights")
    (place / "state.json").write_text(json.dumps({"progress": {"step": step}}))
    (place / "config.yaml").write_text("run: {}\n")
    write_manifest(place, format_version=5)
    return place


def test_a_checkpoint_with_the_older_name_of_its_tensor_file_is_still_found(tmp_path):
    place = checkpoint(tmp_path, 3)
    (place / "tensors/rank_0.safetensors").rename(place / "tensors/worker_0.safetensors")
    write_manifest(place, format_version=5)
    assert newest_verified(tmp_path) == (place, [])
    (place / "manifest.json").unlink()
    assert checkpoints(tmp_path) == [place]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(path: Path) -> dict[str, bytes | str | None]:
    """Of a file, a link, or all of a folder: the bytes or the target by name."""
    found = {}
    for one in [path, *sorted(path.rglob("*"))] if path.is_dir() and not path.is_symlink() else [path]:
        name = str(one.relative_to(path))
        found[name] = str(one.readlink()) if one.is_symlink() else one.read_bytes() if one.is_file() else None
    return found


def refusal(do, *arguments, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        do(*arguments, **options)
    return str(caught.value)


# Checkpoints


def test_only_what_a_run_saved_is_a_checkpoint(tmp_path):
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 5).rename(tmp_path / "step_9")  # a copy by a user: it was saved at another step
    for name in ("step_100", "step_²", "step_007", "step_3.damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_1").write_text("a file")
    (tmp_path / "step_2/tensors").mkdir(parents=True)
    (tmp_path / "step_2/state.json").write_text("mine")
    assert [path.name for path in checkpoints(tmp_path)] == ["step_4"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "config.yaml", "tensors/rank_0.safetensors"])
def test_a_checkpoint_without_one_of_its_files_is_still_one_and_is_set_aside_under_a_free_name(tmp_path, name):
    whole = checkpoint(tmp_path, 2)
    (tmp_path / "step_4.damaged").mkdir()
    (tmp_path / "step_4.damaged/mine").write_text("mine")
    for damaged in ("step_4.damaged.2", "step_4.damaged.3"):
        (checkpoint(tmp_path, 4) / name).unlink()
        place, problems = newest_verified(tmp_path)
        assert place == whole
        assert len(problems) == 1
        set_newer_aside(whole)
        assert (tmp_path / damaged).is_dir()
        assert not (tmp_path / "step_4").exists()
    assert (tmp_path / "step_4.damaged/mine").read_text() == "mine"


def test_a_newer_folder_of_the_users_is_not_renamed(tmp_path):
    (tmp_path / "step_100").mkdir()
    (tmp_path / "step_100/mine").write_text("mine")
    set_newer_aside(checkpoint(tmp_path, 2))
    assert names(tmp_path) == ["step_100", "step_2"]


def test_a_folder_of_the_users_is_not_pruned(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    (tmp_path / "step_0").mkdir()
    prune(tmp_path, 1, BY_AGE)
    assert names(tmp_path) == ["best", "step_0", "step_3"]


@pytest.mark.parametrize("inside", ["notes.txt", "tensors/notes.txt", "mine/", "tensors/mine/", "link"])
def test_a_checkpoint_with_something_of_the_users_inside_is_kept(tmp_path, inside):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    mine = tmp_path / "step_1" / inside
    if inside == "link":
        mine.symlink_to("state.json")
    elif inside.endswith("/"):
        mine.mkdir()
    else:
        mine.write_text("mine")
    before = contents(tmp_path / "step_1")
    prune(tmp_path, 1, BY_AGE)
    assert names(tmp_path) == ["best", "step_1", "step_3"]
    assert contents(tmp_path / "step_1") == before


def test_a_linked_checkpoint_can_be_resumed_from_and_is_neither_pruned_nor_renamed(tmp_path):
    folder = tmp_path / "checkpoints"
    elsewhere = checkpoint(tmp_path / "elsewhere", 1)
    folder.mkdir()
    (folder / "step_1").symlink_to(elsewhere)
    assert newest_verified(folder) == (folder / "step_1", [])
    for step in (2, 3):
        checkpoint(folder, step)
    prune(folder, 1, BY_AGE)
    assert names(folder) == ["best", "step_1", "step_3"]
    assert names(elsewhere) == ["config.yaml", "manifest.json", "state.json", "tensors"]


def test_a_checkpoint_that_was_being_removed_when_its_process_died_is_removed(tmp_path):
    """Killed before the rename it is complete under its name; after it, it holds the marker to the last."""
    place = checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    (place / MARKER).write_text(json.dumps({"becomes": "step_1", "host": "any"}))
    assert newest_verified(tmp_path)[0] == tmp_path / "step_2"
    prune(tmp_path, 1, BY_AGE)
    assert names(tmp_path) == ["best", "step_2"]
    half = tmp_path / f".step_1.{DEAD}"
    half.mkdir()
    (half / MARKER).write_text(json.dumps({"becomes": "step_1", "host": "any"}))
    remove_abandoned(tmp_path, "step_[0-9]+", is_held=True)
    assert names(tmp_path) == ["best", "step_2"]


@pytest.mark.parametrize("link", ["best", "latest"])
def test_best_and_latest_are_links_to_a_step_beside_them_or_refused(tmp_path, link):
    place, path = checkpoint(tmp_path, 1), tmp_path / link
    for target in ("../elsewhere", "/etc", "step_1/tensors", "step_007", "step_²"):
        path.symlink_to(target)
        message = f"{path}: a link to {target}, not to a checkpoint (step_N) in the same folder. Remove the link."
        assert refusal(refuse_taken_names, tmp_path, 4) == refusal(point, path, place) == message
        path.unlink()
    path.mkdir()
    message = f"{path}: a directory, but tandem writes a link to a checkpoint under that name. Move it elsewhere."
    assert refusal(refuse_taken_names, tmp_path, 4) == refusal(point, path, place) == message
    path.rmdir()
    path.write_text("mine")
    message = f"{path}: a file, but tandem writes a link to a checkpoint under that name. Move it elsewhere."
    assert refusal(refuse_taken_names, tmp_path, 4) == refusal(point, path, place) == message
    path.unlink()
    path.symlink_to("step_7")  # of a checkpoint that is gone
    refuse_taken_names(tmp_path, 4)
    point(path, place)
    assert path.readlink() == Path("step_1")


def test_a_folder_under_a_name_that_the_run_will_save_is_refused_and_others_are_not(tmp_path):
    checkpoint(tmp_path, 2)
    for name in ("step_1", "step_5", "step_²"):
        (tmp_path / name).mkdir()
    refuse_taken_names(tmp_path, 4)
    assert refusal(refuse_taken_names, tmp_path, 5) == (
        f"{tmp_path}/step_5: not a checkpoint written by tandem, and this run saves one under that name. Move it elsewhere."
    )


# Runs


@pytest.fixture
def run(tmp_path):
    """The directory of an unfinished run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(load_config(None, [*SHORT, f"run.dir={folder}"]).as_yaml())
    return folder


@pytest.mark.parametrize("name", [name.replace("*", "3") for name in FILES])
def test_a_run_with_a_file_that_is_a_link_is_refused_and_what_it_points_to_stays(run, tmp_path, capsys, name):
    victim, link = tmp_path / "victim", run / name
    if name == "config.yaml":
        link.rename(victim)
    else:
        victim.write_text("victim")
        link.parent.mkdir(exist_ok=True)
    before = victim.read_bytes()
    link.symlink_to(victim)
    message = (
        f"{link}: a symbolic link, and writing to it would change a file elsewhere. Remove the link, or replace "
        "it by a copy of the file."
    )
    loaded = load_config(None, [*SHORT, f"run.dir={run}"])
    assert refusal(check_resumed, run) == message
    assert refusal(choose_run_dir, loaded, fresh=False) == message
    with pytest.raises(SystemExit) as ended:
        sys.argv = ["tandem", "train", "--resume", str(run)]
        main()
    assert (ended.value.code, capsys.readouterr().err) == (4, f"tandem: error: {message}\n")
    assert victim.read_bytes() == before


def test_the_lock_and_the_metrics_are_not_opened_through_links(run, tmp_path):
    (tmp_path / "victim").write_text("victim")
    for name in ("lock", "metrics.jsonl"):
        (run / name).symlink_to(tmp_path / "victim")
    assert refusal(locked(run).__enter__).startswith(f"{run}/lock: a symbolic link, ")
    assert refusal(MetricsFile, run / "metrics.jsonl").startswith(f"{run}/metrics.jsonl: a symbolic link, ")
    assert (tmp_path / "victim").read_text() == "victim"


@pytest.mark.parametrize("text", [b"mine", b"12 monkeys", b"\xff\xfe"])
def test_a_lock_that_tandem_did_not_write_is_refused_and_stays(tmp_path, text):
    (tmp_path / "lock").write_bytes(text)
    assert refusal(locked(tmp_path).__enter__) == (
        f"{tmp_path}/lock: not written by tandem, which stores its process id in a file of that name. Move the file elsewhere."
    )
    assert (tmp_path / "lock").read_bytes() == text


@pytest.mark.parametrize("key", ["run.dir", "checkpointing.checkpoint_dir"])
def test_a_directory_that_another_process_holds_is_refused_by_the_key_that_gives_it(tmp_path, key):
    with locked(tmp_path, key):
        assert refusal(locked(tmp_path, key).__enter__) == (
            f"{tmp_path} is in use by process {os.getpid()}. Wait for it, or choose another {key}."
        )


@pytest.mark.parametrize("name", ["r[1]", "r*", "r?"])
def test_a_fresh_run_never_gets_the_directory_of_another_whatever_its_name(tmp_path, name):
    loaded = load_config(None, [*SHORT, f'run.dir="{tmp_path}/{name}"'])
    for number in (1, 2, 3):
        run = choose_run_dir(loaded, fresh=True)
        assert run == tmp_path / f"{name}-{number}"
        run.mkdir()
    (tmp_path / "r1-7").mkdir()  # which r[1]-*, r*-* and r?-* match
    assert choose_run_dir(loaded, fresh=True) == tmp_path / f"{name}-4"


@pytest.mark.parametrize("name", ["checkpoints", "logs", "model", "samples"])
def test_a_file_where_a_run_writes_a_directory_is_refused_and_a_linked_directory_is_not(run, tmp_path, name):
    (run / name).write_text("mine")
    assert (
        refusal(refuse_links, run)
        == f"{run}/{name}: a file, but tandem writes a directory with this name. Move it elsewhere."
    )
    (run / name).unlink()
    (tmp_path / "elsewhere").mkdir()
    (run / name).symlink_to(tmp_path / "elsewhere")
    refuse_links(run)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_called_model_that_no_run_exported_does_not_make_a_run_finished(run, tmp_path, is_link):
    loaded = load_config(None, [*SHORT, f"run.dir={run}"])
    (run / "config.yaml").write_text(loaded.as_yaml())
    mine = tmp_path / "mine" if is_link else run / "model"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    if is_link:
        (run / "model").symlink_to(mine)
    assert not is_finished(run)
    assert refusal(choose_run_dir, loaded, fresh=False) == (
        f"{run}/model: a directory without an exported model, and this run exports its model under that name. Move it elsewhere."
    )
    for name in ("config.json", "model.safetensors"):
        (mine / name).touch()
    assert is_finished(run)
    assert choose_run_dir(loaded, fresh=False) == run


def test_an_empty_folder_called_model_is_accepted(run):
    loaded = load_config(None, [*SHORT, f"run.dir={run}"])
    (run / "config.yaml").write_text(loaded.as_yaml())
    (run / "model").mkdir()
    assert choose_run_dir(loaded, fresh=False) == run
    assert not is_finished(run)


def test_a_run_that_is_a_link_to_a_directory_is_one(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    refuse_links(tmp_path / "link")
    check_resumed(tmp_path / "link")


def test_run_directories_are_numbered_by_plain_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tandem-²", "tandem-2", "tandem-two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert choose_run_dir(load_config(None, SHORT), fresh=False) == Path("runs/tandem-3")


def test_a_real_directory_called_best_is_named_before_weights_load(tmp_path):
    (tmp_path / "elsewhere/best").mkdir(parents=True)
    assert refusal(short_run, tmp_path / "run", f"checkpointing.checkpoint_dir={tmp_path}/elsewhere") == (
        f"{tmp_path}/elsewhere/best: a directory, but tandem writes a link to a checkpoint under that name. Move it elsewhere."
    )


# Whatever is there

NAMES = st.one_of(
    st.sampled_from(
        [
            *(".step_1.backup", ".best.txt", ".config.yaml.swp", ".model.bak", ".config.yaml.20261117", "model.bak"),
            *("step_²", "step_007", "step_100", "step_0", "step_4", "step_5.damaged", "step_5.damaged.2", "best.old"),
            *("metrics.step_5.jsonl", "model.step_5", "model.step_5.2", f".step_9x.{DEAD}", f".other.{DEAD}", "notes"),
        ]
    ),
    st.from_regex(r"\.?(step_[0-9]{1,2}|best|latest|config\.yaml|model|abc)\.[a-z0-9]{1,8}[a-z~]", fullmatch=True),
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20),
)
# Folders alone: of a file, the name is all that says whose it is.
FOLDER_NAMES = st.sampled_from(
    [f".step_1.{DEAD}", f".step_4.2.{DEAD}", f".model.{DEAD}", f".abc.{DEAD}", f".latest.{DEAD}"]
)
CONTENT = st.binary(max_size=20)
FOLDER = st.dictionaries(st.sampled_from(["a", "b", "manifest.json", "state.json", MARKER]), CONTENT, max_size=3)
FOREIGN = st.dictionaries(NAMES, st.one_of(CONTENT, FOLDER), max_size=4) | st.dictionaries(
    FOLDER_NAMES, FOLDER, max_size=2
)


def place_foreign(folder: Path, foreign: dict[str, bytes | dict[str, bytes]]) -> list[Path]:
    """Those of the names that are free."""
    folder.mkdir(parents=True, exist_ok=True)
    placed = []
    for name, content in foreign.items():
        path = folder / name
        if name in (".", "..") or os.path.lexists(path) or len(os.fsencode(name)) > 200:
            continue
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir()
            for inner, text in content.items():
                (path / inner).write_bytes(text)
        placed.append(path)
    return placed


@settings(max_examples=40, deadline=None)
@given(in_run=FOREIGN, in_checkpoints=FOREIGN, in_a_checkpoint=FOREIGN, in_cache=FOREIGN)
def test_whatever_a_user_put_there_stays(tmp_path_factory, in_run, in_checkpoints, in_a_checkpoint, in_cache):
    """Through everything that writes, renames or removes in these directories; what is in the way may be refused."""
    top = tmp_path_factory.mktemp("foreign")
    run, kept, cache = top / "run", top / "run/checkpoints", top / "cache"
    run.mkdir()
    for name in FILES[:1] + FILES[2:7]:
        (run / name).write_text("{}\n")
    for step in (1, 2, 3, 5):
        checkpoint(kept, step)
    (kept / "step_5/state.json").unlink()  # the newest is damaged
    for folder, name in ((run, "model"), (kept, "step_4"), (cache / "tokens", "abc")):
        half = folder / f".{name}.3.{DEAD}"
        half.mkdir(parents=True)
        (half / MARKER).write_text(json.dumps({"becomes": name, "host": os.uname().nodename}))
    foreign = [
        *place_foreign(run, in_run),
        *place_foreign(kept, in_checkpoints),
        *place_foreign(kept / "step_1", in_a_checkpoint),
        *place_foreign(cache / "tokens", in_cache),
    ]
    before = {path: contents(path) for path in foreign}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(cache))
        patch.setattr(os, "fsync", lambda descriptor: None)  # no machine is switched off here
        check_cache_dir()
        with published(cache_dir() / "tokens/new", "tokens") as aside:
            (aside / "file").write_text("x")
        go_through_a_run(run, kept)

    assert {path: contents(path) for path in foreign} == before
    assert not (cache / f"tokens/.abc.3.{DEAD}").exists()


def go_through_a_run(run: Path, kept: Path) -> None:
    """What a run does there: it recovers from a crash, resumes, saves, prunes, exports, is extended."""
    with suppress(CheckpointError), locked(run):
        refuse_links(run)
        refuse_taken_names(kept, 6)
        remove_abandoned(run, *TEMPORARY_NAMES, is_held=True)
        write_atomically(run / "config.yaml", "new", "config")
        remove_abandoned(kept, "step_[0-9]+", "latest", "best", is_held=True)
        place, _ = newest_verified(kept)
        assert place is not None
        set_newer_aside(place)
        point(kept / "latest", place)
        prune(kept, 1, BY_AGE)
        with published(run / "model", "model") as aside:
            (aside / "file").write_text("x")
        (run / "metrics.jsonl").write_text('{"step": 5, "split": "train"}\n')
        begin_extension(run, 5, 5, load_config(None, []))
