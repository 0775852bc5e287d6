"""Configuration files and overrides: the resolved values, where they came from, and the messages about mistakes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tandem.config.keys import all_keys
from tandem.config.load import load_config, require_training_set
from tandem.config.schema import Config
from tandem.config.source.overrides import parse_change, parse_override
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def refusal(file: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


LISTS = " `tandem config` lists all keys."


# Inheritance


def test_a_file_in_defaults_provides_missing_values(write):
    write("base.yaml", "dpo: {max_num_epochs: 2, val_period: 7}")
    dpo = load_config(write("a.yaml", "defaults: base.yaml\ndpo: {max_num_epochs: 5}"), []).config.dpo
    assert (dpo.max_num_epochs, dpo.val_period) == (5, 7)


def test_later_defaults_win(write):
    write("one.yaml", "run: {seed: 1, name: one}")
    write("two.yaml", "run: {seed: 2}")
    run = load_config(write("a.yaml", "defaults: [one.yaml, two.yaml]"), []).config.run
    assert (run.seed, run.name) == (2, "one")


def test_defaults_nest_and_are_relative_to_their_file(write):
    write("shared/deep/grand.yaml", "run: {seed: 1, name: grand}\ndpo: {val_period: 3}")
    write("shared/parent.yaml", "defaults: deep/grand.yaml\nrun: {seed: 2}")
    config = load_config(write("here/a.yaml", "defaults: ../shared/parent.yaml\nrun: {name: own}"), []).config
    assert (config.run.seed, config.run.name, config.dpo.val_period) == (2, "own", 3)


def test_a_later_file_wins_over_the_defaults_of_an_earlier_one(write):
    write("grand.yaml", "run: {seed: 1}")
    write("one.yaml", "defaults: grand.yaml")
    write("two.yaml", "run: {seed: 2}")
    assert load_config(write("a.yaml", "defaults: [two.yaml, one.yaml]"), []).config.run.seed == 1


def test_a_list_replaces_an_inherited_list(write):
    write("base.yaml", "policy: {optimizer: {kwargs: {betas: [0.1, 0.2]}}}")
    file = write("a.yaml", "defaults: base.yaml\npolicy: {optimizer: {kwargs: {betas: [0.3, 0.4]}}}")
    assert load_config(file, []).config.policy.optimizer.kwargs.betas == [0.3, 0.4]


def test_override_true_replaces_an_inherited_section(write):
    write("base.yaml", "dpo: {max_num_epochs: 2, val_period: 7}\nrun: {seed: 9}")
    config = load_config(write("a.yaml", "defaults: base.yaml\ndpo: {_override_: true, val_period: 8}"), []).config
    assert (config.dpo.max_num_epochs, config.dpo.val_period, config.run.seed) == (1, 8, 9)


def test_circular_defaults_are_refused_and_the_chain_is_shown(write, tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write("b.yaml", "defaults: a.yaml")
    assert refusal(write("a.yaml", "defaults: b.yaml")) == (
        f"{a}: circular `defaults:`: {a} -> {b} -> {a}. Remove one of these files from `defaults:`."
    )


def test_a_file_named_by_two_others_is_not_circular(write):
    write("base.yaml", "run: {seed: 3}")
    write("one.yaml", "defaults: base.yaml")
    write("two.yaml", "defaults: base.yaml")
    assert load_config(write("a.yaml", "defaults: [one.yaml, two.yaml]"), []).config.run.seed == 3


@pytest.mark.parametrize(("given", "shown"), [("3", "3"), ("[a.yaml, 3]", '["a.yaml", 3]'), ("{a: b}", '{"a": "b"}')])
def test_defaults_that_are_not_file_names_are_refused(write, given, shown):
    file = write("a.yaml", f"defaults: {given}")
    assert refusal(file) == f"{file}: `defaults:` must be a file name or a list of file names, not {shown}."


def test_the_origin_of_each_value_is_recorded(write, tmp_path):
    base = write("base.yaml", "run: {seed: 1, name: base}\ndpo: {val_period: 2}")
    file = write("a.yaml", "defaults: base.yaml\nrun: {seed: 2}")
    assert load_config(file, ["dpo.val_period=3"]).origins == {
        "run.seed": file,
        "run.name": base,
        "dpo.val_period": "command line",
    }


# Files that cannot be read


def test_a_missing_file_is_named(tmp_path):
    assert refusal(str(tmp_path / "no.yaml")) == f"{tmp_path}/no.yaml: no such configuration file."


def test_a_missing_default_is_reported_with_the_file_that_names_it(write, tmp_path):
    file = write("a.yaml", "defaults: no.yaml")
    assert (
        refusal(file)
        == f"{tmp_path}/no.yaml: no such configuration file, listed in `defaults:` of {file}. Correct the path."
    )


def test_invalid_yaml_is_reported_with_line_and_column(write):
    file = write("a.yaml", "run:\n  name: [")
    assert refusal(file) == (
        f"{file}: not readable as YAML: while parsing a flow node expected the node content, but found "
        f"'<stream end>' in \"{file}\", line 2, column 10"
    )


def test_a_key_given_twice_in_a_file_is_refused(write):
    file = write("a.yaml", "dpo:\n  val_period: 3\n  val_period: 4")
    assert refusal(file) == (
        f'{file}: not readable as YAML: while constructing a mapping in "{file}", line 2, column 3 '
        f'found duplicate key val_period in "{file}", line 3, column 3'
    )


def test_a_file_that_is_a_list_is_refused(write):
    file = write("a.yaml", "- 1")
    assert refusal(file) == f"{file}: a configuration must be a mapping of sections, not a list."


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"run:\n  name: \xff\n")
    assert refusal(str(file)) == f"{file}: not UTF-8 at byte 8 of line 2. Save the file as UTF-8."


def test_an_empty_file_gives_the_defaults(write):
    assert load_config(write("a.yaml", ""), []).config == Config()


# Interpolation


def test_interpolations_can_refer_to_given_values_defaults_and_neighbours(write):
    file = write("a.yaml", 'run: {name: x}\nreference: {cache_dir: "${run.name}/${run.seed}/${.mode}"}')
    assert load_config(file, []).config.reference.cache_dir == "x/42/cached"


def test_an_interpolation_can_refer_to_overrides(write):
    file = write("a.yaml", 'reference: {cache_dir: "c-${run.name}"}')
    assert load_config(file, ["run.name=y"]).config.reference.cache_dir == "c-y"


def test_an_override_may_be_an_interpolation():
    assert load_config(None, ["run.seed=7", "dpo.val_period=${run.seed}"]).config.dpo.val_period == 7


def test_an_interpolation_of_an_unknown_key_is_refused(write):
    assert refusal(write("a.yaml", 'run: {name: "${nosuch}"}')) == (
        "configuration: Interpolation key 'nosuch' not found full_key: run.name object_type=dict"
    )


def test_an_interpolation_of_itself_is_refused(write):
    assert refusal(write("a.yaml", 'run: {name: "${run.name}"}')) == (
        "configuration: Recursive interpolation detected full_key: run.name object_type=dict"
    )


def test_an_environment_variable_that_is_not_set_is_refused(write, monkeypatch):
    monkeypatch.delenv("TANDEM_TEST_NONE", raising=False)
    assert refusal(write("a.yaml", 'run: {name: "${oc.env:TANDEM_TEST_NONE}"}')) == (
        "configuration: KeyError raised while resolving interpolation: "
        "\"Environment variable 'TANDEM_TEST_NONE' not found\" full_key: run.name object_type=dict"
    )


@pytest.mark.parametrize("written", ["${oc.env:HUSH}", "a/${oc.env:HUSH}", "${ oc.env:HUSH }", "${oc.env:HUSH,none}"])
def test_a_value_from_the_environment_is_used_and_never_shown(write, monkeypatch, written):
    monkeypatch.setenv("HUSH", "s3cret")
    loaded = load_config(write("a.yaml", f'reference: {{cache_dir: "{written}"}}'), [])
    assert loaded.config.reference.cache_dir is not None
    assert "s3cret" in loaded.config.reference.cache_dir
    assert "s3cret" not in loaded.as_yaml()
    assert yaml.safe_load(loaded.as_yaml())["reference"]["cache_dir"] == written


def test_a_value_from_the_environment_is_not_shown_by_a_key_that_refers_to_it(write, monkeypatch):
    monkeypatch.setenv("HUSH", "s3cret")
    loaded = load_config(write("a.yaml", 'run: {name: "${oc.env:HUSH}"}\nreference: {cache_dir: "${run.name}"}'), [])
    assert loaded.config.reference.cache_dir == "s3cret"
    assert "s3cret" not in loaded.as_yaml()


def test_a_value_from_the_environment_inside_a_list_is_not_shown(write, monkeypatch):
    monkeypatch.setenv("HUSH", "0.625")
    file = write("a.yaml", 'policy: {optimizer: {kwargs: {betas: ["${oc.decode:${oc.env:HUSH}}", 0.5]}}}')
    loaded = load_config(file, [])
    assert loaded.config.policy.optimizer.kwargs.betas == [0.625, 0.5]
    assert "0.625" not in loaded.as_yaml()


def test_a_value_from_the_environment_is_not_shown_by_the_error_about_it(write, monkeypatch):
    monkeypatch.setenv("HUSH", "s3cret/")
    file = write("a.yaml", 'run: {name: "${oc.env:HUSH}"}')
    assert refusal(file) == (
        f"{file}: run.name = \"${{oc.env:HUSH}}\": string should match pattern '^[A-Za-z0-9._-]+$'."
    )


def test_interpolations_that_read_no_environment_variable_are_shown_resolved(write):
    loaded = load_config(write("a.yaml", 'reference: {cache_dir: "${run.name}"}'), [])
    assert yaml.safe_load(loaded.as_yaml())["reference"]["cache_dir"] == "tandem"


# Overrides


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_override_wins_over_the_file_with_any_prefix(write, sign):
    file = write("a.yaml", "dpo: {max_num_epochs: 2}")
    assert load_config(file, [f"{sign}dpo.max_num_epochs=3"]).config.dpo.max_num_epochs == 3


def test_the_last_of_two_overrides_wins():
    assert load_config(None, ["run.seed=1", "run.seed=2"]).config.run.seed == 2


def test_override_values_follow_hydras_grammar():
    config = load_config(
        None,
        [
            "policy.optimizer.kwargs.lr=1e-4",
            "policy.optimizer.kwargs.betas=[0.5,0.75]",
            "dpo.max_num_steps=null",
            "data.shuffle=false",
            "run.dir='a, b=c'",
        ],
    ).config
    assert config.policy.optimizer.kwargs.lr == 0.0001
    assert config.policy.optimizer.kwargs.betas == [0.5, 0.75]
    assert config.dpo.max_num_steps is None
    assert config.data.shuffle is False
    assert config.run.dir == "a, b=c"


def test_an_override_of_a_section_replaces_the_section(write):
    file = write("a.yaml", "run: {seed: 5, name: file}")
    run = load_config(file, ["run={name: line}"]).config.run
    assert (run.seed, run.name) == (42, "line")


def test_a_key_of_a_dataset_given_as_a_path_keeps_the_path(write):
    train = load_config(
        write("a.yaml", "data: {train: pairs.jsonl}"), ["data.train.prompt_key=question"]
    ).config.data.train
    assert (train.data_path, train.prompt_key) == ("pairs.jsonl", "question")


def test_a_tilde_makes_an_optional_key_null(write):
    file = write("a.yaml", "policy: {max_grad_norm: 3.0}")
    assert load_config(file, ["~policy.max_grad_norm"]).config.policy.max_grad_norm is None


def test_a_tilde_resets_any_other_key_to_its_default(write):
    file = write("a.yaml", "dpo: {max_num_epochs: 7, val_period: 8}")
    assert load_config(file, ["~dpo.max_num_epochs"]).config.dpo.max_num_epochs == 1
    assert load_config(file, ["~dpo"]).config.dpo == Config().dpo


def test_a_tilde_before_an_unknown_key_is_refused():
    assert refusal(None, "~dpo.val_perod") == (
        f"override '~dpo.val_perod': unknown key dpo.val_perod. Did you mean dpo.val_period?{LISTS}"
    )


def test_a_tilde_may_remove_an_unknown_key_that_a_file_holds(write):
    file = write("a.yaml", "dpo: {gamma: 1, val_period: 3}")
    assert load_config(file, ["~dpo.gamma"]).config.dpo.val_period == 3


@pytest.mark.parametrize("values", ["1,2", "range(1,3)", "choice(1,2)"])
def test_a_sweep_is_refused_with_what_to_do_instead(values):
    assert refusal(None, f"run.seed={values}") == (
        f"override 'run.seed={values}': several values are a sweep, which a single run cannot do. To train one run per "
        "value, use `tandem sweep`. For a list, write run.seed=[a,b]."
    )


def test_a_number_with_commas_gets_a_hint():
    message = refusal(None, "policy.packing.pack_length=16,384")
    assert message.endswith(
        "For a list, write policy.packing.pack_length=[a,b]. Write a number without commas: policy.packing.pack_length=16384."
    )
    assert "without commas" not in refusal(None, "policy.packing.pack_length=1024,2048")


def test_several_paths_get_the_hint_to_write_a_list_of_sets():
    message = refusal(None, "data.train.data_path=a.jsonl,b.jsonl")
    assert message.endswith("For a list, write data.train=[a,b].")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run={name", """its { is not closed. Close it, or quote the value if it is text: 'run="{name"'."""),
        (
            "policy.lora.target_modules=((",
            """its ( is not closed. Close it, or quote the value if it is text: 'policy.lora.target_modules="(("'.""",
        ),
        (
            "run.name={a: [1}",
            """its [ is not closed. Close it, or quote the value if it is text: 'run.name="{a: [1}"'.""",
        ),
        (
            "run.name=[a]]",
            """its ] closes nothing. Leave it out, or quote the value if it is text: 'run.name="[a]]"'.""",
        ),
        (
            "run.name=['a(]",
            "its ' is not closed. Close it, or quote the value if it is text: "
            + shlex.quote('run.name="[\'a(]"')
            + ".",
        ),
        (
            "run.name=it's",
            "its ' is not closed. Close it, or quote the value if it is text: " + shlex.quote('run.name="it\'s"') + ".",
        ),
        (
            "run.name=a=b",
            "its value is not a number, a list [a,b] or a map {a: b}, and other text with special characters needs quotes. "
            """Correct it, or quote the value if it is text: 'run.name="a=b"'.""",
        ),
        ("run[=1", "its key cannot be read. Write key=value, +key=value or ~key. `tandem config` lists all keys."),
    ],
)
def test_an_override_that_cannot_be_read_is_refused_with_how_to_write_it(text, reason):
    assert refusal(None, text) == f"override {text!r}: {reason}"


@pytest.mark.parametrize("text", ["[q_proj", "((", "it's", 'a"b', """a"b'c""", "a='\\", ".*\\.(q|v)_proj", "x,", "${x"])
def test_the_quotes_that_an_error_advises_give_the_text(text):
    with pytest.raises(ConfigError) as refused:
        parse_change(f"run.name={text}")
    (advised,) = shlex.split(str(refused.value).partition("if it is text: ")[2].removesuffix("."))
    assert parse_change(advised).value == text


