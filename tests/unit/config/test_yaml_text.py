"""Configuration files that would take all memory: nested references, deep nesting, huge files."""

import json
import os
import time

import pytest

from tandem.config.load import load_config
from tandem.config.source.yaml_text import YamlLimitError, check_yaml
from tandem.data.read.hub import choose_files
from tandem.errors import ConfigError, DataError


def bomb(levels=30):
    """a0 has two values, a1 twice a0, and so on: 2**30 from a kilobyte."""
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels))]
    return "\n".join(lines)


def refusal(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config(str(file), [])
    assert time.monotonic() - began < 20
    return str(refused.value).removeprefix(f"{file}: ")


def test_references_to_references_are_counted_expanded(tmp_path):
    assert refusal(tmp_path, bomb()) == (
        "the YAML has more than 100,000 values once its references (*name) are expanded. Is it a configuration file?"
    )


def test_merged_mappings_are_counted_too(tmp_path):
    lines = ["a0: &a0 {x: 1, y: 2}", *(f"a{i}: &a{i} {{x: *a{i - 1}, <<: *a{i - 1}}}" for i in range(1, 40))]
    assert "more than 100,000 values" in refusal(tmp_path, "\n".join(lines))


@pytest.mark.parametrize("text", ["a: " + "[" * 65 + "]" * 65, "a: " + "{b: " * 5000, "- " * 3000 + "x"])
def test_deep_nesting_is_refused(tmp_path, text):
    assert refusal(tmp_path, text) == "the YAML is nested more than 64 levels deep. Is it a configuration file?"


def test_nesting_by_references_is_refused(tmp_path):
    lines = ["a0: &a0 x", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 70))]
    assert refusal(tmp_path, "\n".join(lines)) == (
        "the YAML is nested more than 64 levels deep. Is it a configuration file?"
    )


def test_a_value_that_refers_to_itself_is_refused(tmp_path):
    assert refusal(tmp_path, "policy: &a {x: *a}") == "the anchor &a refers to itself. Is it a configuration file?"


def test_a_huge_file_is_refused(tmp_path):
    assert (
        refusal(tmp_path, "#" * 5_000_000) == "the YAML has more than 4,194,304 characters. Is it a configuration file?"
    )


@pytest.mark.parametrize(
    "number",
    [
        "9" * 5000,
        "-" + "9" * 5000,
        "0x" + "f" * 5000,
        "0b" + "1" * 20_000,
        "59:" * 3000 + "59",
        f"!!int '{'9' * 5000}'",
    ],
)
def test_a_number_of_too_many_digits_is_one_message(tmp_path, number):
    assert refusal(tmp_path, f"dpo: {{val_period: {number}}}") == (
        "the YAML has a number of more than 1,000 digits. Is it a configuration file?"
    )


def test_a_text_of_many_digits_is_a_text(tmp_path):
    check_yaml(f"run: {{name: '{'9' * 5000}', dir: {'9' * 1000}x}}")


def test_files_that_name_each_other_many_times_are_read_once(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "40.yaml").write_text("run: {name: last}\n")
    assert load_config(str(tmp_path / "0.yaml"), []).config.run.name == "last"


def test_a_long_chain_of_defaults_is_refused(tmp_path):
    for number in range(2000):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: {number + 1}.yaml\n")
    with pytest.raises(ConfigError) as refused:
        load_config(str(tmp_path / "0.yaml"), [])
    assert str(refused.value) == f"{tmp_path}/0.yaml: `defaults:` form a chain of more than 64 files. Shorten it."


def test_a_deeply_nested_override_ends_in_one_message():
    with pytest.raises(ConfigError, match=r"^override 'run.name=\[\[\["):
        load_config(None, ["run.name=" + "[" * 3000 + "]" * 3000])


def test_ordinary_references_are_accepted():
    check_yaml("a: &a {lr: 1}\nb: {<<: *a, c: *a}\nd: [*a, *a]\n")
    check_yaml("[" * 64 + "]" * 64)
    with pytest.raises(YamlLimitError):
        check_yaml("[" * 65 + "]" * 65)


def test_the_front_matter_of_a_dataset_has_the_same_limits():
    with pytest.raises(DataError) as refused:
        choose_files("some/set", ["a.jsonl"], f"---\n{bomb()}\n---\n", subset=None, split=None)
    assert str(refused.value).startswith(
        "some/set: the front matter of README.md: the YAML has more than 100,000 values once its references (*name) are expanded"
    )


@pytest.mark.parametrize("name", ["a\\0b", "\\ud800", "circle", "pipe", "."])
def test_defaults_that_cannot_be_files_are_refused_without_reading_them(tmp_path, name):
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    message = refusal(tmp_path, f'defaults: "{name}"')
    assert message.endswith(
        f": not a configuration file, listed in `defaults:` of {tmp_path}/run.yaml. Correct the path."
    )


@pytest.mark.parametrize("text", ["text", "2026-11-17", "1", json.dumps(bomb()), json.dumps("[" * 30_000), "!!str {a"])
def test_a_file_that_is_a_single_scalar_is_refused(tmp_path, text):
    message = refusal(tmp_path, text)
    assert message == "a configuration must be a mapping of sections, not a str." or "not readable as YAML" in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "null", "---\n"])
def test_an_empty_file_is_an_empty_configuration(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(str(tmp_path / "run.yaml"), []).origins == {}
