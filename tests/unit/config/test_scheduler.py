"""`policy.scheduler` by name: the values it accepts, and the messages about others."""

import pytest
import yaml

from tandem.config.load import load_config
from tandem.config.sections.policy import Policy
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")


def policy_of(*overrides: str) -> Policy:
    return load_config(None, list(overrides)).config.policy


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, list(overrides))
    return str(error.value).removeprefix("command line: ")


def test_a_named_schedule_is_given_as_one_mapping_or_key_by_key():
    given = policy_of("policy.scheduler={name: cosine, warmup_ratio: 0.1, min_lr_ratio: 0.2}")
    assert (
        given.scheduler
        == policy_of(
            "policy.scheduler.name=cosine", "policy.scheduler.warmup_ratio=0.1", "policy.scheduler.min_lr_ratio=0.2"
        ).scheduler
    )


def test_a_resolved_configuration_gives_the_same_schedule(tmp_path):
    loaded = load_config(None, ["policy.scheduler={name: wsd, warmup_ratio: 0.1}"])
    (tmp_path / "config.yaml").write_text(loaded.as_yaml(), encoding="utf-8")
    assert yaml.safe_load(loaded.as_yaml())["policy"]["scheduler"] == {
        "name": "wsd",
        "warmup_ratio": 0.1,
        "warmup_steps": 0,
        "decay_ratio": 0.1,
        "min_lr_ratio": 0.0,
    }
    assert load_config(str(tmp_path / "config.yaml"), []).config == loaded.config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{name: linear, warmup_ratio: -0.1}", ".warmup_ratio = -0.1: input should be greater than or equal to 0."),
        ("{name: linear, warmup_ratio: 1}", ".warmup_ratio = 1: input should be less than 1."),
        ("{name: cosine, min_lr_ratio: 1.5}", ".min_lr_ratio = 1.5: input should be less than or equal to 1."),
        ("{name: wsd, decay_ratio: 2}", ".decay_ratio = 2: input should be less than or equal to 1."),
        (
            "{name: wsd, warmup_ratio: 0.6, decay_ratio: 0.5}",
            ": warmup_ratio = 0.6 and decay_ratio = 0.5 add up to more than 1, the whole run. Lower one of them.",
        ),
        (
            "{name: constant, min_lr_ratio: 0.1}",
            ".min_lr_ratio is not a setting of the schedule constant, which has name, warmup_ratio, warmup_steps. For absolute "
            "steps, use torch's schedulers (docs/keys.md, Schedules).",
        ),
        (
            "{name: linear, num_steps: 20}",
            ".num_steps is not a setting of the schedule linear, which has name, warmup_ratio, warmup_steps, min_lr_ratio. "
            "For absolute steps, use torch's schedulers (docs/keys.md, Schedules).",
        ),
        (
            "{name: cosine, warmup_steps: 20, warmup_ratio: 0.1}",
            ": warmup_steps = 20 and warmup_ratio = 0.1 both give the length of the warm-up. Leave out one of them.",
        ),
        (
            "{name: cosine, constant_steps: -1}",
            ".constant_steps = -1: input should be greater than or equal to 0.",
        ),
        ("cosine", " = cosine is text, not a mapping. Write {name: cosine, warmup_ratio: 0.1}, for example."),
        ("{warmup_ratio: 0.1}", " has no name. Set policy.scheduler.name to one of linear, cosine, constant, wsd."),
        ("3", " = 3: it must be a mapping, such as {KEY: VALUE}."),
        (
            "[{name: cosine}]",
            " is a list, which is for torch's schedulers and milestones. Write a named schedule without a list: "
            "{name: cosine, warmup_ratio: 0.1}.",
        ),
    ],
)
def test_an_invalid_schedule_is_refused_with_one_message(given, message):
    assert refused(f"policy.scheduler={given}") == f"policy.scheduler{message}"


@pytest.mark.parametrize("name", ["cosin", "[a]", "torch.optim.lr_scheduler.CyclicLR"])
def test_an_unknown_schedule_is_refused_and_the_known_ones_are_listed(name):
    shown = "['a']" if name == "[a]" else name
    assert refused(f"policy.scheduler={{name: {name}}}").startswith(
        f"policy.scheduler.name = {shown} is not a known schedule. Use one of linear, cosine, constant, wsd, or one of torch's: "
        "torch.optim.lr_scheduler.LinearLR, "
    )


def test_warmup_and_decay_may_add_up_to_the_complete_run():
    # 0.7 + 0.3 is 1, but 0.9 - 0.2 + 0.3 need not be: sums of shares are compared with a tolerance.
    assert policy_of(f"policy.scheduler={{name: wsd, warmup_ratio: {0.1 + 0.2}, decay_ratio: 0.7}}").scheduler


@pytest.mark.parametrize(
    ("given", "spans"),
    [
        ("{name: linear}", True),
        ("{name: cosine}", True),
        ("{name: wsd}", True),
        ("{name: constant, warmup_ratio: 0.1}", True),
        ("{name: constant}", False),
        ("{name: torch.optim.lr_scheduler.LinearLR}", False),
        ("null", False),
    ],
)
def test_a_schedule_in_shares_of_the_run_depends_on_its_length(given, spans):
    assert policy_of(f"policy.scheduler={given}").scheduler_spans_run is spans
    assert not policy_of().scheduler_spans_run
