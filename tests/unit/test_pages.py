"""The pages: links that lead somewhere, a README that stays short, and a file tree of files that exist."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import typer

from tandem import formats
from tandem.cli.main import app
from tandem.config.keys import key_names
from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, detect_format
from tandem.data.read.sources import SourceRow
from tandem.loss.declare import INPUT_SETTINGS, LOSSES
from tandem.report.verdicts import RULES

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("benchmarks/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: lower case, spaces as hyphens, no punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_in_the_docs_points_to_a_file_and_a_heading(name):
    page = REPOSITORY / name
    broken = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_navigation_of_the_site_lists_every_page_once():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inside = entry.values() if isinstance(entry, dict) else entry
        return [page for one in inside for page in pages(one)]

    site = tomllib.loads((REPOSITORY / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(pages(site["nav"])) == PAGES


def test_the_readme_is_at_most_120_lines():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md"])  # it names files as they were
def test_every_source_file_that_a_page_names_exists(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)\b", text))
    roots = (REPOSITORY, REPOSITORY / "src/tandem")
    missing = [path for path in named if "NAME" not in path and not any((root / path).exists() for root in roots)]
    assert missing == []


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/")])
def test_a_page_has_at_most_1200_words(name):
    """Of prose: code, output and tables are looked at, not read from start to end."""
    text = re.sub(r"^```.*?^```", "", (REPOSITORY / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    assert sum(bool(re.search(r"\w", word)) for word in prose.split()) <= 1200


def test_the_file_tree_names_files_that_exist():
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    tree = text.split("src/tandem/\n")[1].split("```")[0]
    tree = tree[: tree.index("tests/ unit")]
    missing, folders = [], []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if depth <= 2:  # a deeper line continues the description above it
            entry = line.split()[0]
            folders = [*folders[: depth - 1], entry] if entry.endswith("/") else folders[: depth - 1]
        source = REPOSITORY / "src/tandem" / "".join(folders)
        missing += [entry for entry in re.findall(r"[\w/]+\.py", line) if not (source / entry).exists()]
        missing += [] if source.is_dir() else [str(source)]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/quickstart.md"])
def test_the_install_text_names_a_virtual_environment_and_the_size_of_torch(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert "python -m venv .venv && source .venv/bin/activate" in text
    assert "several GB" in text


def test_the_page_on_keys_says_at_which_rate_a_schedule_starts():
    text = (REPOSITORY / "docs/keys.md").read_text(encoding="utf-8")
    assert (
        "With a warm-up, the first step has a learning rate of 0: it is measured, but does not change the weights"
        in text
    )


@pytest.mark.parametrize(
    "message", ["prompt is empty.", "prompt[0]: the user turn is empty.", "a completion is empty."]
)
def test_the_page_on_cleaning_has_the_messages_on_empty_texts(message):
    assert f"`{message}`" in (REPOSITORY / "docs/data-cleaning.md").read_text(encoding="utf-8")


def test_anchors_follow_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One H200: training steps\n```\n# not a heading\n```\n## Rows: `policy.packing.pack_length`\n")
    assert anchors(page) == {"one-h200-training-steps", "rows-policypackingpack_length"}


def verdict_names() -> set[str]:
    """Those with a rule, and those that are written where they are given."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "src/tandem").rglob("*.py"))
    return {*RULES, *re.findall(r'Verdict\(\s*"(\w+)"', sources)}


def rows_of_verdicts(page: str, heading: str) -> list[str]:
    section = (REPOSITORY / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/choosing.md", "What to do after the verdict"), ("docs/metrics.md", "Verdicts")]
)
def test_a_table_of_verdicts_has_a_row_for_each(page, heading):
    rows = rows_of_verdicts(page, heading)
    assert sorted(rows) == sorted(verdict_names())


def test_every_loss_and_key_of_the_page_on_choosing_exists():
    text = (REPOSITORY / "docs/choosing.md").read_text(encoding="utf-8")
    code = re.findall(r"`([^`\n]+)`", text)
    names = {name for name in code if re.fullmatch(r"[a-z_]+", name)}
    assert names - verdict_names() - set(LOSSES) == set()
    keys = {key for part in code for key in re.findall(r"(?<![\w/.])((?:dpo|policy|data|logger)\.[\w.]+)", part)}
    assert keys - key_names() == set()
    assert len(keys) > 10


@pytest.mark.parametrize("page", ["docs/data.md", "docs/tutorial.md"])
def test_a_table_of_formats_has_a_row_for_each(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    table = re.search(r"^\| format \|.*?\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert table is not None
    assert set(re.findall(r"^\| `(\w+)` \|", table[0], flags=re.MULTILINE)) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_row_of_a_format_in_the_table_is_read_as_that_format(name):
    text = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
    (example,) = re.findall(rf"^\| `{name}` \| (?:`(\{{.*?\}})`|as `implicit_prompt`) \|", text, flags=re.MULTILINE)
    if name == "Tulu3Preference":
        return
    found = formats.read(json.loads(example))
    assert detect_format(SourceRow(json.loads(example), "row", 1), DatasetFields())[0] == name
    best = [one.answer for one in found.completions if one.rank == min(other.rank for other in found.completions)]
    assert best == ["Yes."]


def test_the_page_on_commands_has_every_command_and_option():
    text = (REPOSITORY / "docs/commands.md").read_text(encoding="utf-8")
    commands = typer.main.get_group(app).commands
    assert sorted(re.findall(r"^\| `tandem ([\w-]+)", text, flags=re.MULTILINE)) == sorted(commands)
    options = {
        (command, max(option.opts, key=len))
        for command, known in commands.items()
        for one in (known, *getattr(known, "commands", {}).values())  # tandem launch has commands of its own
        for option in one.params
        if option.param_type_name == "option" and option.opts != ["--help"]
    }
    shown = {
        (command, option)
        for options, of in re.findall(r"^\| (`-[^|]*) \| ([\w, -]+) \|", text, flags=re.MULTILINE)
        for option in re.findall(r"`(--[\w-]+)", options)
        for command in of.split(", ")
    }
    assert shown - {("tandem", "--version"), ("all", "--help")} == options


@pytest.mark.parametrize("setting", INPUT_SETTINGS)
def test_the_page_on_settings_for_losses_names_those_that_refuse_one(setting):
    text = (REPOSITORY / "docs/loss-settings.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| `dpo\.{setting}` \| [^|]* \| not ([^|]*) \|$", text, flags=re.MULTILINE)
    refusing = {name for name, declared in LOSSES.items() if setting not in declared.input_settings}
    assert set(re.findall(r"`(\w+)`", cell)) == refusing
