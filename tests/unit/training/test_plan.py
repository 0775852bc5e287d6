"""How many steps a run has, what is proposed where it would have none, and its sets in words."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import within

from tandem.config.load import load_config
from tandem.data.store.sets import Sets
from tandem.errors import ConfigError, DataError
from tandem.report.choices import describe_choices
from tandem.training.start.plan import plan_steps, suggested_batch_size
from tandem.training.start.setup import set_up

pytestmark = pytest.mark.usefixtures("of_a_command")

CPU = torch.device("cpu")
PAGES = ("docs/choosing.md", "docs/tutorial.md", "docs/quickstart.md")
B2 = "policy.train_global_batch_size=2"
MANY = ("dpo.max_num_epochs=1000000000", "dpo.max_num_steps=3")


class Pairs:
    """A set of which only the number of pairs of each preference is known."""

    def __init__(self, *num_pairs: int):
        self.num_pairs = np.array(num_pairs)


def plan(sets: Pairs, *overrides: str):
    config = load_config(None, ["policy.model_name=embedded", *overrides]).config
    return plan_steps(Sets({}, sets, (), {}), config)  # type: ignore[arg-type]


def proposal(sets: Pairs, *overrides: str) -> list[str]:
    """The overrides that are proposed."""
    with pytest.raises(DataError) as refused:
        plan(sets, *overrides)
    found = re.search(r"Set (.*), which gives (\d+) steps\.\Z", str(refused.value))
    assert found
    assert plan(sets, *overrides, *found[1].split()).num_steps == int(found[2])  # as printed
    return [*found[1].split(), found[2]]


def test_fewer_pairs_than_a_batch_are_refused_with_a_batch_size_that_works():
    with pytest.raises(DataError) as refused:
        plan(Pairs(*[1] * 200))
    assert str(refused.value) == (
        "the training set has 200 pairs, fewer than one batch of 256, so there would be no step. "
        "Set policy.train_global_batch_size=8, which gives 25 steps."
    )


def test_the_pages_state_the_rule_for_batch_sizes():
    repository = Path(__file__).parents[3]
    pages = {name: (repository / name).read_text(encoding="utf-8") for name in ("README.md", *PAGES)}
    choosing = pages["docs/choosing.md"]
    for num_pairs, row in (
        (499, "| below 500 | 8 |"),
        (500, "| 500 to 5,000 | 32 |"),
        (5_000, "| 5,000 to 50,000 | 64 |"),
        (50_000, "| 50,000 or more | 128 |"),
    ):
        assert f"\n{row}" in choosing
        assert row.split()[-2] == str(suggested_batch_size(num_pairs))
    assert "Below 60 pairs it is 4, below 30 it is 2, below 15 it is 1" in choosing
    assert [suggested_batch_size(num_pairs) for num_pairs in (60, 59, 30, 29, 15, 14, 1)] == [8, 4, 4, 2, 2, 1, 1]
    for name in ("README.md", "docs/tutorial.md"):
        assert "500" in pages[name].split("policy.train_global_batch_size=8")[0][-60:], name
    for name in ("README.md", "docs/tutorial.md"):
        assert "below 60 pairs a batch of 4, below 30 pairs 2, below 15 pairs 1" in pages[name], name
    assert "`policy.train_global_batch_size`: 8 for fewer than 500 pairs" in pages["docs/quickstart.md"]


@pytest.mark.parametrize("steps", ["null", "20000000"])
def test_a_run_that_would_never_end_is_refused_before_its_steps_are_counted(steps):
    with within(10), pytest.raises(ConfigError) as refused:
        # In order: [1, 1], [2], and a last [1] that is dropped.
        plan(Pairs(1, 1, 2, 1), B2, "data.shuffle=false", "dpo.max_num_epochs=1000000000", f"dpo.max_num_steps={steps}")
    assert str(refused.value) == (
        "dpo.max_num_epochs = 1000000000: the run would have 2,000,000,000 steps, over the limit of 10,000,000. Lower it, or set "
        "dpo.max_num_steps."
    )


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (25, 25),
        (0, 0),
        (0.1, 1),  # of 10 steps
        (0.25, 2),
        (0.99, 9),
        (0.001, 1),
        (1 / 3, 3),
        (1, 1),
        (1.0, 10),
    ],
)
def test_validations_and_checkpoints_come_after_a_number_of_steps_or_a_share_of_an_epoch(given, steps):
    found = plan(Pairs(*[1] * 21), B2, f"dpo.val_period={given}", "dpo.max_num_epochs=3", "dpo.max_num_steps=15")
    assert found.val_period == steps
    if given:
        assert plan(Pairs(*[1] * 21), B2, f"checkpointing.save_period={given}").save_period == steps


def test_a_share_of_an_epoch_is_at_most_one():
    with pytest.raises(ConfigError) as error:
        plan(Pairs(1), "dpo.val_period=1.5")
    assert str(error.value) == (
        "command line: dpo.val_period = 1.5: input should be a valid integer, or input should be less than or equal "
        "to 1."
    )


def test_steps_of_many_epochs_of_single_pairs_are_counted_from_one_epoch():
    with within(10):
        found = plan(
            Pairs(1, 1, 1, 1, 1), B2, "dpo.max_num_epochs=1000000", "dpo.max_num_steps=1999999", "data.drop_last=false"
        )
    assert (found.num_steps, found.num_pairs) == (
        1_999_999,
        3_333_332,
    )  # 2 + 2 + 1 in three steps, 666,666 times, then 2
    for shuffle in ("true", "false"):
        found = plan(
            Pairs(1, 1, 1, 1, 1), B2, "dpo.max_num_epochs=3", "data.drop_last=false", f"data.shuffle={shuffle}"
        )
        assert (found.num_steps, found.num_pairs) == (9, 15)


@pytest.mark.parametrize(
    ("pairs", "overrides", "proposed"),
    [
        ([1] * 100, [], ["policy.train_global_batch_size=8", "dpo.max_num_epochs=2", "24"]),
        ([1] * 45, [], ["policy.train_global_batch_size=4", "dpo.max_num_epochs=2", "22"]),
        ([1] * 45, ["dpo.max_num_epochs=4"], ["policy.train_global_batch_size=4", "44"]),
        ([1] * 45, ["dpo.max_num_steps=5"], ["policy.train_global_batch_size=4", "5"]),
        ([1] * 20, [], ["policy.train_global_batch_size=2", "dpo.max_num_epochs=2", "20"]),
        ([1] * 8, [], ["policy.train_global_batch_size=1", "dpo.max_num_epochs=3", "24"]),
        ([1], [], ["policy.train_global_batch_size=1", "dpo.max_num_epochs=20", "20"]),
        # A preference of three pairs is a batch alone, however small batches are.
        ([3] * 19, [], ["policy.train_global_batch_size=4", "dpo.max_num_epochs=2", "38"]),
    ],
)
def test_the_proposed_batch_gives_twenty_steps_and_runs_as_printed(pairs, overrides, proposed):
    assert proposal(Pairs(*pairs), *overrides) == proposed


def test_a_set_packed_as_a_whole_is_proposed_to_be_packed_by_batch(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = [f"data.train={tmp_path}/pairs.jsonl", "policy.packing.mode=dataset"]
    with pytest.raises(DataError) as refused:
        set_up(load_config(None, given).config, CPU)
    assert str(refused.value) == (
        "the training set has 40 pairs, fewer than one batch of 256, so there would be no step. "
        "Set policy.packing.mode=batch policy.train_global_batch_size=4 dpo.max_num_epochs=2, which gives 20 steps."
    )


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, num in (("a", 6), ("b", 1), ("v", 2), ("w", 3)):
        rows = [{"prompt": f"{name} {i}", "chosen": "yes", "rejected": "no"} for i in range(num)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], {"training set": "the bundled pairs (370 pairs)", "validation set": "the bundled pairs (70 pairs)"}),
        (["data.train=a.jsonl"], {"training set": "a.jsonl (6 pairs)", "validation set": "none"}),
        (
            ["data.train=[a.jsonl,b.jsonl]", "data.validation=v.jsonl", "data.val_data_paths={hard: w.jsonl}"],
            {
                "training sets": "a.jsonl (6 pairs) and b.jsonl (1 pair)",
                "validation set default": "v.jsonl (2 pairs)",
                "validation set hard": "w.jsonl (3 pairs)",
            },
        ),
        (
            ["data.train=a.jsonl", "data.validation_share=0.34"],
            {
                "training set": "a.jsonl (6 pairs); 4 pairs without those held out",
                "validation set": "0.34 of the training preferences (2 pairs)",
            },
        ),
    ],
)
def test_the_choices_name_every_set_and_its_pairs(files, overrides, said):
    choices = describe_choices(set_up(load_config(None, ["policy.train_global_batch_size=1", *overrides]).config, CPU))
    assert {name: value for name, value in choices if "set" in name.split() or "sets" in name.split()} == said


def test_epochs_beyond_the_last_step_cost_nothing():
    with within(10):
        assert plan(Pairs(1, 1, 1), B2, *MANY).num_steps == 3
        with pytest.raises(DataError, match="fewer than one batch of 4"):
            plan(Pairs(1, 1, 1), "policy.train_global_batch_size=4", *MANY)


def test_the_choices_of_a_run_of_a_billion_epochs_are_printed(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(line(i) for i in range(4)))
    with within(20):
        asked = [f"data.train={tmp_path}/a.jsonl", B2, *MANY]
        found = dict(describe_choices(set_up(load_config(None, asked).config, CPU)))["length"]
    assert found == "steps: 3; pairs used: 6 of 4 per epoch; epochs: 1000000000; seed: 42"


def line(number: int) -> str:
    return json.dumps({"prompt": f"{number}?", "chosen": "Yes.", "rejected": "No."}) + "\n"


@pytest.mark.parametrize(
    ("weight", "reported"),
    [
        (
            0.1,
            "weight 0.1 of 3 preferences is less than one, so no epoch would train on any of them. Raise the weight to",
        ),
        (0.34, None),
    ],
)
def test_a_set_whose_weight_leaves_no_preference_in_an_epoch_is_refused(tmp_path, weight, reported):
    (tmp_path / "a.jsonl").write_text("".join(line(i) for i in range(4)))
    (tmp_path / "b.jsonl").write_text("".join(line(i) for i in range(10, 13)))
    few = f"{{data_path:{tmp_path}/b.jsonl,weight:{weight}}}"
    config = load_config(None, [f"data.train=[{tmp_path}/a.jsonl,{few}]", B2]).config
    if reported is None:
        assert set_up(config, CPU).plan.batches.num_pairs_of(0) == 5
        return
    with pytest.raises(DataError) as refused:
        set_up(config, CPU)
    assert str(refused.value) == f"{tmp_path}/b.jsonl: {reported} 0.34 or more."