def test_an_error_in_a_function_of_an_override_is_quoted():
    message = refusal(None, "run.seed=choice()")
    assert (
        "'run.seed=choice()': ValueError while evaluating 'choice()': empty choice is not legal. Correct it, or "
        in message
    )


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("run.seed", "an override is KEY=VALUE, such as run.seed=1. Write the key and its value."),
        ("nope.yaml", "a configuration file. Write --config nope.yaml."),
        ("configs/DPO.YML", "a configuration file. Write --config configs/DPO.YML."),
        ("train_dpo.py", "a configuration file. Write --config train_dpo.py."),
        (
            "data/pairs.jsonl",
            "a path without a key. Write --config FILE for a configuration, or data.train=data/pairs.jsonl.",
        ),
    ],
)
def test_an_override_without_a_value_is_refused_with_what_it_probably_means(text, advice, of_a_command):
    assert refusal(None, text) == f"override {text!r}: {advice}"
    with pytest.raises(ConfigError, match=r"\Aoverride "):
        parse_override(text)  # of a sweep


def test_an_override_too_long_for_a_file_name_is_refused():
    assert refusal(None, "run={" + "x" * 5000).startswith("override 'run={xxx")


def test_a_file_name_as_an_override_gets_the_key_to_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("")
    assert refusal(None, "pairs.jsonl") == (
        "override 'pairs.jsonl': a file without a key. To train on it, write data.train=pairs.jsonl; for several files, use a "
        "pattern in quotes, 'FOLDER/*.jsonl'."
    )


