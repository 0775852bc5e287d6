"""The packs of a whole set: made once, found again by what decides them, refused when damaged, never half there."""

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.data.store.token_store import TokenStore
from tandem.errors import DataError
from tandem.packing import packs
from tandem.packing.binning import Bins
from tandem.packing.packer import Packer
from tandem.packing.packs import open_packs, pack_settings, read_packs, write_packs
from tandem.storage.cache import read_manifest, write_manifest


class Named:
    """What packs need of a set: its size and the name of its tokens."""

    def __init__(self, num: int, fingerprint: str):
        self.num, self.fingerprint = num, fingerprint

    def __len__(self) -> int:
        return self.num


# Rows of 128: 100 + 28, 68 + 60, and 200 tokens in rows to themselves.
SIZES = np.array([60, 100, 200, 28, 68])
PACKS = [[1, 3], [4, 0], [2]]
PACKER = Packer(
    store=Named(5, "tokens"),  # type: ignore[arg-type]
    sizes=SIZES,
    lengths=(128,),
    arrangement="shared",
    packs_per_micro_batch=1,
    algorithm="first_fit_decreasing",
    seed=7,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packs"


@pytest.fixture
def kept(cache):
    """The folder of packs that are there."""
    open_packs(PACKER)
    (folder,) = cache.iterdir()
    return folder


@pytest.fixture
def no_packing(monkeypatch):
    """From here on nothing is packed."""

    def refuse(self, preferences):
        pytest.fail("packed again")

    monkeypatch.setattr(Packer, "bins", refuse)


def lists(bins: Bins) -> list[list[int]]:
    return [bin.tolist() for bin in bins]


def refusal() -> str:
    with pytest.raises(DataError) as caught:
        open_packs(PACKER)
    return str(caught.value)


def changed(byte: int) -> bytes:
    return bytes([byte ^ 0x10])


# Kept and found again


def test_packs_are_those_of_the_whole_set():
    assert lists(open_packs(PACKER)) == PACKS


def test_packs_are_found_again_and_not_made_again(kept, no_packing):
    assert lists(open_packs(PACKER)) == PACKS
    assert lists(open_packs(replace(PACKER, packs_per_micro_batch=3))) == PACKS  # rows that go together decide nothing


@pytest.mark.parametrize(
    "change",
    [
        {"store": Named(5, "other tokens")},
        {"lengths": (128, 256)},
        {"arrangement": "repeated"},
        {"algorithm": "exact_fit_decreasing"},
        {"seed": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_packs_gives_them_another_place(kept, cache, change):
    open_packs(replace(PACKER, **change))
    assert len(list(cache.iterdir())) == 2


def test_another_way_of_packing_gives_them_another_place(kept, cache, monkeypatch):
    monkeypatch.setattr(packs, "PACKS_VERSION", packs.PACKS_VERSION + 1)
    open_packs(PACKER)
    assert len(list(cache.iterdir())) == 2


def test_the_manifest_says_what_the_packs_are_of(kept):
    assert sorted(path.name for path in kept.iterdir()) == ["manifest.json", "packs-128.arrow"]
    facts = read_manifest(kept)
    assert list(facts.pop("files")) == ["packs-128.arrow"]
    assert facts == {
        "version": packs.PACKS_VERSION,
        "tokens": "tokens",
        "pack_length": 128,
        "arrangement": "shared",
        "algorithm": "first_fit_decreasing",
        "seed": 7,
    }


class Prepared(TokenStore):
    """A set in a folder that holds packs too."""

    def __init__(self, folder, facts: list[dict[str, Any]]):
        self.folder, self.packs, self.fingerprint = folder, facts, "tokens"
        self.verified = frozenset(path.name for path in folder.iterdir())

    def __len__(self) -> int:
        return 5


def test_packs_prepared_beside_the_tokens_are_taken_and_others_are_made(tmp_path, cache):
    write_packs(Bins(np.array([0, 4, 1, 3, 2]), np.array([0, 2, 4, 5])), tmp_path / "packs-128.arrow")
    packer = replace(PACKER, store=Prepared(tmp_path, [pack_settings(PACKER)]))
    assert lists(open_packs(packer)) == [[0, 4], [1, 3], [2]]
    assert not cache.exists()
    assert lists(open_packs(replace(packer, seed=8))) == PACKS
    assert len(list(cache.iterdir())) == 1


def test_packs_that_the_manifest_does_not_name_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "packs-128.arrow")  # which would be waited for
    store = Prepared(tmp_path, [pack_settings(PACKER)])
    store.verified = frozenset()
    with pytest.raises(DataError) as caught:
        open_packs(replace(PACKER, store=store))
    assert str(caught.value) == (
        f"{tmp_path}/manifest.json does not list packs-128.arrow. The prepared data is damaged. Prepare it again, with tandem "
        "prepare."
    )


def test_packs_outlive_their_file(tmp_path):
    file = tmp_path / "packs.arrow"
    order, bounds = np.random.default_rng(0).permutation(5000), np.arange(0, 5001, 5)
    write_packs(Bins(order, bounds), file)
    found = read_packs(file)
    file.unlink()
    assert found.order.tolist() == order.tolist()
    assert found.bounds.tolist() == bounds.tolist()
    assert found.order.dtype == found.bounds.dtype == np.int64


# Damage


@pytest.mark.slow
def test_any_byte_that_changed_is_refused_by_name(kept, no_packing):
    file = kept / "packs-128.arrow"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + changed(whole[at]) + whole[at + 1 :])
        assert refusal() == (
            f"{file} does not match its SHA-256 in the manifest: it was changed or cut off. "
            f"The packs are damaged: remove {kept} and start again."
        )


def test_any_byte_cut_off_is_refused_by_name(kept, no_packing):
    file = kept / "packs-128.arrow"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert refusal().startswith(f"{file} does not match its SHA-256")


def test_a_changed_manifest_is_refused_or_gives_the_same_packs(kept, no_packing):
    file = kept / "manifest.json"
    whole = file.read_bytes()
    refused = 0
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + changed(whole[at]) + whole[at + 1 :])
        try:
            assert lists(open_packs(PACKER)) == PACKS
        except DataError as error:
            refused += 1
            assert str(kept) in str(error)
    assert refused >= 64  # at the least, wherever the SHA-256 is another


def test_a_manifest_that_is_cut_off_is_refused_by_name(kept, no_packing):
    file = kept / "manifest.json"
    whole = file.read_bytes().rstrip()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert refusal().startswith(f"{file} is missing or damaged (")


@pytest.mark.parametrize("name", ["manifest.json", "packs-128.arrow"])
def test_a_missing_file_is_refused_by_name(kept, no_packing, name):
    (kept / name).unlink()
    message = refusal()
    assert message.startswith(f"{kept}/{name} is missing")
    assert message.endswith(f". The packs are damaged: remove {kept} and start again.")


@pytest.mark.parametrize("written", [b"something else", None])
def test_packs_the_manifest_does_not_know_are_refused_all_the_same(kept, no_packing, written):
    """No SHA-256 tells, but what stands there is no Arrow file, or nothing does."""
    file = kept / "packs-128.arrow"
    (kept / "manifest.json").write_text('{"files": {}}')
    file.unlink() if written is None else file.write_bytes(written)
    assert refusal().endswith(f"The packs are damaged: remove {kept} and start again.")


def damaged_bytes(file, before: list[int], after: list[int]) -> None:
    old, new = (np.array(numbers, np.int64).tobytes() for numbers in (before, after))
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [  # packs 1 3 | 4 0 | 2
        ([0, 2, 4, 5], [0, 2, 4, 2**40], ": "),
        ([0, 2, 4, 5], [-(2**33), 2, 4, 5], ": "),
        ([0, 2, 4, 5], [0, 4, 2, 5], ": "),
        ([0, 2, 4, 5], [0, 2, 4, 4], ": batch 0: preferences has values that belong to no row. "),
        ([0, 2, 4, 5], [0, 2, 2, 5], " has a pack without preferences. "),
        ([0, 2, 4, 5], [0, 2, 3, 5], " has a pack with more than 128 tokens. "),
        ([1, 3, 4, 0, 2], [1, 3, 4, 2**40, 2], " does not hold each of the 5 preferences exactly once. "),
        ([1, 3, 4, 0, 2], [1, 3, 4, -1, 2], " does not hold each of the 5 preferences exactly once. "),
        ([1, 3, 4, 0, 2], [1, 3, 4, 1, 2], " does not hold each of the 5 preferences exactly once. "),
    ],
)
def test_packs_that_do_not_fit_the_set_are_refused_though_the_manifest_fits(
    kept, no_packing, before, after, problem, is_prepared
):
    file = kept / "packs-128.arrow"
    damaged_bytes(file, before, after)
    write_manifest(kept, **pack_settings(PACKER))
    packer = replace(PACKER, store=Prepared(kept, [pack_settings(PACKER)])) if is_prepared else PACKER
    with pytest.raises(DataError) as caught:
        open_packs(packer)
    assert str(caught.value).startswith(f"{file}{problem}")
    assert str(caught.value).endswith(
        "The prepared data is damaged. Prepare it again, with tandem prepare."
        if is_prepared
        else f"The packs are damaged: remove {kept} and start again."
    )


