"""`tandem train --per-pair FILE`: every pair of every set, smallest margin first."""

import errno
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from running import metrics_of, short_run

from tandem.config.schema import Config
from tandem.errors import CheckpointError, ConfigError
from tandem.report.per_pair import check_per_pair
from tandem.report.reporter import Reporter
from tandem.report.verdicts import judge
from tandem.storage import cache

pytestmark = pytest.mark.usefixtures("of_a_command")

REFERENCE = ["reference_chosen", "reference_rejected"]
FIELDS = [
    *("split", "place", "chosen", "rejected", "margin", "loss"),
    *("reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", *REFERENCE),
    *("tokens_chosen", "tokens_rejected", "score_chosen", "score_rejected"),
]
ROWS = [
    {"prompt": f"Question {i}?", "chosen": "Yes, " * (i + 1), "rejected": "No, " * (12 - i)}
    | ({"chosen_reward": 3.0, "rejected_reward": 1.0} if i == 4 else {})
    for i in range(8)
]


@pytest.fixture
def run(tmp_path):
    """Train and validate on eight short pairs; return the lines of the file and the run directory."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def start(*overrides, name="run"):
        file = tmp_path / f"{name}.pairs"
        folder = short_run(
            tmp_path / name,
            f"data.train.data_path={data}",
            f"data.validation.data_path={data}",
            "dpo.max_num_epochs=4",
            "dpo.val_at_end=true",
            *overrides,
            per_pair=file,
        )
        return [json.loads(line) for line in file.read_text().splitlines()], folder

    return start


def test_every_pair_of_every_set_has_a_line(run, tmp_path):
    lines, folder = run()
    assert all(list(line) == FIELDS for line in lines)
    for split in ("train", "validation-default"):
        of_split = [line for line in lines if line["split"] == split]
        assert sorted(line["place"] for line in of_split) == [f"{tmp_path}/pairs.jsonl:{i + 1}" for i in range(8)]
        assert all(a["margin"] <= b["margin"] for a, b in pairwise(of_split))
    # the policy at the end, as the last validation saw it
    last = metrics_of(folder, "validation-default")[-1]
    held_out = [line for line in lines if line["split"] == "validation-default"]
    for name, mean in {"margin": "rewards_margin_mean", "loss": "loss", "logp_chosen": "logps_chosen_mean"}.items():
        assert sum(line[name] for line in held_out) / 8 == pytest.approx(last[mean], rel=1e-6)
    assert {line["place"].rpartition(":")[2]: line["score_chosen"] for line in held_out if line["score_chosen"]} == {
        "5": 3.0
    }
    for line in lines:
        assert line["margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"])
        assert line["reward_chosen"] == pytest.approx(0.1 * (line["logp_chosen"] - line["reference_chosen"]), abs=1e-4)
        assert isinstance(line["tokens_chosen"], int)
    assert not list(tmp_path.glob(".run.pairs*"))


@pytest.mark.parametrize(("loss", "absent"), [("simpo", REFERENCE), ("aot", ["loss"])])
def test_metrics_that_do_not_apply_are_left_out(run, loss, absent):
    lines, _ = run(f"dpo.preference_loss={loss}")
    assert all(list(line) == [name for name in FIELDS if name not in absent] for line in lines)


def test_pairs_of_several_completions_are_identified(run, tmp_path):
    three = {
        "context": [{"role": "user", "content": "Hi"}],
        "completions": [
            {"rank": rank, "completion": [{"role": "assistant", "content": text}]}
            for rank, text in ((2, "Low"), (0, "The best one of all of them by far"), (1, "Middle one"))
        ],
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(three) + "\n")
    lines, _ = run("data.pairing=all", "policy.train_global_batch_size=3", "dpo.max_num_steps=1")
    pairs = {(line["chosen"], line["rejected"]) for line in lines if line["split"] == "train"}
    assert pairs == {(1, 2), (1, 0), (2, 0)}
    lengths = {line["chosen"]: line["tokens_chosen"] for line in lines}
    assert lengths[1] > lengths[2]


def test_a_file_that_cannot_be_written_is_refused_before_training(tmp_path):
    missing = tmp_path / "no" / "pairs.jsonl"
    with pytest.raises(ConfigError) as error:
        short_run(tmp_path / "run", per_pair=missing)
    assert str(error.value) == (f"--per-pair {missing}: there is no folder {tmp_path}/no. Create it first.")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError) as error:
        check_per_pair(file / "pairs.jsonl")
    assert str(error.value) == (f"--per-pair {file}/pairs.jsonl: {file} is a file, not a folder. Choose another file.")
    with pytest.raises(ConfigError) as error:
        short_run(tmp_path / "run", per_pair=tmp_path)
    assert str(error.value) == f"--per-pair {tmp_path}: a directory. Give the name of a file."
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}\n')
    with pytest.raises(ConfigError) as error:
        short_run(tmp_path / "run", per_pair=data)
    assert str(error.value) == (
        f"--per-pair {data}: this file exists and does not hold the numbers of pairs, so it is kept. Choose another file."
    )
    assert "prompt" in data.read_text()
    assert not (tmp_path / "run").exists()


def test_the_reason_why_a_folder_cannot_be_written_is_named(tmp_path, monkeypatch):
    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ConfigError) as error:
        check_per_pair(tmp_path / "pairs.jsonl")
    assert str(error.value) == (
        f"--per-pair {tmp_path}/pairs.jsonl: the folder {tmp_path} cannot be written (Read-only file system). Choose a file "
        "elsewhere."
    )


def test_a_file_of_an_earlier_measurement_is_replaced(tmp_path):
    line = {"split": "a", "place": "a:1", "chosen": 0, "rejected": 1, "margin": 0.1, "tokens_chosen": 1}
    (tmp_path / "earlier.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "empty.jsonl").touch()
    check_per_pair(tmp_path / "earlier.jsonl")
    check_per_pair(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".PARQUET", ".jsonl.gz"])
def test_a_file_of_another_format_is_refused(tmp_path, of_a_command, ending):
    file = tmp_path / f"pairs{ending}"
    with pytest.raises(ConfigError) as error:
        check_per_pair(file)
    assert str(error.value) == (
        f"--per-pair {file}: JSON lines are written, which a {file.suffix} file does not hold. Give a name that ends in .jsonl, "
        f"such as {file.with_suffix('.jsonl')}."
    )


def test_a_device_is_refused():
    with pytest.raises(ConfigError) as error:
        check_per_pair(Path("/dev/null"))
    assert str(error.value) == "--per-pair /dev/null: not a plain file. Give the name of a file."


def test_a_finished_run_is_measured_with_its_last_checkpoint(run, tmp_path, monkeypatch):
    lines, folder = run()
    model = (folder / "model").stat().st_mtime_ns
    metrics = (folder / "metrics.jsonl").read_bytes()
    (tmp_path / "run.pairs").unlink()
    said = []
    monkeypatch.setattr(Reporter, "say", lambda _, text, **options: said.append(text))
    line = f"{tmp_path}/run.pairs  every pair, those the model disagrees with most first"
    for ending in ("", "; replaces the earlier file"):
        again, _ = run()
        assert again == lines
        assert said[-1] == f"{line}{ending}"
    assert (folder / "model").stat().st_mtime_ns == model
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_finished_run_without_its_checkpoint_cannot_be_measured(run, tmp_path):
    run("checkpointing.enabled=false")
    with pytest.raises(CheckpointError) as error:
        run("checkpointing.enabled=false")
    assert str(error.value) == (
        f"--per-pair {tmp_path}/run.pairs: {tmp_path}/run is finished, but the checkpoint of its last step is missing, so there "
        "is nothing to measure. Train again with --fresh."
    )


def test_an_extended_run_is_measured_at_its_new_end(run, tmp_path):
    lines, folder = run()
    longer, _ = run("dpo.max_num_steps=6")
    assert longer != lines
    assert (folder / "model.step_4").is_dir()


def test_the_verdicts_of_a_run_are_saved(run):
    _, folder = run()
    verdicts = json.loads((folder / "verdicts.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert verdicts == [asdict(verdict) for verdict in judge(records, Config(), {"validation-default": 1.0})] != []
