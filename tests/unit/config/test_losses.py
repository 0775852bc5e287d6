"""Which settings work with which loss, and the messages about those that do not."""

import pytest
import yaml
from declared import needed_settings

from tandem.config.load import load_config
from tandem.config.losses import (
    far_from_published,
    is_dpo,
    join_names,
    needs_reference,
    needs_scores,
    scope_of,
    unsupported_column,
    weights_of,
)
from tandem.config.schema import Config
from tandem.config.sections.dpo import Dpo
from tandem.errors import ConfigError
from tandem.loss.declare import INPUT_SETTINGS, Bounds
from tandem.loss.losses import LOSSES

pytestmark = pytest.mark.usefixtures("of_a_command")

ALL = join_names(LOSSES, "or")


EXAMPLE = "Write dpo, or {dpo: 0.8, bco_pair: 0.2}, for example."


def reading(key: str) -> str:
    return join_names([name for name, loss in LOSSES.items() if key in loss.keys], "or")


def supporting(input_setting: str) -> str:
    return join_names([name for name, loss in LOSSES.items() if input_setting in loss.input_settings], "or")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def dpo(*overrides: str) -> Dpo:
    return load_config(None, overrides).config.dpo


# Names and weights


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_chosen_by_name(name):
    needed = [f"dpo.{key}={value}" for key, value in needed_settings(name).items()]
    assert dpo(f"dpo.preference_loss={name}", *needed).preference_loss == name


def test_several_losses_are_given_with_weights():
    chosen = dpo("dpo.preference_loss={dpo: 0.8, bco_pair: 1}").preference_loss
    assert weights_of(chosen) == {"dpo": 0.8, "bco_pair": 1.0}
    assert weights_of("ipo") == {"ipo": 1.0}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("dpo2", f"dpo.preference_loss: unknown loss 'dpo2'. Did you mean dpo? Use one of {ALL}."),
        ("bco", f"dpo.preference_loss: unknown loss 'bco'. Did you mean bco_pair? Use one of {ALL}."),
        (
            "rpo",
            "dpo.preference_loss: unknown loss 'rpo'. Did you mean rpo_sq, rpo_bwd_kl or rpo_fwd_kl? "
            f"Use one of {ALL}.",
        ),
        ("DPO", f"dpo.preference_loss: unknown loss 'DPO'. Did you mean dpo? Use one of {ALL}."),
        ("zz", f"dpo.preference_loss: unknown loss 'zz'. Use one of {ALL}."),
        ("{dpo: 1, ip: 1}", f"dpo.preference_loss: unknown loss 'ip'. Did you mean ipo? Use one of {ALL}."),
        ("{dpo: 0}", "dpo.preference_loss.dpo = 0: a weight must be a number above 0."),
        ("{dpo: 1, ipo: -0.5}", "dpo.preference_loss.ipo = -0.5: a weight must be a number above 0."),
        ("{dpo: nan}", "dpo.preference_loss.dpo = NaN: a weight must be a number above 0."),
        ("{dpo: inf}", "dpo.preference_loss.dpo = Infinity: a weight must be a number above 0."),
        ("{dpo: much}", 'dpo.preference_loss.dpo = "much": a weight must be a number above 0.'),
        ("{dpo: true}", "dpo.preference_loss.dpo = true: a weight must be a number above 0."),
        ("{}", "dpo.preference_loss is empty. Name a loss, such as dpo."),
        ("3", f"dpo.preference_loss = 3 is neither a loss nor a map of losses to weights. {EXAMPLE}"),
        ("[dpo]", f'dpo.preference_loss = ["dpo"] is neither a loss nor a map of losses to weights. {EXAMPLE}'),
        ("null", f"dpo.preference_loss = null is neither a loss nor a map of losses to weights. {EXAMPLE}"),
    ],
)
def test_an_invalid_loss_is_refused(given, reason):
    assert refusal(f"dpo.preference_loss={given}") == f"command line: {reason}"


