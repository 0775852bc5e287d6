"""The licence of a base model, as its folder states it."""

import pytest

from tandem.exporting.licence import Licence, licence_of


def readme(folder, matter):
    (folder / "README.md").write_text(f"---\n{matter}\n---\n# A model\n", encoding="utf-8")
    return licence_of(folder)


def test_the_front_matter_of_the_readme_decides(tmp_path):
    (tmp_path / "LICENSE").write_text("MIT License\n")
    assert readme(tmp_path, "license: Apache-2.0\ntags: [a]") == Licence("apache-2.0")
    assert readme(tmp_path, "license: [mit]") == Licence("mit")


def test_a_licence_of_its_own_keeps_its_name_and_link(tmp_path):
    found = readme(tmp_path, "license: other\nlicense_name: gemma\nlicense_link: https://ai.google.dev/gemma/terms")
    assert found.name == "gemma"
    assert found.front_matter() == {
        "license": "other",
        "license_name": "gemma",
        "license_link": "https://ai.google.dev/gemma/terms",
    }


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        (
            "                                 Apache License\n                           Version 2.0, January 2004",
            "apache-2.0",
        ),
        ("MIT License\n\nCopyright (c) 2026", "mit"),
    ],
)
def test_a_well_known_licence_text_is_recognised(tmp_path, text, identifier):
    (tmp_path / "LICENSE").write_text(text)
    assert licence_of(tmp_path) == Licence(identifier)


def test_an_unknown_text_is_another_licence(tmp_path):
    (tmp_path / "LICENSE.txt").write_text("You may look at it.")
    assert licence_of(tmp_path) == Licence("other", "see LICENSE.txt of the base model")


@pytest.mark.parametrize(
    "matter",
    [
        "license: {a: b}",
        "license: |\n  two\n  lines",
        "license: <script>",
        "license: &a [*a]",
        "license: [",
        "- a list",
        "license: !!python/object/apply:os.system [true]",
        "a: &a [x,x]\nb: &b [*a,*a]",
    ],
)
def test_front_matter_that_states_no_licence_is_ignored(tmp_path, matter):
    assert readme(tmp_path, matter) == Licence()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "private.md").write_text("---\nlicense: mit\n---\n")
    (model / "README.md").symlink_to(tmp_path / "private.md")
    assert licence_of(model) == Licence()
