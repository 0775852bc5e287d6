"""What holds for the translation of any configuration of any other trainer."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.config.compat.records import nested
from tandem.config.compat.rules.registry import RULES
from tandem.config.compat.show import shown_rows
from tandem.config.compat.table import load_table, origins
from tandem.config.compat.translate import is_own_key, translate
from tandem.config.keys import key_names
from tandem.config.validation import flatten
from tandem.errors import ConfigError

KINDS = {"same", "translated", "no effect"}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2000)
    | st.floats(0, 2, allow_nan=False)
    | st.sampled_from(["none", "lora", "dpo", "bf16", "a.jsonl", "x.nemo", "min", "cosine", "", "0.5"])
    | st.text(max_size=5)
)
# A trainer refuses a file without these.
REQUIRED = {
    "axolotl": {"base_model": "org/model", "learning_rate": 1e-6, "rl": "dpo"},
    "llama-factory": {"model_name_or_path": "org/model", "stage": "dpo"},
    "trl": {"model_name_or_path": "org/model"},
}
FILES = [{"path": "a.jsonl", "ds_type": "json", "type": "chatml.intel"}, {"path": "c.jsonl", "type": "chatml.ultra"}]
LISTS_OF_SECTIONS = st.lists(
    st.dictionaries(st.sampled_from("ab"), SCALARS | st.dictionaries(st.sampled_from("cd"), SCALARS), max_size=2),
    max_size=2,
)
VALUES = (
    LISTS_OF_SECTIONS
    | SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2)
)


def keys_of(origin: str) -> st.SearchStrategy[str]:
    """Keys of a trainer's table, of tandem, and of neither."""
    written = sorted(load_table(origin).keys)
    known = [key.replace(".**", ".inner.leaf").replace("*", "name") for key in written]
    unknown = st.from_regex(r"[a-z]{1,6}(\.[a-z]{1,6}){0,2}", fullmatch=True)
    return st.sampled_from(known) | st.sampled_from(sorted(key_names())) | unknown


def keys_inside(key: str, value: Any) -> list[str]:
    """The keys of a value, those of lists of sections too: datasets[0].path."""
    if isinstance(value, list) and any(isinstance(one, dict) and one for one in value):
        return [found for i, one in enumerate(value) for found in keys_inside(f"{key}[{i}]", one)]
    if isinstance(value, dict) and value:
        return [found for name, one in value.items() for found in keys_inside(f"{key}.{name}", one)]
    return [key]


def keys_shown(tree: dict[str, Any]) -> list[str]:
    return sorted(found for key, value in tree.items() for found in keys_inside(key, value))


@pytest.mark.parametrize(
    ("origin", "more"),
    [
        (
            "trl",
            {
                "datasets": [
                    {"path": "org/pairs", "split": "train"},
                    {"path": "json", "data_files": {"train": "b.jsonl"}},
                ]
            },
        ),
        ("axolotl", {"datasets": [{"path": "a.jsonl", "type": {"field_prompt": "q", "field_chosen": None}}]}),
        (
            "axolotl",
            {"datasets": FILES, "test_datasets": [{"path": "b.jsonl", "split": "train", "type": "chatml.intel"}]},
        ),
        ("llama-factory", {"data": {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "weight": 2}]}}),
        ("nemo-rl", {"data": {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "weight": 2}]}}),
        ("nemo-aligner", {"data": {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "weight": 2}]}}),
    ],
)
def test_each_key_inside_a_list_of_sets_has_a_row(origin, more):
    tree = {**REQUIRED.get(origin, {}), **more}
    translation = translate(origin, tree, dict.fromkeys(flatten(tree), "theirs.yaml"))
    assert sorted(row.key for row in shown_rows(translation) if row.kind != "default") == keys_shown(tree)


def without_clashes(flat: dict[str, Any]) -> dict[str, Any]:
    """Without keys that are also sections: a and a.b cannot both have a value."""
    return {key: value for key, value in flat.items() if not any(other.startswith(f"{key}.") for other in flat)}


@pytest.mark.parametrize("origin", origins())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_key_is_of_one_kind_and_none_is_missing(origin, data):
    flat = without_clashes(data.draw(st.dictionaries(keys_of(origin), VALUES, max_size=12)))
    tree = nested(flat)
    places = dict.fromkeys(flatten(tree), "theirs.yaml")
    try:
        translation = translate(origin, tree, places)
    except ConfigError as error:
        # One message names every key that is refused, or two keys that disagree.
        first, *refused = str(error).split("\n  ")
        named = [f": {key} = " for key in flatten(tree)]
        assert all(any(name in line for name in named) or " = null: " in line for line in refused if "yaml: " in line)
        assert refused or "both set" in first
    else:
        own = [row for row in translation.rows if row.kind != "default"]
        shown = [row for row in shown_rows(translation) if row.kind != "default"]
        assert sorted(row.key for row in shown) == keys_shown(tree)
        assert sorted(row.key for row in own) == sorted(flatten(tree))
        assert {row.kind for row in own} <= KINDS
        for row in own:
            assert row.outcome.note if row.kind == "no effect" else row.outcome.settings or row.outcome.options


@pytest.mark.parametrize("origin", origins())
@pytest.mark.parametrize(
    "value",
    [None, *(pytest.param(one, marks=pytest.mark.slow) for one in (True, 0, 1, 0.5, "x", ["a"], {"a": 1}))],
    ids=repr,
)
def test_each_key_of_a_table_is_in_the_result_or_in_the_message(origin, value):
    for written in load_table(origin).keys:
        name = written.replace(".**", ".inner.leaf").replace("*", "name")
        (key,) = flatten(nested({name: value}))
        tree = nested({**REQUIRED.get(origin, {}), name: value})
        try:
            rows = translate(origin, tree, dict.fromkeys(flatten(tree), "theirs.yaml")).rows
        except ConfigError as error:
            assert key.removesuffix(".inner.leaf") in str(error)
        else:
            assert sorted(row.key for row in rows if row.kind != "default") == sorted(flatten(tree))


@pytest.mark.parametrize("origin", origins())
def test_a_table_refers_to_keys_rules_and_options_that_exist(origin):
    table = load_table(origin)
    for cases in table.keys.values():
        for case in cases:
            assert case.action != "to" or is_own_key(case.argument)
            assert case.action != "rule" or case.argument in RULES
            assert case.action != "option" or case.argument in ("--pack-sizes", "--output-dir")
    assert all(map(is_own_key, table.defaults))


@pytest.mark.parametrize("origin", origins())
def test_reasons_are_sentences(origin):
    for cases in load_table(origin).keys.values():
        for case in cases:
            assert case.action not in ("no_effect", "refused") or case.argument.endswith((".", ")"))
