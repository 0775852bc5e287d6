"""The sets that a configuration names: one or several to train on, some held out, and where published ones are."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from letters import letter_tokenizer

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.data.preflight import preflights
from tandem.data.store import sets as sets_module
from tandem.data.store.selection import Selection, hold_out
from tandem.data.store.sets import Sets, Span, open_sets, with_set_keys
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("of_a_command")

RAW = Template(letter_tokenizer(), None, {})


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a.jsonl (5 preferences), b.jsonl (3) and c.jsonl (40); prompts name their file and row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    for name, count in (("a", 5), ("b", 3), ("c", 40)):
        prompts = [name + letter * (i // 20 + 1) for i, letter in enumerate("cdefghijklmnopqrstuv" * 2)][:count]
        lines = [json.dumps({"prompt": prompt, "chosen": "yes", "rejected": "no"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def config(*overrides: str, file: str | None = None) -> Config:
    return load_config(file, overrides).config


def opened(*overrides: str, **changes) -> Sets:
    return open_sets(config(*overrides), RAW, **changes)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return str(caught.value)


def places(preferences: TokenStore | Selection) -> list[str]:
    return [preferences.place(i) for i in range(len(preferences))]


# One and several


def test_one_training_set_is_read_as_it_is(here):
    found = opened("data.train=a.jsonl")
    assert list(found.read) == ["train"]
    assert found.train is found.read["train"]
    assert found.spans == (Span(0, 5, 1.0),)
    assert found.validation == {}


def test_several_training_sets_are_concatenated(here):
    found = opened("data.train=[a.jsonl,b.jsonl]")
    assert list(found.read) == ["train-0", "train-1"]
    assert found.spans == (Span(0, 5, 1.0), Span(5, 8, 1.0))
    assert places(found.train) == [f"a.jsonl:{i}" for i in range(1, 6)] + [f"b.jsonl:{i}" for i in range(1, 4)]


def test_each_training_set_has_its_weight(here):
    found = opened("data.train=[{data_path:a.jsonl,weight:0.4},{data_path:b.jsonl,weight:2}]")
    assert found.spans == (Span(0, 5, 0.4), Span(5, 8, 2))
    assert opened("data.train={data_path:a.jsonl,weight:1.5}").spans == (Span(0, 5, 1.5),)


def test_preferences_that_are_in_an_earlier_training_set_are_noted(here):
    lines = [json.loads(line) for line in (here / "b.jsonl").read_text().splitlines()]
    opposite = {**lines[0], "chosen": "no", "rejected": "yes"}
    more = [lines[2], opposite, {**lines[0], "prompt": "zz"}]
    (here / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    found = opened("data.train=[a.jsonl,b.jsonl,more.jsonl]")
    assert [one.notes for one in preflights(found)] == [
        {},
        {},
        {
            "preferences that are already in train-1": 1,
            "preferences that are in train-1 with chosen and rejected swapped": 1,
        },
    ]


def test_a_loss_that_reads_scores_is_refused_before_training(here):
    with pytest.raises(DataError, match=r"^a\.jsonl:1: not every completion has a score \(5 of 5 preferences\)"):
        opened("data.train=a.jsonl", "dpo.preference_loss=rpo_sq")


def test_scores_too_far_apart_for_a_loss_that_reads_them_are_refused_with_their_place(here):
    rewards = [(2.0, 1.0), (3e38, -3e38)]
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no", "chosen_reward": high, "rejected_reward": low}
        for high, low in rewards
    ]
    (here / "far.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(opened("data.train=far.jsonl").train) == 2  # dpo does not read them
    with pytest.raises(DataError) as caught:
        opened("data.train=far.jsonl", "dpo.preference_loss=rpo_sq", "dpo.gt_reward_scale=2")
    assert str(caught.value) == (
        "far.jsonl:2: scores differ by 6e+38. Multiplied by dpo.gt_reward_scale=2, this margin is over 1e+09, and the loss "
        "could overflow float32. Rescale the scores, or lower dpo.gt_reward_scale."
    )


@pytest.mark.parametrize("key", ["default_chosen_reward", "default_rejected_reward"])
def test_a_default_score_must_fit_its_storage_type(key):
    assert refusal(f"data.{key}=-1e39") == (
        f"command line: data.{key} = -1e+39 is too large: scores are stored as float32. Use at most 3.4e+38."
    )


def test_the_same_set_may_be_named_twice(here):
    found = opened("data.train=[b.jsonl,b.jsonl]")
    assert places(found.train) == [f"b.jsonl:{i}" for i in (1, 2, 3)] * 2
    assert [one.notes for one in preflights(found)] == [{}, {"preferences that are already in train-0": 3}]


def test_validation_sets_are_read_beside_them_by_name(here):
    found = opened("data.train=[a.jsonl,b.jsonl]", "data.validation=c.jsonl", "data.val_data_paths={other:b.jsonl}")
    assert list(found.read) == ["train-0", "train-1", "validation-default", "validation-other"]
    assert {name: len(chosen) for name, chosen in found.validation.items()} == {"default": 40, "other": 3}
    assert len(found.train) == 8


def test_a_list_of_datasets_is_read_from_a_file(here):
    (here / "run.yaml").write_text("data: {train: [a.jsonl, {data_path: b.jsonl, weight: 2.0}]}")
    given = config(file="run.yaml").data.training_sets
    assert [(one.data_path, one.weight) for one in given] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]


def test_settings_missing_from_a_dataset_in_a_list_come_from_the_default():
    data = config(
        "data.default.dataset_name=aligner",
        "data.default.prompt_key=ask",
        "data.train=[a.jsonl,{data_path:b.jsonl,prompt_key:question}]",
        "data.validation=c.jsonl",
    ).data
    assert [(d.data_path, d.dataset_name, d.prompt_key) for d in data.training_sets] == [
        ("a.jsonl", "aligner", "ask"),
        ("b.jsonl", "aligner", "question"),
    ]
    assert data.validation_sets["default"].prompt_key == "ask"


def test_an_empty_list_of_training_sets_is_refused():
    assert refusal("data.train=[]") == ("command line: data.train = []: it has 0 items and needs at least 1.")


def test_an_unknown_key_within_a_list_is_refused():
    said = refusal("data.train=[{data_path:a.jsonl,wieght:2}]")
    assert said.startswith("command line: unknown key data.train.0.wieght. Did you mean data.")


@pytest.mark.parametrize("weight", [0, -1])
def test_a_weight_is_more_than_nothing(weight):
    assert refusal(f"data.train={{data_path:a.jsonl,weight:{weight}}}") == (
        f"command line: data.train.weight = {weight}: input should be greater than 0."
    )


# Held out


def test_a_share_is_held_out_by_prompt_as_the_validation_set_named_default(here):
    found = opened("data.train=c.jsonl", "data.validation_share=0.25", "run.seed=7")
    held = hold_out([found.read["train"]], 0.25, 7)
    assert held.sum() == 10
    assert list(found.validation) == ["default"]
    assert places(found.validation["default"]) == [f"c.jsonl:{i + 1}" for i in np.flatnonzero(held)]
    assert places(found.train) == [f"c.jsonl:{i + 1}" for i in np.flatnonzero(~held)]
    assert found.spans == (Span(0, 30, 1.0),)
    assert list(found.read) == ["train"]


def test_each_training_set_loses_what_is_held_out_of_it(here):
    found = opened("data.train=[a.jsonl,{data_path:c.jsonl,weight:3},b.jsonl]", "data.validation_share=0.25")
    held = hold_out(list(found.read.values()), 0.25, 42)
    kept = [int((~held[start:end]).sum()) for start, end in ((0, 5), (5, 45), (45, 48))]
    assert sum(kept) == 36
    a, c = kept[0], kept[0] + kept[1]
    assert found.spans == (Span(0, a, 1.0), Span(a, c, 3.0), Span(c, 36, 1.0))
    names = [place.split(":")[0] for place in places(found.train)]
    assert names == ["a.jsonl"] * kept[0] + ["c.jsonl"] * kept[1] + ["b.jsonl"] * kept[2]
    assert sorted(places(found.train) + places(found.validation["default"])) == sorted(
        f"{name}.jsonl:{i}" for name, count in (("a", 5), ("b", 3), ("c", 40)) for i in range(1, count + 1)
    )


def test_the_bundled_set_gives_up_its_validation_set_for_a_share():
    assert list(config().data.validation_sets) == ["default"]
    assert config("data.validation_share=0.1").data.validation_sets == {}


@pytest.mark.parametrize("given", ["data.validation=c.jsonl", "data.val_data_paths={other:c.jsonl}"])
def test_a_validation_share_and_a_validation_set_are_refused_together(given):
    assert refusal("data.train=a.jsonl", given, "data.validation_share=0.1") == (
        "command line: data.validation_share makes a validation set, but data.validation or data.val_data_paths already "
        "gives one. Leave out one of them."
    )


@pytest.mark.parametrize(
    ("share", "reason"), [(1, "input should be less than 1"), (-0.1, "input should be greater than or equal to 0")]
)
def test_a_share_is_of_something_and_leaves_something(share, reason):
    assert refusal(f"data.validation_share={share}") == f"command line: data.validation_share = {share}: {reason}."


def test_a_weight_is_no_more_than_memory_can_hold():
    assert "data.train.weight = 1e+30: input should be less than or equal to 1000" in refusal(
        "data.train={data_path:a.jsonl,weight:1e30}"
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("data.validation={data_path:c.jsonl,weight:2}", "default"),
        ("data.val_data_paths.w={data_path:c,weight:2}", "w"),
    ],
)
def test_a_validation_set_has_no_weight(given, name):
    assert refusal("data.train=a.jsonl", given) == (
        f"command line: validation set {name} has weight 2.0, but only training sets can have a weight. Leave out the weight."
    )


# Published sets


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, DatasetFields]]:
    """What is opened, and nothing is."""
    opened_sets: list[tuple[str, DatasetFields]] = []

    class Nothing:
        columns = ()

        def __len__(self) -> int:
            return 0

    def open_nothing(path, given, *_, **__):
        opened_sets.append((path, given))
        return Nothing()

    monkeypatch.setattr(sets_module, "open_store", open_nothing)
    return opened_sets


def parts(asked) -> list[tuple]:
    return [(path, given.data_path, given.subset, given.split, given.dataset_name) for path, given in asked]


def test_a_format_named_after_a_published_set_is_found_without_a_path(asked):
    opened("data.train=[{dataset_name:HelpSteer3},{dataset_name:Tulu3Preference}]")
    tulu = "allenai/llama-3.1-tulu-3-8b-preference-mixture"
    assert parts(asked) == [
        ("nvidia/HelpSteer3", "nvidia/HelpSteer3", "preference", None, "HelpSteer3"),
        (tulu, tulu, None, None, "Tulu3Preference"),
    ]


def test_the_subset_and_split_that_are_given_are_kept(asked):
    opened(
        "data.train={dataset_name:HelpSteer3,subset:edit}",
        "data.validation={dataset_name:HelpSteer3,split:validation}",
    )
    assert [given[2:4] for given in parts(asked)] == [("edit", None), ("preference", "validation")]


def test_a_path_that_is_given_is_taken(asked):
    opened("data.train={dataset_name:HelpSteer3,data_path:mine.jsonl}")
    assert parts(asked) == [("mine.jsonl", "mine.jsonl", None, None, "HelpSteer3")]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["data.train={dataset_name:aligner}"], "data.train"),
        (["data.train=[a.jsonl,{weight:2}]"], "data.train"),
        (["data.train=a.jsonl", "data.validation={prompt_key:ask}"], "validation set default"),
        (["data.train=a.jsonl", "data.val_data_paths.other={prompt_key:ask}"], "validation set other"),
    ],
)
def test_a_set_without_a_path_that_no_name_tells_is_refused(asked, overrides, where):
    with pytest.raises(ConfigError) as caught:
        opened(*overrides)
    assert (
        str(caught.value)
        == f"{where} has no data_path. Set it (embedded: the bundled pairs), or set data.default.data_path."
    )


# Progress


def test_a_bar_is_opened_for_each_set_and_told_all_its_steps(here):
    bars: dict[str, list[int]] = {}

    @contextmanager
    def bar(what: str, total: int, unit: str):
        assert (total, unit) == (100, "%")
        bars[what] = []
        yield lambda advance=1, words="": bars[what].append(advance)
        assert sum(bars[what]) == total

    opened("data.train=[a.jsonl,b.jsonl]", "data.validation=c.jsonl", bar=bar)
    assert list(bars) == ["Tokenising train-0", "Tokenising train-1", "Tokenising validation-default"]


def test_messages_about_a_set_name_the_keys_of_that_set(here):
    Path("odd.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejecte": "c"}\n')
    for given, key in (
        ("data.train=odd.jsonl", "data.train"),
        ("data.validation=odd.jsonl", "data.validation"),
        ("data.val_data_paths.w=odd.jsonl", "data.val_data_paths.w"),
    ):
        with pytest.raises(DataError, match=rf"{key}\.rejected_key to the key that has it, such as rejecte\."):
            opened("data.train=a.jsonl", given)
    with pytest.raises(DataError) as caught:
        opened("data.train=[a.jsonl,odd.jsonl]")
    assert str(caught.value).endswith(
        "data.train[1].rejected_key to the key that has it, such as rejecte.\n"
        "In a list, write a set with settings as {data_path: FILE, KEY: VALUE}."
    )


def test_a_file_that_a_sets_keys_name_hides_nothing_of_the_other_sets(here):
    with pytest.raises(ConfigError) as caught:
        opened("data.train.data_path=a.jsonl", "data.train.prompt_file=no.txt", "data.validation=gone.jsonl")
    prompt, gone = str(caught.value).split("\n\n")
    assert prompt == "train: a.jsonl: prompt_file = no.txt: cannot be read (No such file or directory). Check the path."
    assert gone.startswith("validation-default: gone.jsonl: no such file or folder")


@pytest.mark.parametrize(
    ("split", "key"),
    [
        ("train", "data.train"),
        ("train-2", "data.train[2]"),
        ("validation-default", "data.validation"),
        ("validation-hard", "data.val_data_paths.hard"),
    ],
)
def test_a_key_that_is_named_is_the_sets_own(split, key):
    """In errors, and in rejects.jsonl."""
    assert with_set_keys("Set data.train.chosen_key to another key.", split) == f"Set {key}.chosen_key to another key."


def test_errors_of_all_sets_are_reported_together(here):
    Path("odd.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejecte": "c"}\n')
    Path("empty.jsonl").write_text("")
    with pytest.raises(DataError) as caught:
        opened("data.train=[odd.jsonl,a.jsonl]", "data.validation=empty.jsonl", "data.val_data_paths.w=gone.jsonl")
    odd, empty, gone = str(caught.value).split("\n\n")
    assert "data.train[0].rejected_key to the key that has it, such as rejecte." in odd
    assert odd.startswith("train-0: odd.jsonl: none of 1 rows can be read:")
    assert (
        empty
        == "validation-default: empty.jsonl: the file has no rows. Check that it was written or downloaded completely."
    )
    assert gone.startswith("validation-w: gone.jsonl: ")


GOOD, BAD = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n', '{"prompt": "a"}\n'
LONG = '{"prompt": "a", "chosen": "b b b b b b b b b b b b b b b b", "rejected": "c"}\n'


def test_a_setting_for_several_sets_is_suggested_once_with_a_value_for_all(here):
    Path("some.jsonl").write_text(GOOD * 8 + BAD * 2)
    Path("more.jsonl").write_text(GOOD * 6 + BAD * 4)
    sets = ["data.train=some.jsonl", "data.validation=more.jsonl"]
    with pytest.raises(DataError) as caught:
        opened(*sets)
    assert str(caught.value).endswith("\nTo accept all of these sets, set data.on_bad_row=skip data.max_bad_share=0.4.")
    read = opened(*sets, "data.on_bad_row=skip", "data.max_bad_share=0.4").read
    assert [len(store) for store in read.values()] == [8, 6]
    with pytest.raises(DataError) as caught:  # one of which no setting lets pass
        opened(*sets, "data.val_data_paths.w=gone.jsonl")
    assert "To accept all" not in str(caught.value)
    Path("more.jsonl").write_text(GOOD)
    with pytest.raises(DataError) as caught:
        opened(*sets)
    assert "To accept all" not in str(caught.value)


def test_lengths_in_tokens_of_the_embedded_model_are_reported_as_such(here):
    Path("long.jsonl").write_text(GOOD + LONG)
    with pytest.raises(DataError) as caught:
        opened("data.train=long.jsonl", "policy.max_total_sequence_length=20", "data.max_filtered_share=0.1")
    assert str(caught.value).endswith(
        "\nLengths are counted with the embedded model's tokenizer. Set yours with policy.model_name=MODEL."
    )


def test_one_field_cannot_be_two_parts_of_a_preference():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["data.train.chosen_key=rejected"])
    assert str(caught.value) == (
        "command line: chosen_key and rejected_key are both 'rejected', but must name different fields. Change one."
    )
