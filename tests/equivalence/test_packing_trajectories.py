"""Complete runs: however preferences are packed, every step, the final weights and the validation are the same.

Float32 carries 6e-8 of a log-probability, 1e-5 nats of the 200 that a completion takes here, and beta makes 1e-6 of
that in a reward: seen are 1e-6 in rewards and losses, 1e-7 of the larger numbers, and 1.4e-7 in weights that moved by
7e-3. The bounds below are ten times as wide, and would still show one pair that is missing, doubled or misread.
"""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from models import MODEL
from running import killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file

from tandem.config.load import load_config
from tandem.config.sections.policy import Packing
from tandem.errors import ConfigError, TandemError
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.load import load_policy
from tandem.model.reference import LiveReference
from tandem.packing import packs as packs_module
from tandem.packing.batches import GlobalBatch
from tandem.packing.packer import make_packer
from tandem.training import trainer
from tandem.training.memory import CPU_ROW_TOKENS
from tandem.training.optimizer import make_optimizer
from tandem.training.start.setup import set_up
from tandem.training.step import train_step
from tandem.training.terms import StepContext
from tandem.training.validation import ValidationSet, validate

RELATIVE, ABSOLUTE, WEIGHTS = 2e-6, 1e-5, 2e-6
# What a cut of the same batch may change: how many positions it takes.
OF_THE_CUT = {"split", "num_tokens", "pack_fill"}

PAIRS = 16
COMMON = [
    f"policy.model_name={MODEL}",
    "policy.precision=float32",
    *("policy.optimizer.kwargs.lr=1e-3", "policy.optimizer.kwargs.weight_decay=0.01"),
    "policy.max_total_sequence_length=128",
    f"policy.train_global_batch_size={PAIRS}",
    "dpo.max_num_steps=null",
    "dpo.max_num_epochs=2",
    "dpo.sft_loss_weight=0.1",
    "data.pairing=all",
    "data.drop_last=false",
    "data.overlong=error",
    "checkpointing.enabled=false",
]
WORDS = ["the", "sky", "looks", "blue", "because", "air", "scatters", "short", "waves", "of", "sunlight", "again"]


# Sets and runs


def text(rng, longest):
    return " ".join(rng.choice(WORDS, rng.integers(4, longest + 1)))


