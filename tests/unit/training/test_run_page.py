"""The page that a run keeps up to date: what it stores for it, and that it never ends or slows the run."""

import json
from itertools import pairwise
from unittest import mock

import pytest
from run_directories import make_run
from running import few_pairs, killed_after, short_run

from tandem.config.load import load_config
from tandem.page import live
from tandem.page.live import RunPage
from tandem.page.write import is_page
from tandem.runs import open_run
from tandem.training import trainer

VALIDATED = ["dpo.val_at_start=true", "dpo.val_at_end=true", "dpo.val_period=2"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    return [few_pairs(folder, 12), f"data.validation={folder}/few.jsonl", *VALIDATED, "checkpointing.save_period=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, settings):
    return short_run(tmp_path_factory.mktemp("runs") / "run", *settings, "logger.num_val_samples_to_print=1")


def test_a_run_stores_its_page_and_what_the_page_shows(run):
    assert is_page(run / "report.html")
    found = open_run(run)
    assert found.problems == ()
    assert (found.setup["num_steps"], found.step, found.status) == (3, 3, "finished")
    assert {"tandem", "torch", "Python"} <= found.setup["versions"].keys()
    pairs = found.pairs["sets"]["validation-default"]
    assert (pairs["step"], pairs["start_step"], pairs["num_pairs"]) == (3, 0, 12)
    assert pairs["start"] == [0.0] * 12
    assert sum(pairs["histogram"]["now"]) == 12
    page = (run / "report.html").read_text()
    assert ">finished<" in page and "A pack of this run" in page


def test_the_margins_of_the_page_are_those_of_the_last_validation(run):
    pairs = open_run(run).pairs["sets"]["validation-default"]
    listed = [one["margin"] for kind in ("pairs_lost", "pairs_won") for one in pairs[kind]]
    assert len(listed) == pairs["won"] + pairs["lost"] == 12
    last = open_run(run).results[0].last
    assert sum(listed) / 12 == pytest.approx(last["rewards_margin_mean"], rel=1e-3)


def test_the_picture_of_a_pack_is_that_of_its_tokens(run):
    pack = open_run(run).setup["pack"]
    segments = pack["segments"]
    assert [one["role"] for one in segments[:3]] == ["prompt", "chosen", "rejected"]
    assert all(a["start"] + a["tokens"] == b["start"] for a, b in pairwise(segments))
    assert segments[0]["place"].endswith("few.jsonl:" + segments[0]["place"].rpartition(":")[2])
    assert segments[0]["text"] and segments[0]["preference"] == 0


def test_a_resumed_run_still_knows_the_margins_before_training(tmp_path, settings):
    with killed_after(2):
        short_run(tmp_path / "run", *settings)
    assert ">stopped<" in (tmp_path / "run/report.html").read_text()
    run = open_run(short_run(tmp_path / "run", *settings))
    assert run.pairs["sets"]["validation-default"]["start_step"] == 0


def test_the_page_can_be_switched_off(tmp_path, settings, capsys):
    run = short_run(tmp_path / "run", *settings, "logger.report=false")
    assert not [path.name for path in run.iterdir() if path.name in ("report.html", "pairs.json", "setup.json")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("a bug")])
def test_a_page_that_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path, settings, error, capsys):
    with mock.patch.object(live, "write_page", side_effect=error) as write:
        run = short_run(tmp_path / "run", *settings)
    assert (run / "model").is_dir()
    assert write.call_count == 1
    warned = [line for line in capsys.readouterr().out.splitlines() if "report.html cannot be written" in line]
    assert len(warned) == 1 and "Training continues without it" in warned[0]


def test_a_setup_that_cannot_be_written_ends_nothing(tmp_path, settings, capsys):
    with mock.patch("tandem.page.stored.example_pack", side_effect=OSError(28, "No space left on device")):
        run = short_run(tmp_path / "run", *settings)
    assert (run / "model").is_dir() and not (run / "setup.json").exists()
    assert "setup.json cannot be written" in capsys.readouterr().out


def test_writing_takes_at_most_a_hundredth_of_the_time(tmp_path):
    page = RunPage(make_run(tmp_path / "run"), None, print, enabled=True)
    clock = mock.Mock(side_effect=[0.0, 0.0, 2.0, 2.0, 201.0, 202.0, 202.0, 203.0, 203.0])
    with mock.patch.object(live.time, "monotonic", clock), mock.patch.object(live, "write_page") as write:
        page.refresh()  # from 0 to 2 seconds
        page.refresh()  # at 201
        assert write.call_count == 1
        page.refresh()  # at 202: 200 seconds after the end of the first
        assert write.call_count == 2


def test_values_from_the_environment_are_not_stored(tmp_path, settings, monkeypatch):
    monkeypatch.setenv("SECRET_NAME", "hunter2-name")
    loaded = [*settings, "run.name=x", "policy.tokenizer.name=null"]
    config = tmp_path / "config.yaml"
    config.write_text("logger:\n  wandb_enabled: false\n  wandb:\n    project: ${oc.env:SECRET_NAME}\n")
    load_config(str(config), loaded)  # from here on the value is hidden
    from tandem.page.stored import write_json

    write_json(tmp_path / "x.json", {"choices": [["model", "hunter2-name"]]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"choices": [["model", "$SECRET_NAME"]]}


def test_only_the_first_rank_writes():
    setup, ranks = mock.Mock(), mock.Mock(is_first=False)
    setup.config.logger.report = True
    assert not trainer.writes_page(setup, ranks)
