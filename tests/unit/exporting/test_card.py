"""The model card: what it shows, and what it never shows."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from models import MODEL
from transformers import AutoConfig

from tandem.config.load import load_config
from tandem.exporting.card import CardFacts, DataSet, described_pairs, model_card, recorded_sets, shown_model
from tandem.model.files.source import find_source
from tandem.training.validation import ValidationReport

METRICS = {"loss": 0.5, "accuracy": 0.75, "rewards_margin_mean": 1.0}


def facts(*overrides: str, model: str = str(MODEL), **changes) -> CardFacts:
    loaded = load_config(None, [f"policy.model_name={model}", *overrides])
    return CardFacts(
        **{
            "loaded": loaded,
            "source": find_source("policy.model_name", str(MODEL), None),
            "step": 4,
            "dtype": "bfloat16",
            "is_adapter": False,
            "data": [DataSet("train", "pairs.jsonl", 1200, "0123456789ab")],
            "records": [
                {"step": 0, "split": "validation-default", "data": "d", "num_pairs": 8, **METRICS, "loss": 0.6931},
                {"step": 4, "split": "train", **METRICS, "loss": 0.4},
                {"step": 4, "split": "validation-default", "data": "d", "num_pairs": 8, **METRICS},
                {"step": 5, "split": "validation-default", "data": "d", "num_pairs": 8, **METRICS, "loss": 9.0},
            ],
            "exported": [ValidationReport("validation-default", {**METRICS, "loss": 0.51}, 8, "d")],
        }
        | changes
    )


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_hub_model_and_hub_data_are_named_in_the_front_matter():
    card = model_card(
        facts(
            "data.train.data_path=org/pairs", "policy.revision=abc", model="org/base", is_adapter=True, dtype="float32"
        )
    )
    assert front_matter(card) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "datasets": ["org/pairs"],
        "tags": ["tandem", "preference-training", "dpo", "lora"],
    }
    assert (
        "| base model | org/base |\n| revision | abc |\n| licence of the base model | not stated in its folder |"
        in card
    )


def test_local_paths_are_not_shown(tmp_path):
    pairs = tmp_path / "secret-customer" / "pairs.jsonl"
    card = model_card(facts(f"data.train.data_path={pairs}"))
    assert "secret-customer" not in card
    assert str(MODEL.parent) not in card
    assert "base_model" not in front_matter(card)
    assert "datasets" not in front_matter(card)
    assert f"| base model | {MODEL.name} |" in card


def test_values_from_the_environment_are_not_shown(monkeypatch):
    monkeypatch.setenv("MY_MODEL", str(MODEL))
    monkeypatch.setenv("MY_DATA", "/mnt/private/of-customer.jsonl")
    given = facts("data.train.data_path=${oc.env:MY_DATA}", model="${oc.env:MY_MODEL}")
    sets = recorded_sets(given.loaded, {"training data": "ab" * 16}, given.records, {})
    assert sets[0] == DataSet("train", "named in the environment", None, "abababababab")
    card = model_card(facts("data.train.data_path=${oc.env:MY_DATA}", model="${oc.env:MY_MODEL}", data=sets))
    assert "customer" not in card
    assert MODEL.name not in card
    assert "a model named in the environment" in card
    assert "| train | named in the environment |  | abababababab |" in card


def test_the_number_of_training_pairs_is_that_of_the_run_where_it_is_stored(tmp_path):
    assert described_pairs(None) == described_pairs(tmp_path) == {}
    for content in (
        "{",
        "[]",
        '{"sets": 3}',
        '{"sets": [{"name": "train"}]}',
        '{"sets": [{"name": [], "num_pairs": 1}]}',
    ):
        (tmp_path / "setup.json").write_text(content)
        assert described_pairs(tmp_path) == {}
    (tmp_path / "setup.json").write_text('{"sets": [{"name": "train", "num_pairs": 1200}]}')
    given = facts("data.train.data_path=pairs.jsonl")
    sets = recorded_sets(given.loaded, {"training data": "ab" * 16}, given.records, described_pairs(tmp_path))
    assert sets[0] == DataSet("train", "pairs.jsonl", 1200, "abababababab")


def test_metrics_are_those_of_the_exported_step():
    card = model_card(facts())
    assert "| set | metric | before (train: step 1) | step 4 | exported (bfloat16) |" in card
    assert "| validation-default | loss | 0.6931 | 0.5000 | 0.5100 |" in card
    assert "| train | loss |  | 0.4000 |  |" in card
    assert "9.0000" not in card
    assert "| train | pairs.jsonl | 1,200 | 0123456789ab |" in card


def test_a_card_without_measurements_says_why():
    card = model_card(facts(exported=(), not_measured="the run has no validation set."))
    assert "\nThe exported weights were not measured: the run has no validation set.\n" in card


def test_the_settings_include_those_of_the_loss_and_of_adapters():
    card = model_card(facts("policy.lora.enabled=true", "policy.lora.dim=4", "dpo.wpo=true"))
    assert "| `policy.optimizer.kwargs.lr` | 1e-06 |" in card or "| `policy.optimizer.kwargs.lr` |" in card
    assert "| `policy.lora.dim` | 4 |" in card
    assert "| `dpo.wpo` | true |" in card


def test_names_cannot_break_out_of_the_table():
    hostile = "a|b <script>alert(1)</script>\x1b[31m\nnew"
    card = model_card(facts(data=[DataSet("train", hostile, 1, "ab")]))
    assert "| train | a\\|b &lt;script>alert(1)&lt;/script>\\x1b[31m new | 1 | ab |" in card


def test_the_licence_of_the_base_model_is_that_of_its_folder(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    given = facts()
    source = type(given.source)(name="x", folder=tmp_path, config=given.source.config)
    card = model_card(facts(source=source))
    assert front_matter(card)["license"] == "apache-2.0"
    assert "| licence of the base model | apache-2.0 |" in card


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/model", "org/model"),
        ("embedded", "tandem's embedded tiny model"),
        ("/data/private/base", "base"),
        ("./mine", "mine"),
    ],
)
def test_a_model_is_shown_by_its_name(name, shown):
    assert shown_model(name) == shown


def test_a_model_in_the_hubs_cache_shows_its_commit(tmp_path):
    given = facts()
    folder = tmp_path / "models--org--base/snapshots/0a1b"
    source = type(given.source)(name="org/base", folder=Path(folder), config=given.source.config)
    assert "| revision | 0a1b |" in model_card(facts(source=source, model="org/base"))


def test_the_card_of_a_multimodal_checkpoint_loads_all_of_it():
    source = replace(facts().source, config=AutoConfig.for_model("gemma3"))
    card = model_card(facts(source=source))
    assert front_matter(card)["pipeline_tag"] == "image-text-to-text"
    assert 'model = AutoModelForImageTextToText.from_pretrained("FOLDER_OR_REPO")\n' in card
    assert "Only the text model was trained. All other weights are those of the base model." in card
    adapter = model_card(facts(source=source, is_adapter=True))
    assert 'base = AutoModelForImageTextToText.from_pretrained("BASE_MODEL")\n' in adapter
    assert 'model = PeftModel.from_pretrained(base, "FOLDER_OR_REPO")\n' in adapter