def test_removed_as_it_says_the_packs_are_made_again(kept):
    (kept / "packs-128.arrow").write_bytes(b"")
    refusal()
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()
    assert lists(open_packs(PACKER)) == PACKS


# Never half there


@pytest.mark.parametrize("step", ["write_packs", "write_manifest"])
def test_an_error_while_writing_leaves_nothing(cache, monkeypatch, step):
    real = getattr(packs, step)

    def failing(*args, **facts):
        real(*args, **facts)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packs, step, failing)
        with pytest.raises(OSError, match="No space left"):
            open_packs(PACKER)
    assert list(cache.iterdir()) == []
    assert lists(open_packs(PACKER)) == PACKS


def killed_half_way() -> None:
    def written_in_part(bins, file):
        file.write_bytes(b"ARROW1")
        os.kill(os.getpid(), signal.SIGKILL)

    packs.write_packs = written_in_part
    open_packs(PACKER)


def killed_with_only_the_name_missing() -> None:
    real = packs.write_manifest

    def written_then_killed(*args, **facts):
        real(*args, **facts)
        os.kill(os.getpid(), signal.SIGKILL)

    packs.write_manifest = written_then_killed
    open_packs(PACKER)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="only a fork has what the test changed"
)
@pytest.mark.parametrize("killed", [killed_half_way, killed_with_only_the_name_missing])
def test_a_killed_writer_leaves_nothing_that_is_taken_for_packs_and_the_next_one_makes_them(cache, killed):
    victim = multiprocessing.get_context("fork").Process(target=killed)
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".")
    assert lists(open_packs(PACKER)) == PACKS
    (made,) = [path for path in cache.iterdir() if path != left]
    assert made.name in left.name
