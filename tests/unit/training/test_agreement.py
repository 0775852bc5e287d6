"""What ranks derive is compared before a step, and the pairs of a step are compared with its batch."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from running import SHORT

from tandem.config.load import load_config
from tandem.errors import DefectError, RanksDifferError
from tandem.model.distributed.process_group import join_process_group
from tandem.packing.packer import Packer, RankShare, row_lengths
from tandem.training import validation
from tandem.training.metrics import PairTable, check_pairs, places_of_pairs
from tandem.training.start.agreement import derived, differences, refuse_different_ranks
from tandem.training.start.setup import set_up
from tandem.training.terms import StepContext


def set_up_with(*overrides, share=None):
    return set_up(load_config(None, [*SHORT, *overrides]).config, torch.device("cpu"), share=share or RankShare())


@pytest.fixture(scope="module")
def setup():
    return set_up_with("policy.train_global_batch_size=64", share=RankShare(0, 2))


def computed(*packers, preferences):
    """The pairs that these ranks would compute of a batch, as a table without numbers."""
    packs = [pack for packer in packers for pack in packer.micro_batches(preferences)]
    columns = [np.concatenate(parts) for parts in zip(*(places_of_pairs(pack) for pack in packs), strict=True)]
    num_preferences = sum(len(pack.preferences) for pack in packs)
    preference, winner, loser = columns
    return PairTable(sft=np.zeros(num_preferences), preference=preference, winner=winner, loser=loser, columns={})


def ranks_with_rows(packer, *lengths):
    return [
        replace(packer, lengths=row_lengths(length), share=RankShare(number, len(lengths)))
        for number, length in enumerate(lengths)
    ]


def test_ranks_with_equal_rows_compute_every_pair_of_a_batch_once(setup):
    preferences = setup.plan.batches.epoch(0)[0].preferences
    check_pairs(
        computed(*ranks_with_rows(setup.plan.train, 1024, 1024), preferences=preferences),
        preferences,
        setup.plan.train.store,
    )


def test_ranks_with_different_rows_are_detected(setup):
    preferences = setup.plan.batches.epoch(0)[0].preferences
    table = computed(*ranks_with_rows(setup.plan.train, 1024, 512), preferences=preferences)
    missing = len(set(preferences) - set(table.preference))
    twice = len(table) - len(set(table.preference))
    assert missing > 0 and twice > 0
    with pytest.raises(DefectError) as found:
        check_pairs(table, preferences, setup.plan.train.store)
    first = min(set(preferences) - set(table.preference))
    assert str(found.value) == (
        f"of the 64 pairs of this batch, {missing} were not computed, and {twice} were computed too often or are not in the "
        f"batch. The first is at {setup.plan.train.store.place(int(first))}. This is a bug in tandem, not an error in the data "
        "or the configuration. Nothing was saved. Please report it with the run's config.yaml. The same call resumes from the "
        "newest checkpoint."
    )


def test_a_preference_twice_in_a_batch_has_its_pairs_twice(tmp_path):
    rows = [
        {"context": f"q{i}", "completions": [{"rank": rank, "completion": f"{i} {rank}"} for rank in range(3)]}
        for i in range(4)
    ]
    (tmp_path / "threes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packer = set_up_with(
        f"data.train.data_path={tmp_path}/threes.jsonl", "data.pairing=all", "policy.train_global_batch_size=3"
    ).plan.train
    twice = np.array([2, 0, 2])
    table = computed(packer, preferences=twice)
    assert len(table) == 9
    check_pairs(table, twice, packer.store)
    for other in ([2, 0], [2, 0, 1], [2, 0, 0], [2, 0, 2, 2]):
        with pytest.raises(DefectError):
            check_pairs(table, np.array(other), packer.store)
    # as many pairs, but one of them twice and another never
    exchanged = replace(table, loser=np.where(table.winner == 0, 1, table.loser))
    with pytest.raises(DefectError, match="of the 9 pairs of this batch, 3 were not computed, and 3 "):
        check_pairs(exchanged, twice, packer.store)


def test_a_validation_that_leaves_out_a_pair_is_detected(setup, monkeypatch):
    whole = Packer.micro_batches
    monkeypatch.setattr(Packer, "micro_batches", lambda self, these, bounds=None: whole(self, these[1:], bounds))
    monkeypatch.setattr(validation.PairLedger, "read", lambda self, ranks: (self.table, []))
    monkeypatch.setattr(validation.PairLedger, "send", lambda self: None)
    packer = setup.plan.validation["default"].for_single_rank()
    part = validation.portions(packer, 8)[0]
    monkeypatch.setattr(validation.PairLedger, "table", computed(packer, preferences=part), raising=False)
    monkeypatch.setattr(validation, "pack_outcomes", lambda policy, context, packs: iter(()))

    class NoPolicy:
        def computing(self):
            return torch.no_grad()

    context = StepContext(None, setup.config.dpo, join_process_group(), "float32")  # type: ignore[arg-type]
    with pytest.raises(DefectError, match="of the 8 pairs of this batch, 1 were not computed, and 0 "):
        validation.measure(NoPolicy(), context, packer, 8, 1)  # type: ignore[arg-type]


def test_the_same_setup_derives_the_same_and_names_what_decides_the_batches(setup, tmp_path):
    facts = derived(setup, tmp_path)
    assert derived(setup, tmp_path) == facts
    assert facts["the row lengths of train"] == ", ".join(map(str, setup.plan.train.lengths))
    assert facts["the number of steps"] == "4"
    assert facts["policy.optimizer.kwargs.lr"] == "0.001"
    assert "policy.model_name" not in facts
    assert not [name for name in facts if name.startswith("data.train")]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.seed=7", "run.seed"),
        ("policy.packing.pack_length=512", "the row lengths of train"),
        ("policy.packing.pack_length=512", "the packs of batch 1"),
        ("data.shuffle=false", "the batches"),
        ("dpo.max_num_steps=3", "the number of steps"),
        ("policy.precision=bfloat16", "the precision"),
        ("data.validation_share=0.1", "the data of train"),
    ],
)
def test_what_another_rank_would_train_otherwise_is_among_the_differences(setup, tmp_path, override, named):
    other = set_up_with("policy.train_global_batch_size=64", override, share=RankShare(1, 2))
    found = differences([derived(setup, tmp_path), derived(other, tmp_path)])
    assert any(one.startswith(f"{named}: ") for one in found), found


def test_rank_numbers_are_not_a_difference(setup, tmp_path):
    other = set_up_with("policy.train_global_batch_size=64", "data.num_workers=1", "run.name=x", share=RankShare(1, 2))
    assert differences([derived(setup, tmp_path), derived(other, tmp_path)]) == []


class Several:
    """Three ranks, of which this is the first."""

    count, is_first = 3, True

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return [value, *self.others]

    def run_or_stop_all(self, do, on):
        return do() if on else None


def test_the_message_names_the_differences_and_the_ranks():
    mine = {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"}
    refuse_different_ranks(Several(mine, mine), lambda: mine)  # type: ignore[arg-type]
    theirs = {"a": "9", "b": "8", "c": "3", "d": "7"}
    with pytest.raises(RanksDifferError) as refused:
        refuse_different_ranks(Several(theirs, mine | {"a": "9"}), lambda: mine)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "the ranks differ and would not train the same model:\n"
        "  a: 1 on rank 0; 9 on ranks 1, 2\n"
        "  b: 2 on ranks 0, 2; 8 on rank 1\n"
        "  d: 4 on ranks 0, 2; 7 on rank 1\n"
        "  and 1 more\n"
        "Nothing was trained. Start every rank with the same command, data, model and versions of tandem, torch and transformers."
    )
