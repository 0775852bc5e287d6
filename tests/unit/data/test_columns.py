"""Weights and margins of rows: read if a key names them, stored, refused with a reason, reported if not used."""

import json
import math
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from letters import letter_tokenizer
from rich.console import Console
from running import SHORT, metrics_of, short_run

from tandem.cli import main as cli
from tandem.columns import COLUMNS
from tandem.config.load import load_config
from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store.duplicates import without_duplicates
from tandem.data.store.opening import open_store
from tandem.data.store.selection import Selection
from tandem.data.store.tokens_file import TokensFile
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError
from tandem.inspect import as_json, inspect_data, show
from tandem.packing.layout import join, lay_out
from tandem.packing.nemo_files import check_for_nemo
from tandem.report.choices import describe_choices
from tandem.training.start.setup import set_up

RAW = Template(letter_tokenizer(), None, {})
LENIENT = Data(on_bad_row="skip", max_bad_share=1.0)
BOTH = DatasetFields(weight_key="importance", margin_key="gap")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    return tmp_path / "pairs.jsonl"


def row(prompt="hi", **values) -> dict:
    return {"prompt": prompt, "chosen": "yes", "rejected": "no", **values}


def write(source, *rows) -> None:
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def opened(source, keys=BOTH, data=LENIENT):
    return open_store(str(source), keys, RAW, data, 100)


def columns_of(store) -> dict[str, list]:
    return {name: [preference.values(name) for preference in store] for name in ("weight", "margin")}


# Reading


def test_values_are_stored_as_float32_and_read_back(source):
    write(source, row(importance=0.1, gap=-2), row("what", importance=0, gap=1.5))
    store = opened(source)
    assert store.columns == ("weight", "margin")
    assert columns_of(store) == {"weight": [(float(np.float32(0.1)),), (0.0,)], "margin": [(-2.0,), (1.5,)]}
    assert all(math.isnan(score) for preference in store for score in preference.scores)


def test_without_a_key_a_field_is_not_read_and_the_defaults_apply(source):
    write(source, row(weight=0.5, margin=3))
    store = opened(source, DatasetFields())
    assert store.columns == ()
    assert columns_of(store) == {"weight": [(1.0,)], "margin": [(0.0,)]}
    assert store.notes == {
        "rows with a field weight, which is not used, since weight_key is not set": 1,
        "rows with a field margin, which is not used, since margin_key is not set": 1,
    }


def test_a_field_that_another_key_names_is_used(source):
    write(source, row(weight=0.5))
    store = opened(source, DatasetFields(margin_key="weight"))
    assert columns_of(store) == {"weight": [(1.0,)], "margin": [(0.5,)]}
    assert store.notes == {}


def test_a_csv_file_holds_values_as_texts(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,chosen,rejected,importance,gap\nhi,yes,no,0.25, 1e1 \n", encoding="utf-8")
    assert columns_of(opened(file)) == {"weight": [(0.25,)], "margin": [(10.0,)]}


EMPTY = "importance is empty, but data.train.weight_key is set, so every row needs a weight."


@pytest.mark.parametrize(
    ("values", "reason", "message"),
    [
        (
            {"gap": 1},
            "bad weight",
            "no key importance, which is set by data.train.weight_key. Keys found: prompt, chosen, rejected, gap.",
        ),
        ({"importance": None, "gap": 1}, "bad weight", EMPTY),
        ({"importance": " ", "gap": 1}, "bad weight", EMPTY),
        ({"importance": "high", "gap": 1}, "bad weight", "importance: 'high' is not a finite number."),
        (
            {"importance": "0,5", "gap": 1},
            "bad weight",
            "importance: '0,5' is not a finite number. Write it with a decimal point: 0.5.",
        ),
        ({"importance": True, "gap": 1}, "bad weight", "importance: True is not a finite number."),
        ({"importance": [1], "gap": 1}, "bad weight", "importance: [1] is not a finite number."),
        ({"importance": "nan", "gap": 1}, "bad weight", "importance: nan is not a finite number."),
        ({"importance": -0.5, "gap": 1}, "bad weight", "importance: -0.5 is below 0, the smallest weight allowed."),
        ({"importance": 1, "gap": "inf"}, "bad margin", "gap: inf is not a finite number."),
        (
            {"importance": 1, "gap": 1e39},
            "bad margin",
            "gap: 1e+39 is too large. Margins are stored as float32, up to 3.4e+38.",
        ),
    ],
)
def test_a_missing_or_bad_value_is_a_malformed_row(source, values, reason, message):
    write(source, row(importance=1, gap=1), row("what", **values))
    store = opened(source)
    assert store.counts.bad == {reason: 1}
    assert store.examples == [{"place": f"{source}:2", "kind": "bad", "reason": reason, "message": message}]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_file_with_a_weight_that_no_row_may_have_is_refused(source, value):
    write(source, row(importance=1, gap=1))
    file = opened(source).folder / "tokens.arrow"
    with pa.OSFile(str(file)) as opened_file:
        batch = pa.ipc.open_file(opened_file).get_batch(0)
    changed = batch.set_column(batch.schema.get_field_index("weight"), "weight", pa.array([value], pa.float32()))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, changed.schema) as writer:
        writer.write_batch(changed)
    with pytest.raises(ValueError, match=r"batch 0: column weight has missing or invalid values$"):
        TokensFile(file)


