"""The shards of `make test-slow SHARD=1/3`."""

import pytest
from shards import shard_of


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_test_is_in_exactly_one_shard(count):
    tests = list("abcde")
    shards = [shard_of(tests, f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(test for chosen, _ in shards for test in chosen) == tests
    assert all(sorted(chosen + others) == tests for chosen, others in shards)


def test_tests_are_assigned_to_shards_in_turn():
    assert shard_of("abcd", "1/3") == (["a", "d"], ["b", "c"])


@pytest.mark.parametrize("shard", ["4/3", "0/3", "1", "1/0", "a/b", "-1/3"])
def test_a_shard_that_does_not_exist_is_refused(shard):
    with pytest.raises(pytest.UsageError) as error:
        shard_of("abcd", shard)
    assert str(error.value) == f"--shard={shard}: write NUMBER/COUNT, such as 1/3, 2/3 and 3/3 for three shards."
