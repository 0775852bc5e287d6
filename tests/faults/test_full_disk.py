"""A disk that is really full, wherever it fills: one line, its own exit code, and with room again the same end."""

import subprocess
from contextlib import contextmanager

import pytest
from killing import assert_intact, assert_same


def command(*words):
    return subprocess.run(words, capture_output=True).returncode == 0


@contextmanager
def small_disk(folder, kibibytes):
    """A disk of so many KiB; the function yielded makes it larger."""
    folder.mkdir()
    if not command("mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tandem-test", str(folder)):
        pytest.skip("only root may mount a disk")
    try:
        yield lambda more: command("mount", "-o", f"remount,size={more}k", str(folder))
    finally:
        command("umount", "-l", str(folder))


def used_kibibytes(folder):
    """Whole pages, as on such a disk."""
    return sum(4 * (1 + path.stat().st_size // 4096) for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_a_full_disk_ends_in_one_line_and_the_run_resumes_once_there_is_space(small, whole, tmp_path, share):
    needed = used_kibibytes(whole.parent)
    with small_disk(tmp_path / "disk", max(4, int(share * needed))) as enlarge:
        run, cache = tmp_path / "disk/run", tmp_path / "disk/cache"
        ended = small.run(run, cache)
        assert ended.code == 7, ended
        assert ended.err.startswith("tandem: error: the disk is full: ")
        assert ended.err.count("\n") == 1
        assert_intact(run / "checkpoints", *(cache / kind for kind in ("tokens", "packs", "reference")))
        assert not (run / "model").exists()
        assert enlarge(10 * needed)
        ended = small.run(run, cache)
        assert ended.code == 0, ended
        assert_same(run, whole)
