"""Shortcuts have the result of the general way: libyaml, no OmegaConf where nothing is interpolated, fewer distances of names."""

from importlib import resources

import pytest
import yaml

from tandem.config import load
from tandem.config.compat.suggest import closest, edits, other_names
from tandem.config.keys import key_names
from tandem.config.load import load_config
from tandem.config.source import yaml_text
from tandem.config.source.yaml_text import load_own_yaml
from tandem.errors import ConfigError
from tandem.terminal.printable import escaped

NESTED = {"a": 1}
for _ in range(20):
    NESTED = {"a": NESTED}


def files_of_the_package():
    tables = resources.files("tandem.config.compat")
    yield resources.files("tandem.embedded").joinpath("default.yaml")
    yield tables.joinpath("other_names.yaml")
    yield from (one for one in tables.joinpath("tables").iterdir() if one.name.endswith(".yaml"))


@pytest.mark.parametrize("file", list(files_of_the_package()), ids=lambda file: file.name)
def test_libyaml_reads_the_files_of_the_package_as_pyyaml_does(file):
    text = file.read_text(encoding="utf-8")
    assert load_own_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dpo.preference_loss={aot: 1.0, dpo: 0.5}", "data.train=[a.jsonl, {data_path: b.jsonl, weight: 2}]"],
        ["policy.optimizer.kwargs.lr=1e-3", "policy.scheduler=null", "dpo.max_num_steps=7"],
        {"policy": {"tokenizer": {"chat_template_kwargs": {"a": [1, 2.5, None, True, "中文"]}}}},
        {"data.train": ("a.jsonl", "b.jsonl")},
    ],
)
def test_a_configuration_without_interpolations_is_the_same_without_omegaconf(overrides, monkeypatch):
    short = load_config(None, overrides)
    monkeypatch.setattr(load, "_is_plain", lambda _: False)
    assert load_config(None, overrides) == short
    assert yaml.safe_load(short.as_yaml()) == short.as_tree()


@pytest.mark.parametrize(
    "value",
    ["${run.seed}", {"a": ["${run.seed}"]}, {1: 2}, (1, 2), b"a", NESTED],
    ids=["text", "list", "key", "tuple", "bytes", "deep"],
)
def test_other_values_are_left_to_omegaconf(value):
    assert not load._is_plain({"run": value})


def test_omegaconf_still_refuses_what_it_refused():
    with pytest.raises(ConfigError, match=r"^configuration: "):
        load_config(None, {"policy.optimizer.kwargs": {"lr": {1, 2}}})


@pytest.mark.parametrize("change", [lambda name: name, lambda name: name[1:], lambda name: f"{name[1::-1]}{name[2:]}x"])
def test_the_closest_name_is_that_of_all_distances(change):
    known = sorted({name.rpartition(".")[2] for name in key_names()} | set(other_names()))
    for name in map(change, known[::25]):
        most = 2 if len(name) >= 8 else 1
        near = min((edits(name, other), other) for other in known)
        assert closest(name, known) == (near[1] if near[0] <= most and len(name) <= 80 else None)


TEXTS = ["plain text", "1e3", "null", "two\nlines", "\x1b[1m\u202e", "中文", "a 🙂 face", "- x: 'y'", "é " * 60]


@pytest.mark.parametrize("text", TEXTS)
def test_libyaml_writes_text_as_pyyaml_does(text):
    tree = {"a": [text, {text[:9]: 1.5}], "b": {"c": text}, "d": [True, None, 7, 1e-05]}
    written = yaml_text.to_yaml(tree)
    assert written == escaped(yaml_text._dumped(tree, yaml_text._Dumper))
    assert yaml.safe_load(written) == tree
