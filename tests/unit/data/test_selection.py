"""Preferences of several sets read as one, and which of them are held out."""

import json

import numpy as np
import pytest
from letters import EOS, ids, letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store.opening import open_store
from tandem.data.store.selection import Selection, hold_out
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template
from tandem.errors import DataError


@pytest.fixture
def store_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))

    def make(name: str, *rows: tuple[str, ...]) -> TokenStore:
        """Rows of a prompt and its completions, best first."""
        source = tmp_path / name
        lines = [
            json.dumps({"context": prompt, "completions": [{"rank": i, "completion": t} for i, t in enumerate(texts)]})
            for prompt, *texts in rows
        ]
        source.write_text("\n".join(lines), encoding="utf-8")
        template = Template(letter_tokenizer(), None, {})
        return open_store(str(source), DatasetFields(), template, Data(pairing="all"), 100)

    return make


@pytest.fixture
def selection(store_of, tmp_path):
    """Rows 0 to 2 stand in the first set, 3 and 4 in the second; 4, 0 and 2 are selected."""
    first = store_of("first", ("hi", "yes", "no"), ("z", "zz", "zzz"), ("what", "a", "bb", "ccc"))
    second = store_of("second", ("not", "this", "one"), ("so", "dddd", "e"))
    return Selection({"first": first, "second": second}, np.array([4, 0, 2]))


# Several sets as one


def test_selected_preferences_are_read_from_their_own_sets_in_the_order_given(selection, tmp_path):
    assert len(selection) == 3
    assert [selection[i].prompt.tolist() for i in range(3)] == [ids("so"), ids("hi"), ids("what")]
    assert [c.tolist() for c in selection[1].completions] == [[*ids("yes"), EOS], [*ids("no"), EOS]]
    places = [f"{tmp_path}/second:2", f"{tmp_path}/first:1", f"{tmp_path}/first:3"]
    assert [selection.place(i) for i in range(3)] == [selection[i].place for i in range(3)] == places


def test_sizes_are_those_of_the_selected_preferences_alone(selection):
    # so: dddd e | hi: yes no | what: a bb ccc; every completion has an EOS more
    assert selection.num_pairs.tolist() == [1, 1, 3]
    assert selection.num_prompt_tokens.tolist() == [2, 2, 4]
    assert selection.num_completions.tolist() == [2, 2, 3]
    assert selection.num_completion_tokens.tolist() == [5 + 2, 4 + 3, 2 + 3 + 4]
    assert selection.num_scored_tokens.tolist() == [7, 7, 9]
    assert selection.completion_lengths.tolist() == [5, 2, 4, 3, 2, 3, 4]
    assert selection.longest.tolist() == [2 + 5, 2 + 4, 4 + 4]


def test_the_highest_token_is_that_of_any_preference_read(selection):
    assert selection.highest_token_id == ids("z")[0]


def test_a_selection_of_all_rows_is_the_sets_end_to_end(store_of):
    one, two = store_of("one", ("a", "b", "c"), ("d", "e", "f")), store_of("two", ("g", "h", "i"))
    everything = Selection({"one": one, "two": two}, np.arange(3))
    assert [everything.place(i) for i in range(3)] == [one.place(0), one.place(1), two.place(0)]


def test_a_selection_is_named_by_its_sets_and_its_rows(store_of):
    one, two = store_of("one", ("a", "b", "c"), ("d", "e", "f")), store_of("two", ("g", "h", "i"))

    def name(stores, rows):
        return Selection(dict(enumerate(stores)), np.array(rows)).fingerprint

    names = [name([one, two], [0, 1]), name([one, two], [1, 0]), name([one, two], [0]), name([one], [0, 1])]
    assert len({*names, name([two, one], [0, 1]), one.fingerprint}) == 6
    assert name([one, two], [0, 1]) == names[0]
    assert Selection({"one": one}, np.array([0, 1], np.int32)).fingerprint == names[3]


# What is held out