def preferences(*nums_of_completions, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [
        {
            "context": text(rng, longest),
            "completions": [{"rank": rank, "completion": text(rng, longest)} for rank in range(num)],
        }
        for num in nums_of_completions
    ]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def mixed(folder):
    """Sixteen preferences of two to four completions: 44 pairs, three or four batches per epoch."""
    return write(folder / "mixed.jsonl", preferences(*[2, 3, 4, 2] * 4))


@pytest.fixture(scope="module")
def held_out(folder):
    return write(folder / "held_out.jsonl", preferences(*[2, 4, 3] * 3, seed=1))


def packing(**settings):
    return [f"policy.packing.{name}={str(value).lower()}" for name, value in settings.items()]


def run(folder, file, *overrides):
    """A run with its own cache, so that the reference is computed in the same packs."""
    own = [f"data.train.data_path={file}", f"reference.cache_dir={folder}-reference"]
    return short_run(folder, *COMMON, *own, *overrides)


def setup_of(file, *overrides):
    return set_up(load_config(None, [*COMMON, f"data.train.data_path={file}", *overrides]).config, torch.device("cpu"))


def assert_same_steps(got, want, *, besides=()):
    assert [line["step"] for line in got] == [line["step"] for line in want] != []
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - OF_THE_CUT - set(besides):
            close = pytest.approx(theirs[name], rel=RELATIVE, abs=ABSOLUTE)
            assert ours[name] == close, f"{name} of step {ours['step']}"


def assert_same_run(got, want, **options):
    assert_same_steps(metrics_of(got), metrics_of(want), **options)
    assert largest_difference(weights_of(got), weights_of(want)) < WEIGHTS


# Cuts of a batch


@pytest.fixture(scope="module")
def plain(folder, mixed):
    """A run with one sequence per row, without shared prompts."""
    return run(folder / "plain", mixed, *packing(mode="none"))


DECREASING, SHUFFLE, EXACT = "first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"
CUTS = [
    # pack_length, packs_per_micro_batch, algorithm, share_prompts
    ("auto", 1, DECREASING, True),
    ("auto", 3, SHUFFLE, False),
    (256, 3, DECREASING, True),
    (256, 1, EXACT, True),
    (512, 1, SHUFFLE, True),
    (512, 3, EXACT, False),
    (1024, 1, DECREASING, False),
    (1024, 3, SHUFFLE, True),
]
KEYS = ("pack_length", "packs_per_micro_batch", "algorithm", "share_prompts")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_packing_trains_the_same_model_step_by_step(cut, plain, mixed, tmp_path):
    assert_same_run(run(tmp_path / "run", mixed, *packing(**dict(zip(KEYS, cut, strict=True)))), plain)


def test_several_unpacked_preferences_at_once_train_the_same_model(plain, mixed, tmp_path):
    assert_same_run(run(tmp_path / "run", mixed, *packing(mode="none", packs_per_micro_batch=3)), plain)


def test_the_plain_run_has_seven_steps_and_moves_the_weights_far_beyond_the_bound(plain):
    lines = metrics_of(plain)
    assert len(lines) == 7
    assert sum(line["num_pairs"] for line in lines) == 2 * 44
    start = load_file(MODEL / "model.safetensors")
    assert largest_difference(weights_of(plain), start) > 1000 * WEIGHTS


def test_no_two_packings_arrange_the_epoch_in_the_same_way(mixed):
    setup = setup_of(mixed)

    def layout(**settings):
        packer = make_packer(
            setup.plan.train.store, Packing(**settings), usual_auto=CPU_ROW_TOKENS, pairs_per_batch=PAIRS, seed=42
        )
        epoch = [packer.micro_batches(batch.preferences) for batch in setup.plan.batches.epoch(0)]
        return tuple((pack.tree.shape, *pack.preferences.tolist()) for packs in epoch for pack in packs)

    layouts = [layout(mode="none"), *(layout(**dict(zip(KEYS, cut, strict=True))) for cut in CUTS)]
    assert len(set(layouts)) == len(layouts)


# Completions of one prompt


RANKED = preferences(4, 4, 4, 4, seed=2)
IN_ORDER = ["data.shuffle=false", "policy.train_global_batch_size=12", "dpo.sft_loss_weight=0"]


@pytest.fixture(scope="module")
def pair_by_pair(folder):
    """Each of the six pairs of four completions as a separate row."""
    rows = [
        {"prompt": row["context"], "chosen": better["completion"], "rejected": worse["completion"]}
        for row in RANKED
        for better, worse in combinations(row["completions"], 2)
    ]
    return run(folder / "pair_by_pair", write(folder / "pair_by_pair.jsonl", rows), *IN_ORDER)


@pytest.mark.parametrize("settings", [{}, {"mode": "none"}], ids=str)
def test_four_completions_train_like_their_six_pairs_as_separate_rows(settings, pair_by_pair, tmp_path):
    ranked = write(tmp_path / "ranked.jsonl", RANKED)
    together = run(tmp_path / "run", ranked, *IN_ORDER, *packing(**settings))
    assert [line["num_pairs"] for line in metrics_of(together)] == [12, 12, 12, 12]
    # The SFT loss is a mean over preferences, two here and twelve there; its weight is 0.
    assert_same_run(together, pair_by_pair, besides=["sft_loss"])


# Preferences longer than a row


@pytest.fixture(scope="module")
def wide(folder):
    return write(folder / "wide.jsonl", preferences(6, 2, 6, 3, 6, seed=3))


@pytest.fixture(scope="module")
def unsplit(folder, wide):
    setup = setup_of(wide, *packing(pack_length=1024))
    assert all(len(pack.tree) == 1 for pack in setup.plan.train.micro_batches(np.arange(5)))
    return run(folder / "unsplit", wide, *packing(pack_length=1024))


@pytest.mark.parametrize(("share_prompts", "together"), [(True, 1), (False, 3)])
def test_a_preference_split_over_rows_trains_like_one_in_a_row(share_prompts, together, unsplit, wide, tmp_path):
    short = packing(pack_length=128, share_prompts=share_prompts, packs_per_micro_batch=together)
    packer = setup_of(wide, *short).plan.train
    assert packer.lengths == (128,)
    assert (packer.sizes[[0, 2, 4]] > 128).all()
    assert_same_run(run(tmp_path / "run", wide, *short), unsplit)


# The whole set packed once


# With shuffled packing, the packs of a set differ from packing the same preferences again.
DATASET = packing(mode="dataset", pack_length=256, algorithm=SHUFFLE)


@pytest.mark.parametrize(
    "settings",
    [
        {"pack_length": 256},
        {"pack_length": 128, "share_prompts": False},
        {"pack_length": 256, "algorithm": SHUFFLE},
        {"pack_length": 512, "algorithm": EXACT},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [24, 32])
def test_an_epoch_of_packs_has_every_preference_once_and_no_overfull_batch(settings, size, mixed):
    batches = setup_of(
        mixed, f"policy.train_global_batch_size={size}", *packing(mode="dataset", **settings)
    ).plan.batches
    for epoch in range(3):
        found = batches.epoch(epoch)
        assert sorted(np.concatenate([batch.preferences for batch in found]).tolist()) == list(range(16))
        for batch in found:
            assert batch.num_pairs == batches.num_pairs[batch.preferences].sum() <= size


def test_a_batch_smaller_than_a_pack_is_not_overfilled_by_several_preferences(mixed):
    try:
        batches = setup_of(
            mixed, "policy.train_global_batch_size=4", *packing(mode="dataset", pack_length=512)
        ).plan.batches
    except TandemError:
        return  # refused is as good
    for batch in batches.epoch(0):
        assert batch.num_pairs <= 4 or len(batch.preferences) == 1


@pytest.mark.parametrize("weight", [2.0, 0.5])
def test_dataset_weights_are_refused_if_the_dataset_is_packed_once(weight, mixed):
    with pytest.raises(ConfigError, match=r"data\.train has weights, but policy\.packing\.mode=dataset packs"):
        setup_of(mixed, f"data.train.weight={weight}", *DATASET)


@pytest.fixture(scope="module")
def over_packs(folder, mixed):
    """A run over packs of the complete set, and the preferences in each pack of each step."""
    seen = []
    real = trainer.train_step

    def watching(policy, context, packs, batch, **options):
        seen.append([pack.preferences.tolist() for pack in packs])
        return real(policy, context, packs, batch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", watching)
        return run(folder / "over_packs", mixed, *DATASET), seen


def test_training_uses_every_pack_of_the_set_once_per_epoch(over_packs, mixed):
    _, seen = over_packs
    batches = setup_of(mixed, *DATASET).plan.batches
    steps = len(batches.epoch(0))
    first, second = seen[:steps], seen[steps:]
    for epoch in (first, second):
        assert sorted(pack for step in epoch for pack in step) == sorted(pack.tolist() for pack in batches.packs)
        assert sorted(i for step in epoch for pack in step for i in pack) == list(range(16))
    assert first != second


@pytest.mark.parametrize("settings", [{"mode": "none"}, {"mode": "batch", "pack_length": 512}], ids=str)
def test_batches_of_packs_train_like_the_same_preferences_packed_again(settings, over_packs, mixed):
    batches = setup_of(mixed, *DATASET).plan.batches
    given = [batch for epoch in (0, 1) for batch in batches.epoch(epoch)]
    lines, weights = by_hand(setup_of(mixed, *packing(**settings)), given)
    assert_same_steps(metrics_of(over_packs[0]), lines, besides=["lr"])
    assert largest_difference(weights_of(over_packs[0]), weights) < WEIGHTS


def by_hand(setup, batches):
    """The metrics and weights of the same preferences, without boundaries between packs, from another packer."""
    ranks = join_process_group()

    def load():
        return shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=False)

    policy, context = load(), StepContext(LiveReference(load()), setup.config.dpo, ranks, "float32")
    optimizer = make_optimizer(policy.parameters(), setup.config.policy, seed=0)
    lines = []
    for number, batch in enumerate(batches, start=1):
        unbound = GlobalBatch(batch.epoch, batch.preferences, batch.num_pairs)
        packs = setup.plan.train.micro_batches(unbound.preferences)
        report = train_step(policy, context, packs, unbound, optimizer, 1.0).read(setup.plan.train.store)
        own = {"step": number, "split": "train", "num_tokens": 0, "pack_fill": 0, "lr": 0}
        lines.append({**own, **report.metrics, "num_pairs": report.num_pairs})
    exported = {name.removeprefix("model."): p.detach() for name, p in policy.named_parameters()}
    return lines, exported


def test_a_resumed_run_over_packs_equals_the_uninterrupted_one_bit_for_bit(mixed, tmp_path):
    saving = [*DATASET, "checkpointing.enabled=true", "checkpointing.save_period=2", "dpo.max_num_steps=6"]
    whole = run(tmp_path / "whole", mixed, *saving)
    assert [line["step"] for line in metrics_of(whole)] == [1, 2, 3, 4, 5, 6]
    for last in (3, 5):  # to resume inside the first epoch, and inside the second
        with killed_after(last):
            run(tmp_path / "cut", mixed, *saving)
    cut = run(tmp_path / "cut", mixed, *saving)
    assert metrics_of(cut) == metrics_of(whole)
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


@pytest.mark.parametrize("algorithm", [DECREASING, SHUFFLE, EXACT])
def test_the_seed_determines_packs_and_their_order(algorithm, mixed, tmp_path, monkeypatch):
    def found(seed, place):
        monkeypatch.setattr(packs_module, "cache_dir", lambda: tmp_path / place)  # made again, not found
        batches = setup_of(mixed, f"run.seed={seed}", *packing(mode="dataset", pack_length=256, algorithm=algorithm))
        batches = batches.plan.batches
        order = [np.concatenate([batch.preferences for batch in batches.epoch(e)]).tolist() for e in (0, 1)]
        return [pack.tolist() for pack in batches.packs], order

    packs, order = found(1, "one")
    assert found(1, "another") == (packs, order)
    assert order[0] != order[1]
    other_packs, other_order = found(2, "one")
    assert other_order[0] not in order
    assert (other_packs == packs) is (algorithm != SHUFFLE)  # only the shuffle draws who goes together


# Validation


VALIDATED = [
    {"mode": "none", "packs_per_micro_batch": 3},
    {"mode": "batch"},
    {"mode": "batch", "pack_length": 128, "packs_per_micro_batch": 3, "algorithm": SHUFFLE},
    {"mode": "batch", "share_prompts": False, "algorithm": EXACT},
    {"mode": "dataset"},
    {"mode": "dataset", "pack_length": 256, "share_prompts": False, "algorithm": SHUFFLE},
]


@pytest.fixture(scope="module")
def models(mixed):
    """A policy and a reference for packed rows, and the same for unpacked rows."""

    def pair(mode):
        setup = setup_of(mixed, *packing(mode=mode))
        policy, frozen = (load_policy(setup.source, setup.config.policy, torch.device("cpu")) for _ in range(2))
        noise = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=noise))
        return policy, frozen

    return {packed: pair("batch" if packed else "none") for packed in (True, False)}


