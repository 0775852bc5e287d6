"""The grid of a sweep: which values it has, how runs are named, and what is refused."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.source.overrides import parse_override, plain_value
from tandem.errors import ConfigError
from tandem.sweeping.grid import MAX_NAME_CHARACTERS, parse_grid
from tandem.terminal.commands import override


def values(text: str) -> list[str]:
    (alternatives,) = parse_grid([text]).alternatives
    return list(alternatives)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.seed=1,2,3", ["run.seed=1", "run.seed=2", "run.seed=3"]),
        ("+run.seed=1,2", ["run.seed=1", "run.seed=2"]),
        ("run.seed=range(1,4)", ["run.seed=1", "run.seed=2", "run.seed=3"]),
        ("run.seed=choice(1,2)", ["run.seed=1", "run.seed=2"]),
        ("run.seed=choice(1)", ["run.seed=1"]),
        ("a.lr=1e-6,1.50", ["a.lr=1e-06", "a.lr=1.5"]),
        ("a.lr=inf,-inf", ["a.lr=inf", "a.lr=-inf"]),
        ("a.b=null,true", ["a.b=null", "a.b=true"]),
        ("a.betas=[0.9,0.95],[0.9,0.99]", ["a.betas=[0.9,0.95]", "a.betas=[0.9,0.99]"]),
        ("a.b={x:1},{x:2}", ["a.b={x:1}", "a.b={x:2}"]),
        ("a.b='x,y',z", ["a.b='x,y'", "a.b=z"]),
        ("data.train=~/a.jsonl,b.jsonl", ["data.train='~/a.jsonl'", "data.train=b.jsonl"]),
        ("a.b=${run.seed},1", ["a.b='${run.seed}'", "a.b=1"]),
    ],
)
def test_each_value_becomes_an_override(text, expected):
    assert values(text) == expected


def test_a_list_in_brackets_and_a_quoted_comma_are_single_values():
    grid = parse_grid(["run.seed=1,2", "a.betas=[0.9,0.95]", "a.b='x,y'"])
    assert grid.num_runs == 2
    assert [one.overrides for one in grid.combinations()] == [
        ("run.seed=1", "a.betas=[0.9,0.95]", "a.b='x,y'"),
        ("run.seed=2", "a.betas=[0.9,0.95]", "a.b='x,y'"),
    ]


def test_every_combination_once_and_the_last_key_changes_first():
    grid = parse_grid(["a.x=1,2", "a.fixed=7", "a.y=b,c"])
    assert grid.swept == ("a.x", "a.y")
    found = [one.overrides for one in grid.combinations()]
    assert found == [(f"a.x={x}", "a.fixed=7", f"a.y={y}") for x in (1, 2) for y in "bc"]
    assert grid.names() == ["x-1_y-b", "x-1_y-c", "x-2_y-b", "x-2_y-c"]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.text(max_size=12)
)


@settings(deadline=None)
@given(st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=2, max_size=5))
def test_a_value_survives_being_written_as_a_list_of_values_and_parsed(given_values):
    text = ",".join(override("a.b", one).partition("=")[2] for one in given_values)
    found = [plain_value(parse_override(one).value()) for one in values(f"a.b={text}")]
    assert found == given_values
    assert list(map(type, found)) == list(map(type, given_values))


@settings(deadline=None)
@given(st.lists(st.lists(SCALARS, min_size=2, max_size=4), min_size=1, max_size=3))
def test_names_are_different_and_safe_in_paths_and_overrides(lists):
    texts = [",".join(override("k", one).partition("=")[2] for one in one_list) for one_list in lists]
    grid = parse_grid([f"section.key{number}={text}" for number, text in enumerate(texts)])
    names = grid.names()
    assert len(names) == grid.num_runs == math.prod(map(len, lists)) == len({name.lower() for name in names})
    for name in names:
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name)
        assert len(name) < MAX_NAME_CHARACTERS + 5
        assert override("run.dir", f"runs/{name}") == f"run.dir=runs/{name}"  # needs no quotes


def test_a_name_has_the_shortest_end_of_a_key_that_tells_it_apart():
    grid = parse_grid(["policy.optimizer.kwargs.lr=1e-6,1e-5", "dpo.x.lr=1,2", "run.seed=1,2"])
    assert grid.names()[0] == "kwargs.lr-1e-06_x.lr-1_seed-1"


def test_the_sign_of_an_exponent_is_not_lost():
    names = parse_grid(["policy.optimizer.kwargs.lr=1e30,1e-30,-1e30"]).names()
    assert names == ["lr-1e30", "lr-1e-30", "lr--1e30"]


def test_of_a_long_value_the_name_has_the_end():
    names = parse_grid([f"data.train=/{'folder/' * 20}a.jsonl,b.jsonl"]).names()
    assert names == ["train-lder-folder-folder-folder-folder-a.jsonl", "train-b.jsonl"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_grid(overrides)
    return str(refused.value)


def test_a_grid_needs_a_key_with_several_values():
    assert refusal("run.seed=1") == (
        "nothing to sweep: no key has several values. Write key=a,b, such as dpo.reference_policy_kl_penalty=0.05,0.1. For a "
        "single run, use `tandem train`."
    )


def test_a_key_may_be_given_once():
    assert refusal("run.seed=1,2", "run.seed=3") == (
        "run.seed is given twice, and one of them has several values. Leave out one of them."
    )


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("run.dir", "each run gets a directory in that of the sweep"),
        ("run.name", "a run is named after its values"),
        ("checkpointing.checkpoint_dir", "each run keeps its checkpoints in its own directory"),
        ("logger.log_dir", "each run writes to a subfolder with its name"),
        ("reference.cache_dir", "the runs share the reference"),
        ("config_version", "it describes the file"),
    ],
)
def test_keys_that_say_where_a_run_is_are_not_swept(key, reason):
    assert refusal(f"{key}=a,b") == (
        f"override '{key}=a,b': {key} cannot be swept, because {reason}. Give other keys several values."
    )


@pytest.mark.parametrize("text", ["a.b=glob(*)", "a.b=interval(0,1)", "a.b=shuffle(1,2,3)", "~a.b=1,2"])
def test_what_cannot_be_tried_one_by_one_is_refused(text):
    assert refusal(text) == (
        f"override {text!r}: not a list of values that a sweep can try one by one. Write a.b=a,b or a.b=range(1,4)."
    )


def test_an_empty_range_is_refused():
    assert refusal("a.b=range(5,5)") == (
        "override 'a.b=range(5,5)': the range has no values. Write a.b=a,b or a.b=range(1,4)."
    )


def test_a_range_without_end_is_refused():
    assert refusal("a.b=range(0.0,1.0,0.0)").startswith("override 'a.b=range(0.0,1.0,0.0)': ")


def test_large_grids_are_refused_without_being_built():
    assert refusal("a.x=range(0,100)", "a.y=range(0,100)") == (
        "100 x 100 values are 10,000 runs, and a sweep has at most 200. Give fewer values, or split the sweep."
    )
    assert refusal("a.x=range(0,1000000000000)") == (
        "override 'a.x=range(0,1000000000000)': more than 200 values, and a sweep has at most 200 runs. Give fewer values."
    )
    assert parse_grid(["a.x=range(0,200)"]).num_runs == 200


def test_an_override_that_cannot_be_parsed_is_refused():
    assert refusal("a.b=1,").startswith("override 'a.b=1,': ")
