"""The keys of adapters and of another reference: what is read, and what is refused because nothing would read it."""

import pytest
import yaml

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError


def refusal(*overrides):
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("dim=8", "dim = 8"),
        ("alpha=16", "alpha = 16.0"),
        ("dropout=0.1", "dropout = 0.1"),
        ("target_modules=[q_proj]", 'target_modules = ["q_proj"]'),
        ("exclude_modules=[q_proj]", 'exclude_modules = ["q_proj"]'),
        ("adapter=somewhere", 'adapter = "somewhere"'),
        ("quantization=nf4", 'quantization = "nf4"'),
    ],
)
def test_a_setting_of_adapters_that_are_off_is_refused(override, shown):
    assert refusal(f"policy.lora.{override}") == (
        f"command line: policy.lora.{shown} is not read while policy.lora.enabled is false: "
        "set policy.lora.enabled=true, or leave it out."
    )


@pytest.mark.parametrize(
    "overrides", [[], ["policy.lora.enabled=true", "policy.lora.dim=8", "export.merge_lora=false"]]
)
def test_a_resolved_configuration_is_read_again(overrides, tmp_path):
    first = load_config(None, overrides)
    (tmp_path / "config.yaml").write_text(first.as_yaml())
    again = load_config(str(tmp_path / "config.yaml"), [])
    assert again.config == first.config
    assert yaml.safe_load(again.as_yaml())["policy"]["lora"]["alpha"] == 32


def test_one_line_turns_adapters_on():
    lora = load_config(None, ["policy.lora.enabled=true"]).config.policy.lora
    assert lora == Lora(enabled=True, dim=16, alpha=32, dropout=0, target_modules="all-linear", exclude_modules=[])


def test_writing_adapters_alone_without_adapters_is_refused():
    assert refusal("export.merge_lora=false") == (
        "configuration: export.merge_lora=false is not read while policy.lora.enabled is false: "
        "there is no adapter to write alone."
    )


def test_another_reference_for_a_loss_without_one_is_refused():
    assert refusal("reference.model=there", "dpo.preference_loss=simpo") == (
        "configuration: reference.model = there is not read by dpo.preference_loss simpo, which compares with no reference: "
        "leave it out."
    )


def test_dropout_with_a_loss_that_computes_a_batch_twice_is_refused():
    assert refusal("policy.lora.enabled=true", "policy.lora.dropout=0.1", "dpo.preference_loss=aot") == (
        "configuration: policy.lora.dropout = 0.1 contradicts dpo.preference_loss aot, which computes a batch twice: "
        "the two would draw different dropout. Set policy.lora.dropout=0."
    )


def test_a_target_that_is_no_regular_expression_is_refused():
    assert refusal("policy.lora.enabled=true", 'policy.lora.target_modules="("') == (
        'command line: policy.lora.target_modules = "(" is no regular expression: '
        "missing ), unterminated subpattern at position 0."
    )


def test_names_that_other_trainers_use_lead_here():
    assert "Did you mean policy.lora.dim?" in refusal("lora_rank=8")
    assert "Did you mean reference.model?" in refusal("ref_model=there")
