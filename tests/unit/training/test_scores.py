"""What a loss needs besides the policy: scores, refused where they lack or filled in; a reference, or none at all."""

import json
import sys

import pytest
import torch
from running import SHORT, metrics_of, short_run

from tandem.cli import main as cli
from tandem.config.load import load_config
from tandem.config.losses import without_reference
from tandem.errors import ConfigError, DataError
from tandem.model.reference import NoReference
from tandem.report.choices import describe_choices
from tandem.report.reporter import Reporter
from tandem.training import trainer
from tandem.training.start import references
from tandem.training.start.setup import set_up

EMBEDDED = ["policy.model_name=embedded", "policy.train_global_batch_size=2", "checkpointing.enabled=false"]
WAY_OUT = (
    "uses scores. Add them (chosen_reward and rejected_reward, or score), or set data.default_chosen_reward and "
    "data.default_rejected_reward."
)


def row(prompt, **rewards):
    return {"prompt": prompt, "chosen_response": "blue sky", "rejected_response": "green", **rewards}


BOTH = {"chosen_reward": 2.0, "rejected_reward": -1.0}
UNSCORED = [row("one"), row("two")]
SCORED = [row("one", **BOTH), row("two", **BOTH)]
# All scores, the rejected one's missing, the chosen one's missing, both missing.
PARTLY = [row("one", **BOTH), row("two", chosen_reward=0.5), row("three", rejected_reward=0.25), row("four")]


