"""The variables of a rank that a user's own program starts: what is missing or wrong is said in one sentence."""

import pytest

from tandem.errors import ConfigError
from tandem.rank_variables import check_rank_variables, is_distributed

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def given(monkeypatch):
    def give(environment: dict[str, str]) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("environment", "several"),
    [({}, False), ({"WORLD_SIZE": "1"}, False), ({"WORLD_SIZE": "1", "RANK": "0"}, False), (RANK, True)],
)
def test_one_of_several_ranks_and_a_process_alone_are_accepted(given, environment, several):
    given(environment)
    check_rank_variables()
    assert is_distributed() == several


NOT_SET = (
    " is not set. Each of several ranks needs RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets "
    "(docs/workers.md). To train with one rank, unset WORLD_SIZE."
)
NOT_A_NUMBER = ": not a number. Set it as torchrun does (docs/workers.md), or unset it."


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None}, f"WORLD_SIZE = 2, but RANK{NOT_SET}"),
        ({"MASTER_ADDR": None}, f"WORLD_SIZE = 2, but MASTER_ADDR{NOT_SET}"),
        ({"MASTER_PORT": None}, f"WORLD_SIZE = 2, but MASTER_PORT{NOT_SET}"),
        ({"MASTER_ADDR": ""}, f"WORLD_SIZE = 2, but MASTER_ADDR{NOT_SET}"),
        ({"WORLD_SIZE": "two"}, f"WORLD_SIZE = 'two'{NOT_A_NUMBER}"),
        ({"RANK": "-1"}, f"RANK = '-1'{NOT_A_NUMBER}"),
        ({"LOCAL_RANK": ""}, f"LOCAL_RANK = ''{NOT_A_NUMBER}"),
        ({"MASTER_PORT": "abc"}, f"MASTER_PORT = 'abc'{NOT_A_NUMBER}"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = 0: not a port. Choose a number from 1 to 65535."),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536: not a port. Choose a number from 1 to 65535."),
        ({"RANK": "2"}, "RANK = 2 and WORLD_SIZE = 2: the ranks have the numbers 0 to 1."),
    ],
)
def test_what_is_missing_or_wrong_is_refused(given, changed, message):
    given({name: value for name, value in (RANK | changed).items() if value is not None})
    with pytest.raises(ConfigError) as refused:
        check_rank_variables()
    assert str(refused.value) == message