# Fingerprints


def test_the_store_depends_on_the_keys_and_the_tokens_do_not(source):
    write(source, row(importance=2, gap=1), row("what", importance=0.5, gap=0))
    plain, weighted, both = (
        opened(source, keys) for keys in (DatasetFields(), DatasetFields(weight_key="importance"), BOTH)
    )
    assert len({plain.fingerprint, weighted.fingerprint, both.fingerprint}) == 3
    assert {store.tokens_fingerprint for store in (plain, weighted, both)} == {plain.fingerprint}
    chosen = [Selection({"train": store}, np.array([1])) for store in (plain, both)]
    assert chosen[0].tokens_fingerprint == chosen[1].tokens_fingerprint == chosen[0].fingerprint
    assert chosen[0].fingerprint != chosen[1].fingerprint
    assert chosen[1].columns == ("weight", "margin")


def test_rows_left_out_for_a_bad_value_make_other_tokens(source):
    write(source, row(importance=2, gap=1), row("what", gap=0))
    plain, weighted = opened(source, DatasetFields()), opened(source)
    assert (len(plain), len(weighted)) == (2, 1)
    assert weighted.tokens_fingerprint == weighted.fingerprint != plain.fingerprint


def test_without_duplicates_the_tokens_still_have_one_fingerprint(source):
    write(source, row(importance=2, gap=1), row(importance=3, gap=1), row("what", importance=1, gap=0))
    drop = Data(duplicates="drop")
    plain, weighted = (
        without_duplicates({"train": opened(source, keys)}, drop)["train"] for keys in (DatasetFields(), BOTH)
    )
    assert columns_of(weighted)["weight"] == [(2.0,), (1.0,)]
    assert weighted.tokens_fingerprint == plain.fingerprint != weighted.fingerprint


def test_the_reference_is_not_computed_again_for_weights(source, tmp_path):
    write(source, row("one", importance=2, gap=1), row("two", importance=0.5, gap=0))
    data = [f"data.train.data_path={source}", "policy.train_global_batch_size=2", "dpo.max_num_steps=1"]
    plain = metrics_of(short_run(tmp_path / "plain", *data))
    weighted = metrics_of(short_run(tmp_path / "weighted", *data, "data.train.weight_key=importance"))
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 1
    # Policy and reference are equal: log 2 for each pair, whose weights have a mean of 1.25.
    assert [plain[0]["loss"], weighted[0]["loss"]] == pytest.approx([math.log(2), 1.25 * math.log(2)])


# Packs


def test_packs_have_the_columns_that_some_preference_gives_and_defaults_elsewhere(source, tmp_path):
    write(source, row(importance=2, gap=1), row("what", importance=0.5, gap=0))
    other = tmp_path / "plain.jsonl"
    write(other, row("so"))
    weighted, plain = opened(source, DatasetFields(weight_key="importance")), opened(other, DatasetFields())
    one = lay_out([0, 1], [weighted[0], plain[0]], length=64)
    assert {name: values.tolist() for name, values in one.columns.items() if name != "score"} == {"weight": [2.0, 1.0]}
    without = lay_out([0], [plain[0]], length=64)
    assert list(without.columns) == ["score"]
    filler = lay_out([], [], length=64)
    joined = join([without, filler, lay_out([1], [weighted[1]], length=64)])
    assert joined.columns["weight"].tolist() == [1.0, 0.5]
    assert len(joined.columns["score"]) == 4
    assert all(values.dtype == COLUMNS[name].dtype for name, values in joined.columns.items())


def test_nemo_packs_cannot_store_them(source):
    write(source, row(importance=2, gap=1))
    with pytest.raises(ConfigError) as caught:
        check_for_nemo(opened(source), 64)
    assert str(caught.value) == (
        "--to-nemo: the preferences have a weight and a margin, which NeMo Aligner's packs cannot store. Leave out "
        "--to-nemo, or the data set's weight_key and margin_key."
    )


# Configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train.weight_key=w", "dpo.preference_loss=aot"],
            "data.train.weight_key = w is not supported by dpo.preference_loss aot, which is computed over a batch, not "
            "per pair. Leave it out, or use a loss that is computed per pair",
        ),
        (
            [
                "data.val_data_paths={other: {data_path: a.jsonl, margin_key: m}}",
                "dpo.preference_loss={dpo: 1, ipo: 1}",
            ],
            "data.val_data_paths.other.margin_key = m is not supported by dpo.preference_loss ipo. Leave it out, or use "
            "dpo, sigmoid or sigmoid_norm",
        ),
        (
            ["data.train=[{data_path: a.jsonl},{data_path: b.jsonl,margin_key: m}]", "dpo.preference_loss=hinge"],
            "data.train[1].margin_key = m is not supported by dpo.preference_loss hinge. Leave it out, or use dpo, sigmoid "
            "or sigmoid_norm",
        ),
        (
            ["data.train.weight_key=prompt"],
            "prompt_key and weight_key are both 'prompt', but must name different fields",
        ),
    ],
)
def test_keys_that_have_no_effect_are_refused_with_the_configuration(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def setup_of(*overrides):
    return set_up(
        load_config(None, [*SHORT, "policy.train_global_batch_size=1", *overrides]).config, torch.device("cpu")
    )


def test_a_prepared_folder_carries_the_columns(source, tmp_path, monkeypatch, capsys):
    write(source, row(importance=2, gap=1), row("what", importance=0.5, gap=0))
    keys = ["data.train.weight_key=importance", "data.train.margin_key=gap"]
    folder = tmp_path / "out"
    arguments = [*SHORT, "policy.train_global_batch_size=1", f"data.train.data_path={source}", *keys]
    monkeypatch.setattr(sys, "argv", ["tandem", "prepare", *arguments, "--output-dir", str(folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr()
    setup = setup_of(f"data.train.data_path={folder}/train")
    assert columns_of(setup.plan.train.store) == {"weight": [(2.0,), (0.5,)], "margin": [(1.0,), (0.0,)]}
    assert dict(describe_choices(setup))["columns"] == "weight, margin of train"
    with pytest.raises(DataError) as caught:
        setup_of(f"data.train.data_path={folder}/train", "data.train.weight_key=importance")
    assert str(caught.value) == (
        f"{folder}/train: already prepared, so weight_key = importance has no effect. Leave it out."
    )
    with pytest.raises(DataError) as caught:
        setup_of(f"data.train.data_path={folder}/train", "dpo.preference_loss=ipo")
    assert str(caught.value) == (
        f"train: {folder}/train was prepared with a margin, which is not supported by dpo.preference_loss ipo. Prepare it again "
        "without margin_key, or choose dpo, sigmoid or sigmoid_norm."
    )


# Mentioned


def test_the_choices_mention_fields_that_are_not_used(source, tmp_path):
    held = tmp_path / "held.jsonl"
    write(source, row(weight=2), row("what", weight=1))
    write(held, row("so", margin=1))
    choices = dict(describe_choices(setup_of(f"data.train.data_path={source}", f"data.validation={held}")))
    assert "columns" not in choices
    assert choices["columns not used"] == (
        "weight of train (data.train.weight_key=weight uses it); margin of validation-default "
        "(data.validation.margin_key=margin uses it)"
    )


def test_the_choices_do_not_recommend_a_setting_that_the_loss_would_refuse(source):
    write(source, row(margin=2), row("what", margin=1))
    choices = dict(describe_choices(setup_of(f"data.train.data_path={source}", "dpo.preference_loss=ipo")))
    assert choices["columns not used"] == "margin of train (not supported by ipo)"


def shown(found) -> str:
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    show(found, console, positions=False)
    return console.export_text()


def test_inspect_shows_the_values_and_the_fields_that_are_not_used(source):
    write(source, row(importance=2, margin=1.5, chosen_reward=3, rejected_reward=-1))
    config = load_config(None, ["data.train.weight_key=importance"]).config
    found = inspect_data(str(source), config, None)
    assert json.loads(as_json(found))["columns"] == {"score": [3.0, -1.0], "weight": [2.0]}
    text = shown(found)
    assert "\nThe field margin is not used. To use it, set data.train.margin_key=margin.\n" in text
    assert "\nweight 2\n" in text
    assert "preferred to completion 1, score 3\n" in text
    assert "scored, score -1\n" in text