# Unknown keys


def test_a_known_key_in_the_wrong_section_gets_the_right_one():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["data.data_path=a.jsonl"])
    assert "unknown key data.data_path. Did you mean data.train.data_path?" in str(caught.value)


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(write):
    file = write("a.yaml", "dpo: {max_num_epoch: 3}")
    assert refusal(file) == f"{file}: unknown key dpo.max_num_epoch. Did you mean dpo.max_num_epochs?{LISTS}"


def test_an_unknown_key_from_a_default_names_that_file(write):
    base = write("base.yaml", "dpo: {max_num_epoch: 3}")
    file = write("a.yaml", "defaults: base.yaml\ndpo: {val_period: 1}")
    assert refusal(file) == f"{base}: unknown key dpo.max_num_epoch. Did you mean dpo.max_num_epochs?{LISTS}"


def test_an_unknown_key_on_the_command_line_is_reported_as_such():
    assert refusal(None, "dpo.max_num_epoch=3") == (
        f"command line: unknown key dpo.max_num_epoch. Did you mean dpo.max_num_epochs?{LISTS}"
    )
    assert refusal(None, "+dpo.max_num_epoch=3") == refusal(None, "++dpo.max_num_epoch=3")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("beta", "dpo.reference_policy_kl_penalty"),
        ("dpo.beta", "dpo.reference_policy_kl_penalty"),
        ("lr", "policy.optimizer.kwargs.lr"),
        ("learning_rate", "policy.optimizer.kwargs.lr"),
        ("max_steps", "dpo.max_num_steps"),
        ("num_train_epochs", "dpo.max_num_epochs"),
        ("max_length", "policy.max_total_sequence_length"),
        ("loss_type", "dpo.preference_loss"),
        ("output_dir", "run.dir"),
        ("seed", "run.seed"),
    ],
)
def test_a_name_from_another_trainer_gets_the_key_to_use(theirs, ours):
    assert refusal(None, f"{theirs}=1") == f"command line: unknown key {theirs}. Did you mean {ours}?{LISTS}"


