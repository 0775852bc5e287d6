"""The pages: links that lead somewhere, a README that stays short, and a file tree of files that exist."""

import re
from pathlib import Path

import pytest

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


def test_the_readme_is_at_most_120_lines():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


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


def test_anchors_follow_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One H200: training steps\n```\n# not a heading\n```\n## Rows: `policy.packing.pack_length`\n")
    assert anchors(page) == {"one-h200-training-steps", "rows-policypackingpack_length"}
