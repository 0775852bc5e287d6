"""The list of all keys, and its table in docs/keys.md."""

import re
from pathlib import Path

import pytest

from tandem import errors
from tandem.config.keys import Key, all_keys, as_markdown, key_names, main, with_table
from tandem.config.schema import Config
from tandem.config.sections.scheduler import NAMED

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "keys.md").read_text(encoding="utf-8")


def between(start: str, end: str) -> str:
    return PAGE.split(start, 1)[1].split(end, 1)[0]


def test_the_docs_show_the_schema_exactly():
    assert between("<!-- keys:begin -->\n", "\n<!-- keys:end -->") == as_markdown()


def test_write_replaces_the_table_of_the_page_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs/keys.md"
    page.parent.mkdir()
    page.write_text(with_table(PAGE, "keys", "| an old table |"), encoding="utf-8")
    main(["--write"])
    assert page.read_text(encoding="utf-8") == PAGE


def test_write_outside_a_checkout_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        main(["--write"])
    assert refused.value.code == "docs/keys.md: no such file. Run this command in the root of a checkout."


def test_a_page_without_the_markers_of_a_table_is_refused():
    with pytest.raises(ValueError) as refused:
        with_table("# Keys\n", "keys", "| a table |")
    markers = "<!-- keys:begin --> and <!-- keys:end -->"
    assert str(refused.value) == f"the page needs the markers {markers}, once each and in this order"


def test_the_docs_list_the_exit_codes_of_all_errors():
    section = (DOCS / "commands.md").read_text(encoding="utf-8").split("\n## Exit codes\n", 1)[1]
    rows = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    shown = {int(code): set(re.findall(r"`(\w+)`", names)) for code, names in rows}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TandemError)]
    codes = {}
    for error in classes:
        codes.setdefault(error.exit_code, set()).add(error.__name__)
    assert shown == {0: set(), 130: set(), **codes}


def test_a_key_has_a_type_a_json_default_and_a_meaning():
    keys = {key.name: key for key in all_keys()}
    assert keys["run.seed"] == Key("run.seed", "int", "42", "seed of all random numbers")
    assert keys["dpo.max_num_steps"].type == "int or null"
    assert keys["policy.packing.pack_length"].type == "int or auto"
    assert keys["policy.packing.mode"].type == "batch, dataset, none"
    assert keys["data.val_data_paths"].type == "map to dataset"
    assert keys["policy.optimizer.kwargs.betas"].default == "[0.9, 0.98]"


def test_defaults_that_follow_another_key_are_marked():
    assert [key.name for key in all_keys() if key.default == "(depends)"] == [
        "dpo.sft_average_log_probs",
        "policy.packing.share_prompts",
    ]


def test_every_key_has_a_meaning():
    assert [key.name for key in all_keys() if not key.meaning] == []


def test_key_names_include_sections():
    assert {"policy", "policy.optimizer", "policy.optimizer.kwargs", "policy.optimizer.kwargs.lr"} <= key_names()
    assert "lr" not in key_names()


def test_the_list_of_keys_covers_the_schema():
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            inside = isinstance(value, dict) and value and f"{prefix}{key}" in sections
            yield from leaves(value, f"{prefix}{key}.") if inside else [prefix + key]

    # data.train is a dataset or a list of datasets: it has a row, and is a section.
    named = {key.name for key in all_keys()} - {"data.train"}
    sections = key_names() - named
    assert set(leaves(Config().model_dump())) == named


def test_the_docs_list_every_schedule_with_its_settings_and_defaults():
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", PAGE.split("\n## Schedules\n")[1], re.MULTILINE)
    expected = {
        name: ", ".join(
            f"`{key}` {field.default:g}" for key, field in schedule.model_fields.items() if not field.is_required()
        )
        for name, schedule in NAMED.items()
    }
    assert dict(rows) == expected