def test_an_unfamiliar_key_gets_no_suggestion():
    assert refusal(None, "zzqq=1") == f"command line: unknown key zzqq.{LISTS}"


def test_an_unknown_key_is_shown_as_written_even_with_a_capital(write):
    file = write("a.yaml", "Beta: 1")
    assert refusal(file) == f"{file}: unknown key Beta. Did you mean dpo.reference_policy_kl_penalty?{LISTS}"


def test_a_key_written_with_dots_in_a_file_is_refused(write):
    file = write("a.yaml", "dpo.max_num_epochs: 3")
    assert refusal(file) == (
        f"{file}: the key dpo.max_num_epochs is written with dots. In a file, write nested sections instead."
    )


def test_a_key_that_is_not_text_is_refused(write):
    file = write("a.yaml", "dpo: {1: 3}")
    assert refusal(file) == f"{file}: dpo.1 = 1: keys should be strings."


# Values


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("dpo.max_num_epochs='3'", 'dpo.max_num_epochs = "3": input should be a valid integer.'),
        ("dpo.max_num_epochs=1.0", "dpo.max_num_epochs = 1.0: input should be a valid integer."),
        ("dpo.max_num_epochs=0", "dpo.max_num_epochs = 0: input should be greater than 0."),
        ("dpo.val_at_start=1", "dpo.val_at_start = 1: input should be a valid boolean."),
        ("run.seed=-1", "run.seed = -1: input should be greater than or equal to 0."),
        ("run.name=a/b", "run.name = \"a/b\": string should match pattern '^[A-Za-z0-9._-]+$'."),
        ("policy.optimizer.kwargs.lr=abc", 'policy.optimizer.kwargs.lr = "abc": input should be a valid number.'),
        ("policy.optimizer.kwargs.lr=nan", "policy.optimizer.kwargs.lr = NaN: input should be a finite number."),
        (
            "policy.optimizer.kwargs.betas=[0.9]",
            "policy.optimizer.kwargs.betas = [0.9]: it has 1 items and needs at least 2.",
        ),
        (
            "dpo.reference_policy_kl_penalty=0",
            "dpo.reference_policy_kl_penalty = 0: input should be greater than 0.",
        ),
        *(
            (
                f"{key}={10**18 * 10}",
                f"{key} = {10**18 * 10}: input should be between -9223372036854775807 and 9223372036854775807.",
            )
            for key in ("dpo.max_num_steps", "policy.packing.packs_per_micro_batch")
        ),
        ("dpo=3", "dpo = 3: it must be a mapping, such as {KEY: VALUE}."),
        ("data.train=3", "data.train = 3: it must be a mapping, such as {KEY: VALUE}."),
        (
            "export.dtype=bf16",
            "export.dtype = \"bf16\": did you mean bfloat16? Input should be 'auto', 'float32', 'bfloat16' or 'float16'.",
        ),
        (  # bfloat16 alone is not a value of this key
            "policy.weights=bf16",
            "policy.weights = \"bf16\": input should be 'float32', 'bfloat16_stochastic' or 'bfloat16_nearest'.",
        ),
        ("data.max_bad_share=1.5", "data.max_bad_share = 1.5: input should be less than or equal to 1."),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_key_and_value(override, reason):
    assert refusal(None, override) == f"command line: {reason}"


