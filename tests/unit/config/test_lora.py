"""The keys of LoRA and of another reference model: settings without effect are refused."""

import pytest
import yaml

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")


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
        ("use_rslora=true", "use_rslora = true"),
        ("use_dora=true", "use_dora = true"),
        ("target_parameters=[down_proj]", 'target_parameters = ["down_proj"]'),
        ("modules_to_save=[lm_head]", 'modules_to_save = ["lm_head"]'),
        ("trainable_token_indices=[5]", "trainable_token_indices = [5]"),
        ("loraplus_lr_ratio=16", "loraplus_lr_ratio = 16.0"),
        ("adapter=somewhere", 'adapter = "somewhere"'),
        ("quantization=nf4", 'quantization = "nf4"'),
    ],
)
def test_lora_settings_without_lora_are_refused(override, shown):
    assert refusal(f"policy.lora.{override}") == (
        f"command line: policy.lora.{shown} has no effect: policy.lora.enabled is false. "
        f"Set policy.lora.enabled=true, or leave out policy.lora.{override.partition('=')[0]}."
    )


@pytest.mark.parametrize(
    "overrides", [[], ["policy.lora.enabled=true", "policy.lora.dim=8", "export.merge_lora=false"]]
)
def test_a_resolved_lora_configuration_reads_back_the_same(overrides, tmp_path):
    first = load_config(None, overrides)
    (tmp_path / "config.yaml").write_text(first.as_yaml())
    again = load_config(str(tmp_path / "config.yaml"), [])
    assert again.config == first.config
    assert yaml.safe_load(again.as_yaml())["policy"]["lora"]["alpha"] == 32


def test_one_key_enables_lora():
    lora = load_config(None, ["policy.lora.enabled=true"]).config.policy.lora
    assert lora == Lora(enabled=True, dim=16, alpha=32, dropout=0, target_modules="all-linear", exclude_modules=[])


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("dropout=0.1", "dropout = 0.1"),
        ("use_dora=true", "use_dora = true"),
        ("quantization=int8", 'quantization = "int8"'),
    ],
)
def test_adapters_of_experts_are_plain(override, shown):
    experts = ["policy.lora.enabled=true", "policy.lora.target_parameters=[experts.down_proj]"]
    assert refusal(*experts, f"policy.lora.{override}") == (
        f"command line: policy.lora.target_parameters does not work with policy.lora.{shown}: adapters of experts are added to "
        f"their tensor. Leave out policy.lora.{override.partition('=')[0]}, or target_parameters."
    )


def test_adapters_of_nothing_are_refused():
    assert refusal("policy.lora.enabled=true", "policy.lora.target_modules=[]") == (
        "command line: policy.lora.target_modules is empty, so nothing would be adapted. Name layers, or leave it out for all of "
        "them."
    )


def test_dora_on_quantised_weights_is_refused():
    assert refusal("policy.lora.enabled=true", "policy.lora.use_dora=true", "policy.lora.quantization=nf4") == (
        "command line: policy.lora.use_dora = true does not work with policy.lora.quantization = nf4: the lengths of rows are "
        "computed from weights that are not quantised. Leave one of them out."
    )


def test_exporting_adapters_without_lora_is_refused():
    assert refusal("export.merge_lora=false") == (
        "configuration: export.merge_lora=false has no effect without LoRA adapters. Leave it out, or set "
        "policy.lora.enabled=true."
    )


def test_a_reference_model_for_a_loss_without_reference_is_refused():
    assert refusal("reference.model=there", "dpo.preference_loss=simpo") == (
        "configuration: reference.model = there has no effect: dpo.preference_loss simpo does not use a reference. "
        "Leave out reference.model."
    )


def test_dropout_with_a_batch_loss_is_refused():
    assert refusal("policy.lora.enabled=true", "policy.lora.dropout=0.1", "dpo.preference_loss=aot") == (
        "configuration: policy.lora.dropout = 0.1 does not work with dpo.preference_loss aot, which runs each batch through the "
        "model twice and needs the same results both times. Set policy.lora.dropout=0."
    )


def test_an_invalid_regular_expression_is_refused():
    assert refusal("policy.lora.enabled=true", 'policy.lora.target_modules="("') == (
        'command line: policy.lora.target_modules = "(" is not a valid regular expression: '
        "missing ), unterminated subpattern at position 0. Correct it, or give a list of layer names."
    )


def test_names_from_other_trainers_are_suggested():
    assert "Did you mean policy.lora.dim?" in refusal("lora_rank=8")
    assert "Did you mean reference.model?" in refusal("ref_model=there")