# Settings without effect


@pytest.mark.parametrize(
    ("chosen", "setting", "reason"),
    [
        (
            "hinge",
            "label_smoothing=0.1",
            "dpo.label_smoothing = 0.1 has no effect on dpo.preference_loss hinge. "
            f"Leave it out, or use {reading('label_smoothing')}.",
        ),
        (
            "{ipo: 1, hinge: 2}",
            "gt_reward_scale=2",
            "dpo.gt_reward_scale = 2.0 has no effect on dpo.preference_loss ipo and hinge. "
            f"Leave it out, or use {reading('gt_reward_scale')}.",
        ),
        (
            "dpo",
            "simpo_gamma=1",
            "dpo.simpo_gamma = 1.0 has no effect on dpo.preference_loss dpo. Leave it out, or use simpo.",
        ),
        (
            "dpo",
            "orpo_lambda=0.1",
            "dpo.orpo_lambda = 0.1 has no effect on dpo.preference_loss dpo. Leave it out, or use orpo.",
        ),
        (
            "dpo",
            "cpo_alpha=0.1",
            "dpo.cpo_alpha = 0.1 has no effect on dpo.preference_loss dpo. Leave it out, or use cpo.",
        ),
        (
            "dpo",
            "discopop_tau=0.1",
            "dpo.discopop_tau = 0.1 has no effect on dpo.preference_loss dpo. Leave it out, or use discopop.",
        ),
        (
            "orpo",
            "reference_policy_kl_penalty=0.2",
            "dpo.reference_policy_kl_penalty = 0.2 has no effect on dpo.preference_loss orpo. Leave it out, or use "
            f"{reading('reference_policy_kl_penalty')}.",
        ),
        (
            "sigmoid_norm",
            "preference_average_log_probs=true",
            "dpo.preference_average_log_probs = true has no effect on dpo.preference_loss sigmoid_norm. Leave it out, "
            f"or use {supporting('preference_average_log_probs')}.",
        ),
        (
            "simpo",
            "ld_alpha=0.5",
            "dpo.ld_alpha = 0.5 has no effect on dpo.preference_loss simpo. Leave it out, "
            f"or use {supporting('ld_alpha')}.",
        ),
        (
            "aot",
            "f_divergence=js",
            'dpo.f_divergence = "js" has no effect on dpo.preference_loss aot. Leave it out, '
            f"or use {supporting('f_divergence')}.",
        ),
        (
            "aot",
            "wpo=true",
            f"dpo.wpo = true has no effect on dpo.preference_loss aot. Leave it out, or use {supporting('wpo')}.",
        ),
        (
            "dpo",
            "f_alpha=0.5",
            "dpo.f_alpha = 0.5 has an effect only with dpo.f_divergence=alpha. Set both, or leave out dpo.f_alpha.",
        ),
        (
            "robust",
            "label_smoothing=0.5",
            "dpo.label_smoothing = 0.5: dpo.preference_loss robust needs less than 0.5.",
        ),
        (
            "exo_pair",
            "label_smoothing=0",
            "dpo.label_smoothing = 0.0: dpo.preference_loss exo_pair needs more than 0, for instance 0.001, "
            "since the logarithm of it is taken.",
        ),
    ],
)
def test_a_setting_without_effect_on_the_loss_is_refused(chosen, setting, reason):
    assert refusal(f"dpo.preference_loss={chosen}", f"dpo.{setting}") == f"command line: {reason}"


def test_all_unsupported_settings_are_listed_together():
    assert refusal("dpo.preference_loss=ipo", "dpo.simpo_gamma=1", "dpo.cpo_alpha=2") == (
        "command line: dpo.simpo_gamma = 1.0 has no effect on dpo.preference_loss ipo. Leave it out, or use simpo. "
        "dpo.cpo_alpha = 2.0 has no effect on dpo.preference_loss ipo. Leave it out, or use cpo."
    )