def test_an_error_in_a_key_of_two_types_lists_both():
    assert refusal(None, "policy.packing.pack_length=0") == (
        "command line: policy.packing.pack_length = 0: input should be greater than 0, or input should be 'auto'."
    )


@pytest.mark.parametrize(("key", "value"), [("pack_length", "256"), ("algorithm", "first_fit_shuffle")])
def test_packing_settings_without_packing_are_refused(key, value):
    assert refusal(None, "policy.packing.mode=none", f"policy.packing.{key}={value}") == (
        f"command line: policy.packing.{key} = {value} has no effect with policy.packing.mode=none, where every sequence has "
        "its own row. Leave it out, or set policy.packing.mode=batch."
    )


def test_a_pack_length_above_the_limit_is_refused():
    assert refusal(None, "policy.packing.pack_length=10000000000000") == (
        "command line: policy.packing.pack_length = 10000000000000: input should be less than or equal to 16777216, or input "
        "should be 'auto'."
    )


def test_the_alpha_divergence_of_order_1_is_refused():
    assert refusal(None, "dpo.f_divergence=alpha") == (
        "command line: dpo.f_divergence = alpha with dpo.f_alpha = 1 is the same as reverse_kl. Set dpo.f_alpha to another "
        "value, such as 0.5, or leave out dpo.f_divergence."
    )


def test_all_errors_in_a_file_are_shown_together(write):
    file = write("a.yaml", 'dpo: {max_num_epochs: "3", gamma: 1}\nrun: {seed: -1}\nfoo: 1')
    assert refusal(file, "data.shuffle=2").splitlines() == [
        f"{file}: run.seed = -1: input should be greater than or equal to 0.",
        f'{file}: dpo.max_num_epochs = "3": input should be a valid integer.',
        f"{file}: unknown key dpo.gamma. Did you mean dpo.simpo_gamma?{LISTS}",
        "command line: data.shuffle = 2: input should be a valid boolean.",
        f"{file}: unknown key foo.{LISTS}",
    ]


def test_both_loss_weights_zero_is_refused(write):
    file = write("a.yaml", "dpo: {preference_loss_weight: 0}")
    assert refusal(file) == (
        f"{file}: dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so there is nothing to train. "
        "Set one of them above 0."
    )
    assert load_config(file, ["dpo.sft_loss_weight=1"]).config.dpo.sft_loss_weight == 1


def test_the_sft_average_follows_the_preference_average_unless_given():
    follows = load_config(None, ["dpo.preference_average_log_probs=true"]).config.dpo
    given = load_config(None, ["dpo.preference_average_log_probs=true", "dpo.sft_average_log_probs=false"]).config.dpo
    assert (follows.sft_average_log_probs, given.sft_average_log_probs) == (True, False)