@pytest.fixture
def write(tmp_path):
    def written(rows, name="pairs.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        return file

    return written


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test once weights load."""

    def loaded(*arguments, **options):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(references, "load_policy", loaded)


def config_of(*overrides):
    return load_config(None, [*SHORT, *EMBEDDED, *overrides]).config


def setup_of(file, *overrides):
    return set_up(config_of(f"data.train.data_path={file}", *overrides), torch.device("cpu"))


def scores_of(file, *overrides):
    return [preference.scores for preference in setup_of(file, *overrides).plan.train.store]


def refusal(file, *overrides):
    with pytest.raises(DataError) as refused:
        setup_of(file, *overrides)
    assert refused.value.exit_code == 3
    return str(refused.value)


# Refused


@pytest.mark.parametrize("name", ["rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"])
def test_rpo_without_scores_is_refused_before_any_weights_load(name, write, tmp_path, monkeypatch, capsys, no_weights):
    file = write(UNSCORED)
    given = [*EMBEDDED, f"data.train.data_path={file}", f"dpo.preference_loss={name}", f"run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["tandem", "train", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == (
        f"tandem: error: {file}:1: not every completion has a score (2 of 2 preferences), "
        f"but dpo.preference_loss {name} {WAY_OUT}\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_first_row_without_a_score_is_named_and_all_are_counted(write):
    file = write(PARTLY)
    assert refusal(file, "dpo.preference_loss=rpo_sq") == (
        f"{file}:2: not every completion has a score (3 of 4 preferences), but dpo.preference_loss rpo_sq {WAY_OUT}"
    )


def test_one_of_several_losses_that_reads_scores_is_enough(write):
    file = write(UNSCORED)
    assert refusal(file, "dpo.preference_loss={dpo: 1, rpo_sq: 0.5}") == (
        f"{file}:1: not every completion has a score (2 of 2 preferences), "
        f"but dpo.preference_loss dpo x 1 + rpo_sq x 0.5 {WAY_OUT}"
    )


def test_a_validation_set_without_scores_is_refused_too(write):
    file, held_out = write(SCORED), write([*SCORED, *UNSCORED], "held_out.jsonl")
    printed = refusal(file, "dpo.preference_loss=rpo_sq", f"data.validation.data_path={held_out}")
    assert printed.startswith(f"{held_out}:3: not every completion has a score (2 of 4 preferences), ")


def test_one_score_missing_of_four_is_refused(write):
    completions = [
        {"rank": rank, "completion": text, "score": score}
        for rank, (text, score) in enumerate(zip("abcd", (3.0, 2.0, None, 1.0), strict=True))
    ]
    file = write([{"context": "Hi", "completions": completions}])
    overrides = ["dpo.preference_loss=rpo_sq", "data.pairing=all", "policy.train_global_batch_size=6"]
    assert refusal(file, *overrides).startswith(f"{file}:1: not every completion has a score (1 of 1 preferences), ")
    # The default of the others fills it; the best has its own.
    filled = [*overrides, "data.default_chosen_reward=9", "data.default_rejected_reward=-9"]
    assert scores_of(file, *filled) == [(3.0, 2.0, -9.0, 1.0)]


def test_losses_that_read_no_scores_take_any_data(write):
    file = write(UNSCORED)
    assert len(setup_of(file, "dpo.preference_loss=ipo").plan.train.store) == 2


@pytest.mark.parametrize(
    ("default", "place", "count"), [("default_chosen_reward=1", 2, 2), ("default_rejected_reward=0", 3, 2)]
)
def test_one_default_alone_leaves_the_other_side_missing(default, place, count, write):
    file = write(PARTLY)
    printed = refusal(file, "dpo.preference_loss=rpo_sq", f"data.{default}")
    assert printed.startswith(f"{file}:{place}: not every completion has a score ({count} of 4 preferences), ")


# Filled in


def test_defaults_fill_scores_only_where_the_data_gives_none(write):
    file = write(PARTLY)
    defaults = ["data.default_chosen_reward=1.5", "data.default_rejected_reward=-0.5"]
    assert scores_of(file, "dpo.preference_loss=rpo_sq", *defaults) == [
        (2.0, -1.0),
        (0.5, -0.5),
        (1.5, 0.25),
        (1.5, -0.5),
    ]


def test_a_default_of_zero_is_a_score(write):
    file = write(UNSCORED)
    zero = ["data.default_chosen_reward=0", "data.default_rejected_reward=0"]
    assert scores_of(file, "dpo.preference_loss=rpo_sq", *zero) == [(0.0, 0.0), (0.0, 0.0)]


def test_other_defaults_are_not_answered_from_the_cache_of_the_first(write):
    file = write(UNSCORED)
    for chosen in (1.0, 2.0):
        defaults = [f"data.default_chosen_reward={chosen}", "data.default_rejected_reward=0"]
        assert scores_of(file, *defaults) == [(chosen, 0.0)] * 2
    assert str(scores_of(file)) == "[(nan, nan), (nan, nan)]"


def test_the_best_completion_takes_the_default_of_the_chosen_in_any_position(write):
    completions = [{"rank": rank, "completion": text} for rank, text in ((2, "a"), (0, "b"), (1, "c"))]
    file = write([{"context": "Hi", "completions": completions}])
    defaults = ["data.default_chosen_reward=1", "data.default_rejected_reward=0", "policy.train_global_batch_size=1"]
    assert scores_of(file, *defaults, "data.pairing=all") == [(0.0, 1.0, 0.0)]


def test_completions_that_share_the_best_rank_all_take_the_default_of_the_chosen(write):
    completions = [{"rank": rank, "completion": text} for rank, text in ((1, "a"), (0, "b"), (0, "c"))]
    file = write([{"context": "Hi", "completions": completions}])
    defaults = ["data.default_chosen_reward=1", "data.default_rejected_reward=0", "policy.train_global_batch_size=1"]
    for pairing in ("adjacent", "all"):
        assert scores_of(file, *defaults, f"data.pairing={pairing}") == [(0.0, 1.0, 1.0)]


def test_scores_reach_the_loss_pair_by_pair(write, tmp_path):
    # At the start beta d = 0, so rpo_sq is the mean of (R_c - R_r)^2: 3^2, (0.5 + 0.5)^2.
    file = write(PARTLY[:2])
    overrides = [*EMBEDDED, f"data.train.data_path={file}", "dpo.preference_loss=rpo_sq", "dpo.max_num_steps=1"]
    run = short_run(tmp_path / "run", *overrides, "data.default_rejected_reward=-0.5")
    assert metrics_of(run)[0]["loss"] == pytest.approx((9 + 1) / 2, abs=1e-4)


# A reference, or none


@pytest.mark.parametrize("mode", ["cached", "none"])
@pytest.mark.parametrize("name", ["simpo", "orpo", "cpo", "{simpo: 1, orpo: 0.5}"])
def test_losses_without_a_reference_compute_none(name, mode, write, tmp_path, monkeypatch):
    loaded = []
    load = references.load_policy
    monkeypatch.setattr(references, "load_policy", lambda *given, **how: loaded.append(given) or load(*given, **how))
    monkeypatch.setattr(references, "cached_reference", lambda *_, **__: pytest.fail("a reference was computed"))
    monkeypatch.setattr(references, "LiveReference", lambda *_: pytest.fail("a reference was made"))
    cache = tmp_path / "reference"
    overrides = [*EMBEDDED, f"data.train.data_path={write(SCORED)}", f"dpo.preference_loss={name}"]
    overrides += [f"reference.mode={mode}", f"reference.cache_dir={cache}", "dpo.max_num_steps=1"]
    run = short_run(tmp_path / "run", *overrides)
    assert len(metrics_of(run)) == len(loaded) == 1
    assert not cache.exists()


def test_a_live_reference_is_refused_if_the_loss_has_no_reference():
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["dpo.preference_loss=simpo", "reference.mode=live"])
    assert str(refused.value) == (
        "configuration: reference.mode = live has no effect: dpo.preference_loss simpo does not use a reference. "
        "Leave out reference.mode."
    )


def test_no_reference_finds_every_token_certain(write):
    setup = setup_of(write(SCORED))
    policy = references.load_policy(setup.source, setup.config.policy, setup.device)
    pack = next(setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences))
    inputs = policy.inputs(pack, setup.device)
    logps = NoReference().token_logps(pack, inputs)
    assert logps.shape == policy(inputs).shape
    assert (logps == 0).all()


def test_a_reference_is_computed_where_one_of_several_losses_compares(write, tmp_path, monkeypatch):
    splits = []
    compute = references.cached_reference
    monkeypatch.setattr(references, "cached_reference", lambda *a, **b: splits.append(a) or compute(*a, **b))
    overrides = [*EMBEDDED, f"data.train.data_path={write(SCORED)}", "dpo.preference_loss={simpo: 1, dpo: 0.5}"]
    short_run(tmp_path / "run", *overrides, "dpo.max_num_steps=1")
    assert len(splits) == 1


@pytest.mark.parametrize(
    ("name", "spelled"), [("dpo", "dpo"), ("aot", "aot"), ("{simpo: 1, dpo: 0.5}", "simpo x 1 + dpo x 0.5")]
)
def test_a_loss_that_compares_is_refused_without_a_reference(name, spelled):
    with pytest.raises(ConfigError) as refused:
        config_of("reference.mode=none", f"dpo.preference_loss={name}")
    assert refused.value.exit_code == 2
    assert str(refused.value) == (
        f"configuration: reference.mode=none, but dpo.preference_loss {spelled} needs a reference. "
        f"Set reference.mode=cached or live, or use a loss without a reference ({', '.join(without_reference())})."
    )


def test_the_audit_says_that_there_is_no_reference(write, tmp_path, capsys):
    overrides = [*SHORT, *EMBEDDED, f"data.train.data_path={write(SCORED)}", f"run.dir={tmp_path}/run"]
    printed = {}
    for name in ("simpo", "dpo"):
        loaded = load_config(None, [*overrides, f"dpo.preference_loss={name}", "dpo.max_num_steps=1"])
        trainer.train(loaded, Reporter("normal"), fresh=True)
        printed[name] = capsys.readouterr().out
    assert "\n  policy and reference are not compared: the loss has no reference\n" in printed["simpo"]
    assert "\n  policy = reference to " in printed["dpo"]


# What is printed of the choice


def choices_of(file, *overrides):
    return dict(describe_choices(setup_of(file, *overrides)))


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ([], "(dpo) x 1 + sft x 0"),
        (["dpo.label_smoothing=0.1"], "(dpo) x 1 + sft x 0, label_smoothing 0.1"),
        (
            ["dpo.preference_loss={dpo: 0.8, simpo: 0.2}", "dpo.simpo_gamma=1.5", "dpo.wpo=true"],
            "(dpo x 0.8 + simpo x 0.2) x 1 + sft x 0, simpo_gamma 1.5, wpo true",
        ),
        (["dpo.preference_loss=orpo", "dpo.orpo_lambda=0.1"], "(orpo) x 1 + sft x 0, orpo_lambda 0.1"),
        (["dpo.preference_loss=cpo", "dpo.cpo_alpha=0"], "(cpo) x 1 + sft x 0, cpo_alpha 0.0"),
        (["dpo.preference_loss=discopop", "dpo.discopop_tau=0.1"], "(discopop) x 1 + sft x 0, discopop_tau 0.1"),
        (["dpo.preference_loss=rpo_sq", "dpo.gt_reward_scale=2"], "(rpo_sq) x 1 + sft x 0, gt_reward_scale 2.0"),
        (["dpo.ld_alpha=0"], "(dpo) x 1 + sft x 0, ld_alpha 0.0"),
        (
            ["dpo.f_divergence=alpha", "dpo.f_alpha=0.5", "dpo.sft_loss_weight=0.2"],
            "(dpo) x 1 + sft x 0.2, f_divergence alpha, f_alpha 0.5",
        ),
    ],
)
def test_the_choices_show_loss_settings_that_are_not_at_their_defaults(overrides, loss, write):
    assert choices_of(write(SCORED), *overrides)["loss"] == loss


def test_the_choices_say_which_reference_there_is(write):
    file = write(SCORED)
    assert choices_of(file)["reference"] == "cached, the start model"
    assert choices_of(file, "dpo.preference_loss=orpo")["reference"] == "none"


@pytest.mark.parametrize("name", ["sigmoid_norm", "simpo", "orpo"])
def test_losses_that_divide_by_length_are_not_described_as_summed(name, write):
    printed = choices_of(write(SCORED), f"dpo.preference_loss={name}")["log-probabilities"]
    assert "summed in the preference loss" not in printed


def test_a_beta_that_no_loss_reads_is_not_shown(write):
    assert choices_of(write(SCORED), "dpo.preference_loss=orpo").get("beta") != "0.1"
