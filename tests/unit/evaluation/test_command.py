"""`tandem eval` on the command line: its output, its exit codes, and which arguments are overrides."""

import json
import sys

import pytest
from models import MODEL

from tandem.cli import main as cli
from tandem.cli.eval import OVERRIDE
from tandem.embedded.files import VALIDATION
from tandem.evaluation.evaluate import evaluate


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run the command in this process; return its exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tandem", "eval", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def pairs(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(VALIDATION.read_text().splitlines(keepends=True)[:6]))
    return file


def test_the_table_is_printed_and_nothing_else_on_standard_output(run_here, pairs):
    code, out, err = run_here(MODEL, pairs, "--reference", MODEL)
    assert (code, err) == (0, "Loading torch and transformers (a few seconds)\n")
    assert " ".join(out.split()).startswith(
        f"{MODEL}: implicit rewards of dpo, beta 0.1, reference {MODEL} 6 pairs of 6 prompts"
    )
    assert "Only 6 prompts: the intervals are wide, and approximate." in out
    # the model is its own reference, so that every pair is a tie
    (line,) = (line for line in out.splitlines() if line.startswith("reward accuracy"))
    assert line.split()[2] == "0.500"


def test_an_interval_follows_the_accuracy_that_it_belongs_to(run_here, pairs):
    _, out, _ = run_here(MODEL, pairs, "--json", "--quiet")
    group = json.loads(out)["by_length"][0]
    low, high = (f"{group['logps_accuracy'][name]:.3f}" for name in ("low", "high"))
    accuracies = [f"{group[name]['value']:.3f}" for name in ("logps_accuracy", "logps_per_token_accuracy")]
    _, out, _ = run_here(MODEL, pairs, "--quiet")
    heading, first = out.partition("By length of the chosen completion\n")[2].splitlines()[:2]
    assert " ".join(heading.split()) == "set pairs logp acc. 95 % interval per token"
    assert first.split()[-5:] == [accuracies[0], low, "to", high, accuracies[1]]


def test_data_that_is_given_twice_is_measured_once(run_here, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(pairs)
    code, out, _ = run_here(MODEL, "pairs.jsonl", "./pairs.jsonl", pairs.name, "link.jsonl", "--quiet")
    lines = out.partition("6 pairs of 6 prompts")[2].splitlines()
    assert (code, lines[1:4]) == (
        0,
        [
            "./pairs.jsonl is the same data as pairs.jsonl, and measured once.",
            "pairs.jsonl is named twice, and measured once.",
            "link.jsonl is the same data as pairs.jsonl, and measured once.",
        ],
    )
    found = evaluate(MODEL, [pairs.name, str(pairs)])
    assert (found.total.num_pairs, found.by_set[0].name) == (6, "pairs.jsonl")
    assert found.left_out == (f"{pairs} is the same data as pairs.jsonl, and measured once.",)


def test_a_per_pair_file_says_whether_it_replaces_an_earlier_one(run_here, pairs, tmp_path):
    file = tmp_path / "of-pairs.jsonl"
    line = f"{file}: every pair, those the model disagrees with most first"
    for ending in ("", "; replaces the earlier file"):
        code, out, _ = run_here(MODEL, pairs, "--per-pair", file)
        assert (code, " ".join(out[out.find(str(file)) :].split())) == (0, f"{line}{ending}")


def test_json_has_the_documented_keys(run_here, pairs):
    code, out, err = run_here(MODEL, pairs, "--json", "--quiet", "policy.max_total_sequence_length=256")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == [
        *("model", "folder", "reference", "scored_by", "loss", "beta", "precision", "total", "by_set", "by_length"),
        *(
            "by_rank_distance",
            "by",
            "by_field",
            "best_of_n",
            "calibration",
            "benchmarks",
            "comparison",
            "harness",
            "skipped",
        ),
        *("left_out", "seconds", "pairs_per_second"),
    ]
    assert list(found["total"]) == [
        *("name", "num_pairs", "num_prompts", "accuracy", "logps_accuracy", "logps_per_token_accuracy"),
        *("rewards_margin", "logps_margin", "loss"),
    ]
    assert list(found["total"]["logps_accuracy"]) == ["value", "low", "high"]
    assert found["by_set"][0]["name"] == str(pairs)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["./nope", "embedded"],
            2,
            "MODEL ./nope: no such directory. Give a model folder, a hub name, or a run directory.",
        ),
        (["embedded", "./nope.jsonl"], 3, "./nope.jsonl: no such file or folder, and not the name of a hub dataset"),
        (
            ["embedded"],
            2,
            "MODEL embedded: not a run, so give DATA: one or more files of preference pairs, or embedded.",
        ),
        (["embedded", "embedded", "policy.nope=1"], 2, "policy.nope"),
    ],
)
def test_wrong_arguments_end_in_one_message(run_here, arguments, code, message):
    found, out, err = run_here(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argument", "is_override"),
    [
        ("policy.precision=float32", True),
        ("+data.default.prompt_key=q", True),
        ("~policy.scheduler", True),
        ("pairs.jsonl", False),
        ("org/name", False),
        ("data/a=b.jsonl", False),
        ("~/pairs.jsonl", False),
        ("*.jsonl", False),
    ],
)
def test_which_arguments_are_overrides(argument, is_override):
    assert bool(OVERRIDE.fullmatch(argument)) == is_override