LINEAR = "{name: torch.optim.lr_scheduler.LinearLR}"


@pytest.mark.parametrize(
    ("items", "schedulers", "steps"),
    [
        ([LINEAR, LINEAR], 2, []),
        ([LINEAR, "{milestones: [5]}"], 1, [5]),
        ([LINEAR, LINEAR, LINEAR, "{milestones: [5, 5]}"], 3, [5, 5]),
        ([LINEAR, LINEAR, LINEAR, "{milestones: [9, 5]}"], 3, [9, 5]),
        ([LINEAR, LINEAR, "{milestones: [5]}", "{milestones: [6]}"], 2, [5]),
    ],
)
def test_milestones_that_do_not_match_the_schedulers_are_refused(write, items, schedulers, steps):
    file = write("a.yaml", f"policy: {{scheduler: [{', '.join(items)}]}}")
    assert refusal(file) == (
        f"{file}: policy.scheduler has {schedulers} schedulers and milestones {steps}. Give one list of "
        "increasing milestones, one fewer than there are schedulers."
    )


def test_two_schedulers_take_one_milestone(write):
    file = write("a.yaml", f"policy: {{scheduler: [{LINEAR}, {LINEAR}, {{milestones: [5]}}]}}")
    scheduler = load_config(file, []).config.policy.scheduler
    assert isinstance(scheduler, list)
    assert scheduler[2].model_dump() == {"milestones": [5]}


def test_the_schedule_may_be_a_single_scheduler_or_null(write):
    file = write("a.yaml", f"policy: {{scheduler: {LINEAR}}}")
    one = load_config(file, []).config.policy.scheduler
    assert one is not None and not isinstance(one, list)
    assert one.name == "torch.optim.lr_scheduler.LinearLR"
    assert load_config(file, ["~policy.scheduler"]).config.policy.scheduler is None


def test_sharing_prompts_without_packing_is_refused(write):
    file = write("a.yaml", "policy: {packing: {mode: none, share_prompts: true}}")
    assert refusal(file) == (
        f"{file}: policy.packing.share_prompts=true does not work with policy.packing.mode=none, where every sequence has its "
        "own row. Leave it out, or set policy.packing.mode=batch."
    )


def test_prompts_are_not_shared_by_default_without_packing():
    assert load_config(None, ["policy.packing.mode=none"]).config.policy.packing.share_prompts is False
    assert Config().policy.packing.share_prompts is True


def test_another_version_of_the_schema_is_refused(write):
    file = write("a.yaml", "config_version: 2")
    assert refusal(file) == (
        f"{file}: config_version = 2 is not supported: this version of tandem reads 1. Update the file, or install another "
        "version of tandem."
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a b", "'a b' is not a valid name. Use letters, digits, - and _."),
        ("a.b", "'a.b' is not a valid name. Use letters, digits, - and _."),
        ("default", "the name default is reserved for data.validation. Use another name."),
    ],
)
def test_an_invalid_name_of_a_validation_set_is_refused(write, name, reason):
    file = write("a.yaml", f"data: {{val_data_paths: {{{name}: x.jsonl}}}}")
    assert refusal(file) == f"{file}: data.val_data_paths: {reason}"


# The embedded default


def test_the_embedded_default_is_used_if_nothing_is_given():
    loaded = load_config(None, [])
    assert (loaded.config.run.name, loaded.config.policy.optimizer.kwargs.lr) == ("default", 0.001)
    assert set(loaded.origins.values()) == {"the embedded default"}


@pytest.mark.parametrize(
    "override", ["run.seed=1", "data.num_workers=1", "data.validation_share=0.1", "+data.shuffle=false"]
)
def test_overrides_of_other_keys_keep_the_embedded_default(override):
    assert load_config(None, [override]).config.policy.optimizer.kwargs.lr == 0.001


@pytest.mark.parametrize(
    "override",
    [
        "policy.model_name=m",
        "policy={model_name: m}",
        "data.train=x.jsonl",
        "data.train.data_path=x.jsonl",
        "data.validation=x.jsonl",
        "data.default.data_path=x.jsonl",
        "data={train: x.jsonl}",
    ],
)
def test_the_embedded_default_does_not_apply_to_a_given_model_or_data(override):
    config = load_config(None, [override]).config
    assert (config.run.name, config.policy.optimizer.kwargs.lr) == ("tandem", 5e-6)


def test_the_embedded_default_does_not_apply_to_a_file(write):
    config = load_config(write("a.yaml", "run: {seed: 1}"), []).config
    assert (config.run.name, config.policy.optimizer.kwargs.lr) == ("tandem", 5e-6)


# The resolved configuration


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["policy.packing.mode=none"],
        ["policy.scheduler=null", "data.validation=v.jsonl", "data.val_data_paths={hard: h.jsonl}"],
        ["policy.scheduler={name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 10}}"],
        ["dpo.preference_average_log_probs=true"],
    ],
)
def test_the_printed_configuration_reads_back_the_same(tmp_path, overrides):
    loaded = load_config(None, overrides)
    file = tmp_path / "config.yaml"
    file.write_text(loaded.as_yaml(), encoding="utf-8")
    assert load_config(str(file), []).config == loaded.config