def test_one_of_several_losses_may_be_the_only_one_to_read_a_setting():
    assert dpo("dpo.preference_loss={dpo: 1, hinge: 1}", "dpo.label_smoothing=0.1").label_smoothing == 0.1


def test_a_setting_that_changes_the_input_must_be_supported_by_every_loss():
    assert refusal("dpo.preference_loss={dpo: 1, cpo: 1}", "dpo.ld_alpha=0.5") == (
        "command line: dpo.ld_alpha = 0.5 has no effect on dpo.preference_loss cpo. Leave it out, "
        f"or use {supporting('ld_alpha')}."
    )


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("label_smoothing=0.6", "dpo.label_smoothing = 0.6: input should be less than or equal to 0.5."),
        ("label_smoothing=-0.1", "dpo.label_smoothing = -0.1: input should be greater than or equal to 0."),
        ("discopop_tau=0", "dpo.discopop_tau = 0: input should be greater than 0."),
        ("discopop_tau=1.5", "dpo.discopop_tau = 1.5: input should be less than or equal to 1."),
        ("ld_alpha=2", "dpo.ld_alpha = 2: input should be less than or equal to 1."),
        ("gt_reward_scale=0", "dpo.gt_reward_scale = 0: input should be greater than 0."),
        ("f_alpha=-1", "dpo.f_alpha = -1: input should be greater than or equal to 0."),
        (
            "f_divergence=kl",
            "dpo.f_divergence = \"kl\": input should be 'reverse_kl', 'forward_kl', 'js' or 'alpha'.",
        ),
    ],
)
def test_a_setting_outside_its_range_is_refused(setting, reason):
    assert refusal(f"dpo.{setting}") == f"command line: {reason}"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dpo.preference_loss=orpo"],
        ["dpo.preference_loss={dpo: 0.8, simpo: 0.2}", "dpo.simpo_gamma=1", "dpo.wpo=true"],
        ["dpo.f_divergence=alpha", "dpo.f_alpha=0.5", "dpo.ld_alpha=0.5"],
    ],
)
def test_a_resolved_configuration_with_all_defaults_is_accepted(tmp_path, overrides):
    loaded = load_config(None, overrides)
    dumped = tmp_path / "config.yaml"
    dumped.write_text(loaded.as_yaml(), encoding="utf-8")
    assert yaml.safe_load(loaded.as_yaml())["dpo"]["simpo_gamma"] is not None
    assert load_config(str(dumped), []).config == loaded.config


# Declarations


def test_every_key_that_a_loss_reads_is_a_key_of_the_schema():
    read = {key for loss in LOSSES.values() for key in (*loss.keys, *loss.input_settings)}
    assert read <= set(Dpo.model_fields)
    assert {"f_alpha", *INPUT_SETTINGS, *read} >= set(Dpo.model_fields) - {
        "preference_loss",
        "preference_loss_weight",
        "router_aux_loss_coef",
        "sft_loss_weight",
        "sft_average_log_probs",
        "max_num_epochs",
        "max_num_steps",
        "early_stopping_patience",
        "val_period",
        "val_batches",
        "val_global_batch_size",
        "val_at_start",
        "val_at_end",
    }


