"""One small model and set for all, and the run on them that nothing interrupted."""

import pytest
from killing import Small


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def whole(small):
    """The run of `SETTINGS` without interruption; its cache is next to it."""
    folder = small.folder / "whole"
    ended = small.run(folder / "run", folder / "cache")
    assert ended.code == 0, ended
    return folder / "run"