def test_the_configuration_is_frozen_and_refuses_unknown_keys():
    config = Config()
    with pytest.raises(ValidationError, match="Instance is frozen"):
        config.run.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Config.model_validate({"run": {"sed": 1}})


def test_every_section_is_frozen_and_refuses_unknown_keys():
    found = [Config]
    for section in found:
        for field in section.model_fields.values():
            inner = type(field.default) if field.default is not None else None
            if isinstance(inner, type) and issubclass(inner, type(Config()).__mro__[1]):
                found.append(inner)
    assert len(found) == 22
    assert all(s.model_config.get("frozen") and s.model_config.get("extra") == "forbid" for s in found)


def test_loading_does_not_change_the_file(write):
    text = "run: {seed: 1}\n"
    file = write("a.yaml", text)
    load_config(file, ["run.seed=2", "~dpo"])
    assert Path(file).read_text(encoding="utf-8") == text


def test_a_misspelt_key_in_a_list_of_training_sets_gets_a_suggestion():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["data.train=[{data_path: a.jsonl, promt_key: x}]"])
    assert "unknown key data.train.0.promt_key. Did you mean data.train.0.prompt_key?" in str(error.value)


def test_a_misspelt_section_gets_a_suggestion():
    message = f"command line: unknown key polcy. Did you mean policy?{LISTS}"
    assert refusal(None, "polcy.precision=float32") == message


def test_a_mistake_in_data_default_is_reported_once(write):
    file = write("a.yaml", "data: {train: [a.jsonl, c.jsonl], validation: v.jsonl, val_data_paths: {hard: b.jsonl}}")
    assert refusal(file, "data.default.promt_key=x") == (
        f"command line: unknown key data.default.promt_key. Did you mean data.default.prompt_key?{LISTS}"
    )
    assert refusal(file, "data.default.weight=-1") == (
        "command line: data.default.weight = -1: input should be greater than 0."
    )
    assert refusal(file, "data.default.weight=-1", "data.train=[{data_path: a.jsonl, weight: -2}]") == (
        "command line: data.train.0.weight = -2: input should be greater than 0.\n"
        "command line: data.default.weight = -1: input should be greater than 0."
    )


@pytest.mark.parametrize("given", ["data.val_data_paths={hard: h.jsonl}", "data.val_data_paths.hard=h.jsonl"])
def test_a_key_of_a_named_validation_set_keeps_its_path(given):
    sets = load_config(None, [given, "data.val_data_paths.hard.prompt_key=q"]).config.data.val_data_paths
    assert (sets["hard"].data_path, sets["hard"].prompt_key) == ("h.jsonl", "q")


# A missing training set

TRAIN_ON = "Set data.train.data_path=FILE, or data.train.data_path=embedded if you want the bundled pairs."


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["policy.model_name=m"], "policy.model_name = m"),
        (["policy.model_name=m", "~data.train"], "policy.model_name = m"),
        (["data.validation=v.jsonl"], "data.validation = v.jsonl"),
        (["data.validation.dataset_name=HelpSteer3"], "data.validation = HelpSteer3"),
        (["data.val_data_paths={hard: h.jsonl}"], "data.val_data_paths.hard = h.jsonl"),
        (["data.default.data_path=d.jsonl"], "data.default.data_path = d.jsonl"),
    ],
)
def test_a_model_or_validation_set_without_a_training_set_is_refused(overrides, given):
    with pytest.raises(ConfigError) as error:
        require_training_set(load_config(None, overrides).config)
    assert (
        str(error.value) == f"{given}, but no training set is given, so the run would use the bundled pairs. {TRAIN_ON}"
    )


def test_a_printed_configuration_leaves_out_a_missing_training_set(tmp_path):
    for overrides in (["policy.model_name=m"], ["data.validation=v.jsonl"]):
        (tmp_path / "f.yaml").write_text(load_config(None, overrides).as_yaml(), encoding="utf-8")
        with pytest.raises(ConfigError, match="but no training set is given"):
            require_training_set(load_config(str(tmp_path / "f.yaml"), []).config)
        require_training_set(load_config(str(tmp_path / "f.yaml"), ["data.train=x.jsonl"]).config)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.seed=1"],
        ["data.validation=embedded"],
        ["data.validation_share=0.1"],
        ["policy.model_name=m", "data.train.data_path=embedded"],
        ["policy.model_name=m", "data.train=x.jsonl"],
        ["data.train.dataset_name=HelpSteer3", "data.validation=v.jsonl"],
        ["policy.model_name=m", "data={train: [x.jsonl]}"],
    ],
)
def test_the_bundled_pairs_are_used_by_default_or_on_request(overrides, tmp_path):
    loaded = load_config(None, overrides)
    require_training_set(loaded.config)
    (tmp_path / "config.yaml").write_text(loaded.as_yaml(), encoding="utf-8")
    require_training_set(load_config(str(tmp_path / "config.yaml"), []).config)  # as --resume reads it


