"""Which files of a dataset repository belong to a split, from its README.md or from file names."""

import pytest
import yaml

from tandem.data.read.hub import choose_files
from tandem.errors import DataError

GIVE_FILES_HINT = "Download the files you want and give them as data_path, such as 'FOLDER/*.jsonl'."


def readme(*configs: object) -> str:
    return f"---\n{yaml.safe_dump({'license': 'mit', 'configs': list(configs)})}---\n# Pairs\n"


def choose(listing: list[str], card: str = "", subset: str | None = None, split: str | None = None) -> list[str]:
    return choose_files("acme/pairs", listing, card, subset=subset, split=split)


def refusal(listing: list[str], card: str = "", subset: str | None = None, split: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        choose(listing, card, subset, split)
    return str(caught.value)


@pytest.mark.parametrize(
    ("split", "file"),
    [
        *[("train", name) for name in ["train.jsonl", "my_train.jsonl", "train1.jsonl", "0-training.jsonl"]],
        *[("validation", f"{word}.jsonl") for word in ["validation", "valid", "val", "dev"]],
        *[("test", f"{word}.v2.jsonl") for word in ["test", "testing", "eval", "evaluation"]],
    ],
)
def test_a_keyword_in_the_file_name_determines_the_split(split, file):
    other = {"train": "test.jsonl"}.get(split, "train.jsonl")
    assert choose([file, other, "more.jsonl"], split=split) == [file]


@pytest.mark.parametrize(
    ("split", "file"),
    [("train", "train/0.csv"), ("validation", "en/dev_1/a/0.csv"), ("test", "eval data/train.csv")],
)
def test_a_keyword_in_a_folder_takes_precedence_over_file_names(split, file):
    assert choose([file, "training/1.csv", "test.csv", "valid.csv"], split=split)[0] == file
    assert refusal([file, "train.csv"], split="none") == (
        f"acme/pairs: there is no split 'none'. Set split to one of: {split}."
    )


def test_shards_in_data_may_have_any_split_name():
    listing = [f"data/{split}-0000{i}-of-00002.parquet" for split in ("test", "train", "train_prefs") for i in (0, 1)]
    assert choose([*listing, "old/train.parquet"]) == listing[2:4]
    assert choose(listing, split="train_prefs") == listing[4:]


@pytest.mark.parametrize("file", ["trainer.csv", "contest.csv", "evals.csv", "Train.csv", "developers/a.csv"])
def test_without_a_keyword_as_a_full_word_all_files_are_train(file):
    assert choose([file, "b.csv"]) == [file, "b.csv"]


def test_only_data_files_count():
    around = ["a.txt", "a.zip", "a.py", "config.json", "state.json", ".a.arrow", ".git/a.arrow", "__x__/a.arrow"]
    of_the_library = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json"]
    assert choose([f"train/{file}" for file in [*around, *of_the_library, "a.arrow"]]) == ["train/a.arrow"]


def test_the_default_split_is_train():
    assert choose(["test.jsonl", "train.jsonl"]) == ["train.jsonl"]
    assert refusal(["test.jsonl"]) == "acme/pairs: there is no split 'train'. Set split to one of: test."
    assert refusal(["test.jsonl", "dev.jsonl"]) == (
        "acme/pairs: there are several splits. Set split to one of: validation, test."
    )


FILES = ["a.jsonl", "b.jsonl", "data/c.jsonl", "data/deep/d.jsonl", "data/e.md"]


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("./a.jsonl", ["a.jsonl"]),
        ("*", ["a.jsonl", "b.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("data/*", ["data/c.jsonl"]),
        ("data/**", ["data/c.jsonl", "data/deep/d.jsonl"]),
        ("**/*.jsonl", FILES[:4]),
        ("**/deep/*", ["data/deep/d.jsonl"]),
        ("**", FILES[:4]),
        (["b.jsonl", "*.jsonl"], ["b.jsonl", "a.jsonl"]),
    ],
)
def test_paths_in_the_readme_are_patterns_and_keep_their_order(path, files):
    assert choose(FILES, readme({"config_name": "x", "data_files": path})) == files
    with_splits = readme({"config_name": "x", "data_files": [{"split": "held", "path": path}]})
    assert choose(FILES, with_splits, split="held") == files


@pytest.mark.parametrize("data_dir", ["test_sets/a", "./test_sets/a/", "/test_sets/a"])
def test_a_data_dir_prefixes_the_paths_and_hides_other_files(data_dir):
    listing = ["test_sets/a/train.jsonl", "test_sets/a/dev.jsonl", "test_sets/train.jsonl", "train.jsonl"]
    by_name = readme({"config_name": "a", "data_dir": data_dir})
    assert choose(listing, by_name) == ["test_sets/a/train.jsonl"]
    assert choose(listing, by_name, split="validation") == ["test_sets/a/dev.jsonl"]
    by_path = readme({"config_name": "a", "data_dir": data_dir, "data_files": "dev.*"})
    assert choose(listing, by_path, split="train") == ["test_sets/a/dev.jsonl"]


def test_the_default_subset_is_default_or_the_only_one():
    a, b = {"config_name": "a", "data_files": "a.jsonl"}, {"config_name": "b", "data_files": "b.jsonl"}
    assert choose(FILES, readme(a)) == ["a.jsonl"]
    assert choose(FILES, readme(a, b | {"default": True})) == ["b.jsonl"]
    assert choose(FILES, readme(a, b | {"config_name": "default"})) == ["b.jsonl"]
    several = "acme/pairs: there are several subsets. Set subset to one of: a, b."
    assert refusal(FILES, readme(a, b)) == several
    assert refusal(FILES, readme(a | {"default": True}, b | {"default": True})) == several


def test_names_may_be_numbers():
    card = readme({"config_name": 2024, "data_files": [{"split": 1, "path": "a.jsonl"}]}, {"config_name": 2025})
    assert choose(FILES, card, subset="2024", split="1") == ["a.jsonl"]


@pytest.mark.parametrize(
    "card",
    ["# Pairs", "---\nlicense: mit\n---\n", "---\nconfigs:\n---\n", "---\n- a\n---\n", "---\n---\n", "--- a\n--- b\n"],
)
def test_with_a_readme_without_configs_file_names_determine_the_splits(card):
    assert choose(["train.jsonl", "b.jsonl"], card) == ["train.jsonl"]


def test_front_matter_with_crlf_line_ends_is_read():
    assert choose(FILES, "\ufeff" + readme({"data_files": "b.jsonl"}).replace("\n", "\r\n")) == ["b.jsonl"]


def test_a_path_in_the_readme_without_files_is_refused():
    card = readme({"data_files": [{"split": "train", "path": ["a.jsonl", "c/*.jsonl"]}]})
    assert refusal(FILES, card) == (
        f"acme/pairs: README.md gives c/*.jsonl for split 'train', but there is no data file at that path. {GIVE_FILES_HINT}"
    )
    assert refusal(FILES, readme({"data_dir": "c"})) == (
        f"acme/pairs: README.md gives c for split 'train', but there is no data file at that path. {GIVE_FILES_HINT}"
    )


def test_a_split_with_several_kinds_of_files_is_refused():
    assert refusal(["train.jsonl", "train.parquet", "test.csv"]) == (
        f"acme/pairs: the split 'train' has files of several kinds (.jsonl, .parquet). {GIVE_FILES_HINT}"
    )


def test_a_repository_with_only_a_script_is_refused():
    assert refusal(["README.md", "pairs.py", "dataset_infos.json"]) == (
        "acme/pairs: there are no data files, only a script that creates them ('pairs.py'), and tandem runs no code "
        "from a dataset repository. Create the files yourself and give them as data_path."
    )


def test_a_repository_without_data_files_is_refused():
    assert refusal(["README.md", "train.txt"]) == (
        "acme/pairs: there are no data files that tandem can read (.jsonl, .json, .csv, .parquet or .arrow, also as "
        ".gz or .zst). Convert the data to one of these and give it as data_path."
    )


@pytest.mark.parametrize(
    ("card", "problem"),
    [
        ("---\nconfigs: a\n---\n", "configs in README.md is malformed."),
        ("---\nconfigs: [a]\n---\n", "configs.0 in README.md is malformed."),
        (readme({}, {"data_files": {"train": "a.jsonl"}}), "configs.1.data_files in README.md is malformed."),
        (readme({"data_files": [{"split": "train"}]}), "configs.0.data_files in README.md is malformed."),
        (
            readme({"data_files": [{"split": "train", "path": []}]}),
            "configs.0.data_files in README.md is malformed.",
        ),
        (readme({"config_name": "a\nb"}), "configs.0.config_name in README.md is malformed."),
        ("---\nupdated: 2024-13-01\n---\n", "the front matter of README.md is not YAML."),
        ("---\nconfigs: [\n---\n", "the front matter of README.md is not YAML."),
    ],
)
def test_a_malformed_readme_is_refused_with_its_place(card, problem):
    assert refusal(FILES, card) == f"acme/pairs: {problem} {GIVE_FILES_HINT}"


def test_a_subset_may_be_a_folder_with_data_files():
    listing = ["preference/preference.jsonl.gz", "train.jsonl.gz", "validation.jsonl.gz"]
    assert choose(listing) == ["train.jsonl.gz"]
    assert choose(listing, subset="preference") == choose(listing, subset="preference/") == listing[:1]
    named = readme({"config_name": "preference", "data_files": "train.jsonl.gz"})
    assert choose(listing, named, subset="preference") == ["train.jsonl.gz"]
    assert refusal(listing, subset="pref") == "acme/pairs: there is no subset 'pref'. Set subset to one of: default."