def words(count: int) -> list[str]:
    """ck cl cm ... : so many different prompts."""
    return [letter + end for letter in "cdefghij" for end in "klmnopqrst"][:count]


def rows_of(prompts: list[str]) -> list[tuple[str, str, str]]:
    return [(prompt, f"x{number % 7 * 'y'}", "no") for number, prompt in enumerate(prompts)]


def held_prompts(stores: list[TokenStore], share: float, seed: int = 0) -> list[list[int]]:
    held = hold_out(stores, share, seed)
    prompts = [row.prompt.tolist() for store in stores for row in store]
    assert len(held) == len(prompts)
    return sorted(prompt for prompt, is_held in zip(prompts, held, strict=True) if is_held)


@pytest.mark.parametrize(("share", "count"), [(0.25, 10), (0.5, 20), (0.01, 1), (0.96, 38)])
def test_of_different_prompts_the_share_is_exact_and_never_nothing(store_of, share, count):
    store = store_of("set", *rows_of(words(40)))
    assert len(held_prompts([store], share)) == count


def test_preferences_of_one_prompt_are_on_one_side(store_of):
    prompts = words(10) * 3
    store = store_of("set", *rows_of(prompts))
    held = hold_out([store], 0.2, 0)
    sides = {prompt: {bool(held[i]) for i, p in enumerate(prompts) if p == prompt} for prompt in prompts}
    assert all(len(side) == 1 for side in sides.values())
    assert held.sum() == 6  # a fifth of 30: two prompts of three preferences


def test_a_prompt_that_is_reached_is_held_out_whole(store_of):
    # A tenth of 30 is 3; of prompts that stand ten times each, the first to be reached brings all its ten.
    store = store_of("set", *rows_of(words(3) * 10))
    assert hold_out([store], 0.1, 0).sum() == 10


def test_a_prompt_in_two_sets_is_on_one_side(store_of):
    one, two = (store_of(name, *rows_of(words(20))) for name in ("one", "two"))
    held = hold_out([one, two], 0.25, 0)
    assert held[:20].tolist() == held[20:].tolist()
    assert held.sum() == 10


def test_the_choice_does_not_depend_on_the_order_of_the_rows_or_the_sets(store_of):
    prompts = words(30)
    forth, back = store_of("forth", *rows_of(prompts)), store_of("back", *rows_of(prompts[::-1]))
    some, others = store_of("some", *rows_of(prompts[:11])), store_of("others", *rows_of(prompts[11:]))
    chosen = held_prompts([forth], 0.2)
    assert len(chosen) == 6
    assert held_prompts([back], 0.2) == held_prompts([some, others], 0.2) == held_prompts([others, some], 0.2) == chosen


def test_the_seed_decides_which(store_of):
    store = store_of("set", *rows_of(words(40)))
    assert held_prompts([store], 0.25, seed=1) == held_prompts([store], 0.25, seed=1)
    assert len({str(held_prompts([store], 0.25, seed=seed)) for seed in (0, 1, 2**32 - 1)}) == 3


def test_a_larger_share_holds_out_the_same_and_more(store_of):
    store = store_of("set", *rows_of(words(40)))
    small, large = hold_out([store], 0.1, 3), hold_out([store], 0.4, 3)
    assert (large & small).sum() == small.sum() == 4


@pytest.mark.parametrize(
    ("prompts", "share", "counted"),
    [
        (["a"] * 4, 0.25, "0.25: all 4 preferences (1 different prompt)"),
        (["a", "b"], 0.9, "0.9: all 2 preferences (2 different prompts)"),
        (words(40), 0.99, "0.99: all 40 preferences (40 different prompts)"),
    ],
)
def test_too_few_prompts_to_hold_some_out_are_refused(store_of, prompts, share, counted):
    store = store_of("set", *rows_of(prompts))
    with pytest.raises(DataError) as caught:
        hold_out([store], share, 0)
    assert str(caught.value) == (
        f"data.validation_share = {counted} would be held out, and none left for training. Lower it, or set data.validation to a "
        "separate set."
    )