# ~ in paths

IN_HOME = [
    "run.dir",
    "policy.model_name",
    "policy.tokenizer.name",
    "policy.tokenizer.chat_template",
    "policy.lora.adapter",
    "reference.model",
    "reference.cache_dir",
    "data.train",
    "data.train.data_path",
    "data.train.prompt_file",
    "data.train.system_prompt_file",
    "data.validation",
    "data.validation.data_path",
    "data.val_data_paths.hard",
    "data.default.data_path",
    "checkpointing.checkpoint_dir",
    "logger.log_dir",
    "logger.tensorboard.log_dir",
]
NEEDED = {
    "policy.lora.adapter": ["policy.lora.enabled=true"],
    "logger.tensorboard.log_dir": ["logger.tensorboard_enabled=true"],
}


def value_of(config: Config, key: str) -> object:
    value = config.model_dump()
    for part in key.split("."):
        value = value[part]
    return value["data_path"] if isinstance(value, dict) else value


@pytest.mark.parametrize("key", IN_HOME)
def test_a_tilde_is_expanded_in_every_key_that_takes_a_path(key, write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    needed = NEEDED.get(key, [])
    for text in (f"{key}=~/a b/*.x", f"{key}='~/a b/*.x'"):
        override = text.replace("a b", "ab") if "'" not in text else text
        expected = "/home/me/a b/*.x" if "'" in text else "/home/me/ab/*.x"
        assert value_of(load_config(None, [*needed, override]).config, key) == expected
    tree = "~/x"
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert value_of(load_config(write("a.yaml", yaml.safe_dump(tree)), needed).config, key) == "/home/me/x"


def test_every_key_that_takes_a_path_expands_a_tilde():
    """Finds them by their descriptions. Add a new key to the list above."""
    of_paths = [
        key.name
        for key in all_keys()
        if key.type.startswith("str") and re.search(r"\b(folder|path|directory|file)\b", key.meaning)
    ]
    not_paths = (
        "data.train.subset",
        "run.name",
        "logger.wandb.name",
        "logger.mlflow.run_name",
    )  # names of, or named after, a directory
    assert [key for key in of_paths if key not in (*IN_HOME, *not_paths) and not key.startswith("data.default.")] == []


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        ("data.train=[~/a,~/b]", ["/home/me/a", "/home/me/b"]),
        ("data.train=[{data_path: ~/a},{data_path:'~/b'}]", ["/home/me/a", "/home/me/b"]),
        ("data.train='a~b'", ["a~b"]),
        ("data.train='x/~'", ["x/~"]),
    ],
)
def test_a_tilde_is_expanded_at_the_start_of_any_value(override, paths, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert [one.data_path for one in load_config(None, [override]).config.data.training_sets] == paths


def test_a_tilde_is_expanded_in_names_of_configuration_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("run: {seed: 7}", encoding="utf-8")
    (tmp_path / "a.yaml").write_text("defaults: ~/base.yaml", encoding="utf-8")
    assert load_config("~/a.yaml", []).config.run.seed == 7


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("a" * 256, "it is too long to be a path"),
        ("a/" * 1501, "it is too long to be a path"),
        ("a\0b", "it has characters that file names cannot have"),
        ("\ud800", "it has characters that file names cannot have"),
    ],
)
@pytest.mark.parametrize("key", ["run.dir", "policy.model_name", "data.train.data_path", "reference.cache_dir"])
def test_text_that_cannot_be_a_path_is_refused(tmp_path, key, given, why):
    file = tmp_path / "run.yaml"
    file.write_text(f"{key.replace('.', ': {')}: {json.dumps(given)}{'}' * key.count('.')}")
    with pytest.raises(ConfigError) as refused:
        load_config(str(file), [])
    shown = json.dumps(given, ensure_ascii=False)
    assert str(refused.value) == f"{file}: {key} = {shown}: {why}."


def test_a_run_name_too_long_for_a_directory_is_refused():
    assert load_config(None, [f"run.name={'a' * 200}"]).config.run.name == "a" * 200
    with pytest.raises(ConfigError, match="string should have at most 200 characters"):
        load_config(None, [f"run.name={'a' * 201}"])


@pytest.mark.parametrize(
    ("given", "size"),
    [("5GB", "5GB"), ("5gb", "5GB"), ("100kB", "100KB"), ("7MIB", "7MiB"), ("7mib", "7MiB"), ("3GiB", "3GiB")],
)
def test_the_unit_of_a_size_is_read_in_any_case(given, size):
    assert load_config(None, [f"export.max_shard_size={given}"]).config.export.max_shard_size == size


@pytest.mark.parametrize("given", ["big", "5", "5TB", "0GB", "5 GB"])
def test_text_that_is_not_a_size_is_refused(given):
    with pytest.raises(ConfigError, match=r"export\.max_shard_size"):
        load_config(None, [f"export.max_shard_size='{given}'"])