@pytest.fixture(scope="module")
def validated(models, mixed, held_out):
    """Validation metrics under a packing: of the complete set, and of its first two batches."""

    def measure(settings, batch_size=12):
        setup = setup_of(mixed, f"data.validation.data_path={held_out}", *packing(**settings))
        policy, frozen = models[settings["mode"] != "none"]
        context = StepContext(LiveReference(frozen), setup.config.dpo, join_process_group(), "float32")
        packer = setup.plan.validation["default"]
        reports = [validate(policy, ValidationSet("default", packer, context, batch_size, most)) for most in (None, 2)]
        return [{**report.metrics, "num_pairs": report.num_pairs} for report in reports]

    return measure


def test_validation_is_the_same_in_every_mode(validated):
    whole, two_batches = validated({"mode": "none"})
    # Nine preferences of 1, 6, 3, 1, 6, ... pairs, in batches of at most 12: 11 + 10 + 9
    assert (whole["num_pairs"], two_batches["num_pairs"]) == (30, 21)
    assert abs(whole["preference_loss"] - 0.693147) > 100 * ABSOLUTE
    for settings in VALIDATED:
        found = validated(settings)
        assert found[0] == pytest.approx(whole, rel=RELATIVE, abs=ABSOLUTE), settings
        assert found[1] == pytest.approx(two_batches, rel=RELATIVE, abs=ABSOLUTE), settings


def test_validation_of_the_whole_set_does_not_depend_on_its_batches(validated):
    (whole, _), (cut, _) = (validated({"mode": "batch"}, size) for size in (1000, 6))
    assert cut == pytest.approx(whole, rel=RELATIVE, abs=ABSOLUTE)