def test_losses_declare_what_they_need():
    assert [needs_reference(name) for name in ("dpo", "aot", "simpo", "orpo", "cpo")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert [needs_scores(name) for name in ("dpo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl")] == [False, True, True, True]
    assert [scope_of(name) for name in ("dpo", "aot", "aot_unpaired")] == ["pair", "batch", "batch"]


def test_dpo_is_recognised_under_all_its_names():
    assert is_dpo("dpo") and is_dpo("sigmoid") and is_dpo({"dpo": 0.5, "sigmoid": 0.5})
    assert not is_dpo("robust") and not is_dpo({"dpo": 1.0, "ipo": 0.1})


def test_bounds_are_exclusive_and_described():
    both = Bounds(key="label_smoothing", above=0, below=0.5, reason="since both ends are degenerate")
    assert [both.allow(value) for value in (0.0, 0.1, 0.5)] == [False, True, False]
    assert both.spelled() == "more than 0 and less than 0.5, since both ends are degenerate"


def test_several_losses_need_what_any_of_them_needs():
    assert needs_reference({"simpo": 1.0, "dpo": 0.1})
    assert not needs_reference({"simpo": 1.0, "orpo": 0.1})
    assert needs_scores({"dpo": 1.0, "rpo_sq": 0.1})
    assert scope_of({"dpo": 1.0, "aot": 0.1}) == "batch"
    assert scope_of(Config().dpo.preference_loss) == "pair"


# Published settings


def far(**settings) -> list[str]:
    chosen = Dpo(**settings)
    return far_from_published(chosen.preference_loss, chosen.model_dump())


def test_a_setting_an_order_of_magnitude_from_the_paper_is_reported_with_the_nearest_published_value():
    assert far(preference_loss="simpo") == [
        "dpo.reference_policy_kl_penalty = 0.1 is 20 times less than the published value for simpo (2 to 10, arXiv:2405.14734). "
        "The objective may differ, or the model may barely change. Set dpo.reference_policy_kl_penalty=2, unless 0.1 is "
        "intended."
    ]
    assert far(preference_loss="discopop", discopop_tau=0.9) == [
        "dpo.discopop_tau = 0.9 is 18 times more than the published value for discopop (0.05, arXiv:2406.08414). The objective "
        "may differ, or the model may barely change. Set dpo.discopop_tau=0.05, unless 0.9 is intended."
    ]


def test_losses_published_with_another_beta_are_reported_by_default():
    warned = {name for name in LOSSES if far(preference_loss=name, **needed_settings(name))}
    assert warned >= {"robust", "nca_pair", "bco_pair", "sppo_hard", "sigmoid_norm", "simpo"}
    assert warned.isdisjoint({"dpo", "sigmoid", "ipo", "exo_pair", "apo_zero", "apo_down", "discopop", "orpo", "cpo"})


def test_published_settings_are_not_reported():
    for name, loss in LOSSES.items():
        for end in ("least", "most"):
            settings = needed_settings(name) | {one.key: getattr(one, end) for one in loss.published}
            assert far(preference_loss=name, **settings) == []


def test_less_than_an_order_of_magnitude_is_not_reported():
    assert far(preference_loss="simpo", reference_policy_kl_penalty=0.21) == []
    assert far(preference_loss="simpo", reference_policy_kl_penalty=0.2) != []
    assert far(preference_loss="simpo", reference_policy_kl_penalty=2.0, simpo_gamma=0.0) == []  # switched off


def test_each_of_several_losses_is_checked():
    (warning,) = far(preference_loss={"dpo": 1.0, "simpo": 0.5})
    assert "than the published value for simpo" in warning


def test_averaged_log_probabilities_are_compared_with_the_beta_of_a_per_token_loss():
    (warning,) = far(preference_average_log_probs=True)
    assert "0.1 is 50 times less than the published value for dpo per token (5, arXiv:2411.15124)" in warning
    assert far(preference_average_log_probs=True, reference_policy_kl_penalty=5.0) == []
    assert far(preference_loss="bco_pair", preference_average_log_probs=True) == []


def test_losses_read_every_setting_they_declare_published_values_or_bounds_for():
    assert all(one.key in loss.keys for loss in LOSSES.values() for one in (*loss.published, *loss.bounds))


def test_a_column_that_no_loss_reads_yet_is_refused_in_a_sentence():
    assert unsupported_column("dpo", "difficulty") == (
        "is not supported by dpo.preference_loss dpo",
        "a loss that reads this column, once there is one",
    )
