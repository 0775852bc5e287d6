"""One byte changed, or the end cut off, in every file a run reads again: it falls back, refuses by name, or makes it again."""

import random
import shutil

import pytest
from killing import assert_same

from tandem.training.checkpoint.checkpoints import checkpoints

KEEPING = "checkpointing.keep_top_k=9"
OF_A_CHECKPOINT = ["manifest.json", "state.json", "config.yaml", "tensors/rank_0.safetensors"]
OF_THE_CACHE = {
    "tokens": ["manifest.json", "tokens.arrow", "rejects.jsonl"],
    "packs": ["manifest.json", "packs-128.arrow"],
    "reference": ["manifest.json", "logps.f32"],
}


def changed(file):
    """One bit of one byte."""
    content = bytearray(file.read_bytes())
    draw = random.Random(file.name)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut_off(file):
    content = file.read_bytes()
    file.write_bytes(content[: random.Random(file.name).randrange(len(content))])


def emptied(file):
    file.write_bytes(b"")


def removed(file):
    file.unlink()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


DAMAGES = [changed, slow(cut_off), slow(emptied), slow(removed)]


@pytest.fixture(scope="module")
def killed(small):
    """A run that was killed after its fourth step, with a checkpoint of each step before; its cache is next to it."""
    folder = small.folder / "killed"
    small.killed(folder / "run", folder / "cache", KEEPING, at="checkpoint.begin:4")
    assert sorted(path.name for path in checkpoints(folder / "run/checkpoints")) == ["step_1", "step_2", "step_3"]
    return folder


@pytest.fixture(scope="module")
def kept_all(small):
    folder = small.folder / "kept_all"
    assert small.run(folder / "run", folder / "cache", KEEPING).code == 0
    return folder / "run"


@pytest.fixture
def copied(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path / "run", tmp_path / "cache"


def test_every_file_is_tried(killed):
    places = {"checkpoint": killed / "run/checkpoints/step_3"}
    for kind in OF_THE_CACHE:
        places[kind] = sorted(path for path in (killed / "cache" / kind).iterdir())[0]
    for kind, place in places.items():
        files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
        assert files == sorted(OF_A_CHECKPOINT if kind == "checkpoint" else OF_THE_CACHE[kind])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_a_damaged_newest_checkpoint_is_named_and_the_run_resumes_from_the_one_before(
    small, kept_all, copied, name, damage
):
    run, cache = copied
    damage(run / "checkpoints/step_3" / name)
    ended = small.run(run, cache, KEEPING)
    printed = " ".join(ended.out.split())
    assert ended.code == 0, ended
    assert f"warning: {run}/checkpoints/step_3/{name} " in printed
    assert "Falling back to an earlier checkpoint." in printed
    assert (run / "checkpoints/step_3.damaged").is_dir()
    assert_same(run, kept_all)  # step 3 is there again, whole


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_older_checkpoint_does_not_stop_a_run_that_resumes_from_a_newer_one(small, kept_all, copied, damage):
    run, cache = copied
    damage(run / "checkpoints/step_1/state.json")
    ended = small.run(run, cache, KEEPING)
    assert ended.code == 0, ended
    assert_same(run, kept_all)


def test_a_run_without_an_intact_checkpoint_is_refused_and_nothing_changes(small, copied):
    run, cache = copied
    for number, name in enumerate(OF_A_CHECKPOINT[:3], 1):
        changed(run / f"checkpoints/step_{number}/{name}")
    before = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path not in (run / "lock", run / "config.yaml")
    }
    ended = small.run(run, cache, KEEPING)
    assert ended.code == 4
    assert ended.err.startswith("tandem: error: all checkpoints of this run are damaged:\n")
    assert all(f"step_{number}/{name} " in ended.err for number, name in enumerate(OF_A_CHECKPOINT[:3], 1))
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("tokens", "packs") for name in OF_THE_CACHE[kind]]
)
def test_a_damaged_cache_of_data_is_refused_by_name(small, copied, kind, name, damage):
    run, cache = copied
    for place in (cache / kind).iterdir():
        damage(place / name)
    ended = small.run(run, cache, KEEPING)
    assert (ended.code, ended.out) == (3, "")
    reported = ended.err.removeprefix("tandem: error: ").rstrip("\n").split("\n\n")
    # both sets' at once; packs are those of training
    splits = ["train: ", "validation-default: "] if kind == "tokens" else [""]
    for split, one in zip(splits, reported, strict=True):
        assert one.startswith(f"{split}{cache}/{kind}/")
        assert f"/{name} " in one
        assert f"damaged: remove {cache}/{kind}/" in one
        assert "\n" not in one


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OF_THE_CACHE["reference"])
def test_a_damaged_reference_is_recomputed(small, kept_all, copied, name, damage):
    run, cache = copied
    places = list((cache / "reference").iterdir())
    right = {place: (place / "logps.f32").read_bytes() for place in places}
    for again in (False, True):  # the second time a damaged one is already set aside
        for place in places:
            damage(place / name)
        code = small.run(run, cache, KEEPING, fail_at="" if again else "step.done").code
        assert code == (0 if again else -9)
        assert {place: (place / "logps.f32").read_bytes() for place in places} == right
    assert_same(run, kept_all)


def cut_near_its_start(file):
    """A configuration that is cut where only defaults follow has lost nothing, and is not refused."""
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize("damage", [slow(cut_near_its_start), emptied])
def test_a_damaged_configuration_of_a_run_is_refused_with_what_to_do(small, copied, damage):
    run, cache = copied
    damage(run / "config.yaml")
    ended = small.run(run, cache, KEEPING)
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.startswith(
        f"tandem: error: {run}/config.yaml is damaged: it cannot be read as a configuration. "
        "Restore it from a checkpoint of the run, which has a copy, or choose another run.dir."
    ) or ended.err.startswith(f"tandem: error: {run} contains a run with another configuration:\n")


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"\x00", b"{", b"- 1\n", b"text"])
def test_a_file_that_is_not_a_configuration_is_refused_with_what_to_do(small, kept_all, copied, bad):
    run, cache = copied
    (run / "config.yaml").write_bytes(bad)
    ended = small.run(run, cache, KEEPING)
    assert (ended.code, ended.err) == (
        4,
        f"tandem: error: {run}/config.yaml is damaged: it cannot be read as a configuration. Restore it from a "
        "checkpoint of the run, which has a copy, or choose another run.dir.\n",
    )
    shutil.copyfile(run / "checkpoints/step_3/config.yaml", run / "config.yaml")
    if bad == b"{":
        assert small.run(run, cache, KEEPING).code == 0
        assert_same(run, kept_all)


def test_a_changed_value_in_a_runs_configuration_is_refused_with_the_difference(small, copied):
    run, cache = copied
    file = run / "config.yaml"
    right, wrong = "reference_policy_kl_penalty: 0.1\n", "reference_policy_kl_penalty: 0.5\n"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    ended = small.run(run, cache, KEEPING)
    assert ended.code == 4
    assert ended.err.startswith(
        f"tandem: error: {run} contains a run with another configuration:\n"
        "  dpo.reference_policy_kl_penalty: 0.5 there, 0.1 now\n"
        "Restore the old values, or train a new run: "
    )
    assert ended.err.endswith(f" train --config {file} dpo.reference_policy_kl_penalty=0.1 --fresh\n")
