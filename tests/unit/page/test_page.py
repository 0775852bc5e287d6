"""The page of a run: what it shows, and that text from the data can never become markup."""

import json
import re

import numpy as np
import pytest
from run_directories import HOSTILE, make_run

from tandem.errors import ConfigError
from tandem.page.comparison import best_of, differing_keys
from tandem.page.curves import MAX_POINTS, run_charts
from tandem.page.html import Markup, duration, json_for_script, number, percent, tag, text
from tandem.page.pairs import by_length, histogram, is_doubtful, listed_pairs
from tandem.page.write import run_page, write_report
from tandem.runs import open_run

pytestmark = pytest.mark.usefixtures("of_a_command")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_headline_is_the_accuracy_before_and_after_with_its_interval(tmp_path):
    page = run_page(open_run(make_run(tmp_path / "run")))
    plain = re.sub("<[^>]+>", "", page)
    assert "accuracy 50.0 % → 90.0 % (82.6 % to 94.5 %)" in plain


def test_the_headline_of_a_run_without_validation_says_that_its_accuracy_is_of_training(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"validation' not in line))
    page = run_page(open_run(folder))
    assert "accuracy in training 54.0 % → 90.0 %" in re.sub("<[^>]+>", "", page)
    assert "<dt>Accuracy in training</dt>" in page and "<dt>Accuracy</dt>" not in page


def test_a_verdict_is_next_to_the_chart_that_it_speaks_of(tmp_path):
    page = run_page(open_run(make_run(tmp_path / "run")))
    chart = re.search(r'<figure class="chart" id="chart-length".*?</figure>', page, re.DOTALL)[0]
    assert "The margin follows length." in chart
    assert '<a href="#chart-length">See the chart</a>' in page


def test_a_run_that_has_not_ended_is_judged_by_its_steps_so_far(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    (folder / "verdicts.json").unlink()
    page = run_page(open_run(folder))
    assert "No problems found." in page
    assert f"tandem train --resume {folder}" in page


def test_hostile_text_stays_text(tmp_path):
    page = run_page(open_run(make_run(tmp_path / "run", text=HOSTILE)))
    assert page.count("<script") == 2  # the data and the page's own script
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "\u2028" not in page and "\u202e" not in page
    pack = next(one for one in data_of(page)["charts"] if one["kind"] == "pack")
    assert pack["segments"][0]["text"] == HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")


def test_nothing_is_loaded_and_only_the_pages_own_script_runs(tmp_path):
    page = run_page(open_run(make_run(tmp_path / "run")))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|style=|\bon\w+=", without_namespace)


@pytest.mark.parametrize(
    "missing", ["setup.json", "pairs.json", "metrics.jsonl", "verdicts.json", "config.yaml broken"]
)
def test_a_page_of_a_run_with_missing_files(tmp_path, missing):
    folder = make_run(tmp_path / "run")
    name, _, broken = missing.partition(" ")
    (folder / name).write_text("{" * 9) if broken else (folder / name).unlink()
    assert "<main>" in run_page(open_run(folder))


@pytest.mark.parametrize("name", ["setup.json", "pairs.json"])
def test_a_page_of_files_with_other_types(tmp_path, name):
    folder = make_run(tmp_path / "run")
    content = json.loads((folder / name).read_text())

    def places(value, path=()):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in items:
            yield from places(one, (*path, key))

    others = (None, "text", -1, [], {}, [[]], float("nan"), 10**400)
    for i, path in enumerate(places(content)):
        other = others[i % len(others)]
        changed = json.loads(json.dumps(content))
        inside = changed
        for key in path[:-1]:
            inside = inside[key]
        if path:
            inside[path[-1]] = other
        (folder / name).write_text(json.dumps(changed if path else other))
        assert "<main>" in run_page(open_run(folder)), (path, other)


def test_ten_thousand_steps_are_averaged_into_few_points(tmp_path):
    run = open_run(make_run(tmp_path / "run", steps=10_000))
    charts = {chart["id"]: chart for chart in run_charts(run)}
    training = charts["loss"]["series"][0]
    assert len(training["x"]) == MAX_POINTS
    assert (training["x"][0], training["x"][-1]) == (20, 10_000)
    assert len(run_page(run)) < 400_000


def test_a_run_of_one_step_has_charts_of_one_point(tmp_path):
    charts = run_charts(open_run(make_run(tmp_path / "run", steps=1)))
    assert {tuple(chart["series"][0]["x"]) for chart in charts} == {(1,)}


def test_a_run_without_steps_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{}")
    page = run_page(open_run(tmp_path / "run"))
    assert "No step has been recorded yet." in page and "no result yet" in page


def test_numbers_as_text():
    assert [percent(0.877), percent(1.0), percent(0.5, 0)] == ["87.7 %", "100 %", "50 %"]
    assert [number(v) for v in (12345.6, 0.5, -2.0, 0.00012345, 1.2e-7, 0.0, None)] == (
        ["12,346", "0.5000", "−2.000", "0.000123", "1.20e−7", "0", "–"]
    )
    assert [duration(s) for s in (3.21, 100, 4000, 200_000)] == ["3.2 s", "1 min 40 s", "1 h 6 min", "2 d 7 h"]


def test_only_markup_is_inserted_as_it_is():
    assert tag("p", "<b>", Markup("<i></i>"), class_="a&b", hidden=True, id=None) == (
        '<p class="a&amp;b" hidden>&lt;b&gt;<i></i></p>'
    )
    assert text("\x1b[2J") == "\\x1b[2J"
    assert json.loads(json_for_script({"a": "</script><!--", "b": float("nan")})) == {"a": "</script><!--", "b": None}
    assert "<" not in json_for_script("</script><!--")


# pairs.json


def test_margins_are_counted_in_bins_that_start_at_zero():
    found = histogram(np.array([-0.5, 0.0, 0.1, 3.9]), np.zeros(4))
    assert found["width"] == 0.2
    assert round(found["first"] / found["width"]) == -3
    assert sum(found["now"]) == sum(found["start"]) == 4
    assert found["start"][3] == 4
    assert sum(found["now"][:3]) == 1  # below 0


def test_a_pair_is_doubtful_if_the_policy_disagrees_as_clearly_as_it_usually_agrees():
    assert is_doubtful(np.array([1.0, 2.0, 3.0, -0.5, -2.0])).tolist() == [False] * 4 + [True]
    assert is_doubtful(np.array([-1.0, -2.0])).tolist() == [False, False]


def test_lost_pairs_begin_with_the_clearest_disagreement():
    margin, none = np.array([0.5, -1.0, 2.0, -3.0, 0.0]), np.zeros(5)
    found = listed_pairs(margin, np.array([0.5, 1.0, 2.0, -2.9, 0.0]), none)
    assert {name: chosen.tolist() for name, chosen in found.items()} == {
        "pairs_lost": [3, 1],
        "pairs_won": [2, 0],
        "pairs_changed": [1, 3, 0, 2, 4],
    }


def test_accuracy_by_length_counts_every_pair_once():
    difference, margin = np.array([-5.0, -5.0, 0.0, 3.0, 9.0]), np.array([1.0, -1.0, 0.0, 1.0, 1.0])
    groups = by_length(difference, margin, np.full(5, 0.1))
    assert sum(group["num_pairs"] for group in groups) == 5
    assert groups[0] | {} == {"low": -5.0, "high": -5.0, "num_pairs": 2, "accuracy": 0.5, "margin": 0.0}
    assert len(by_length(np.zeros(3), margin[:3], np.zeros(3))) == 1


# Several runs


def test_the_best_of_several_runs_is_marked(tmp_path):
    runs = [
        open_run(
            make_run(tmp_path / f"r{i}", config=f"dpo:\n  reference_policy_kl_penalty: 0.{i}\n", accuracy=accuracy)
        )
        for i, accuracy in ((2, 0.6), (3, 0.95))
    ]
    best = best_of(runs)
    assert best is not None and (best.run.name, best.is_clear) == ("r3", True)
    assert differing_keys(runs) == {"dpo.reference_policy_kl_penalty": [0.2, 0.3]}
    report = write_report([run.path for run in runs], tmp_path / "both.html")
    page = report.page.read_text()
    assert report.best is not None and report.best.run.name == "r3"
    assert "The intervals of all other finished runs are below it." in page
    assert [one["name"] for one in data_of(page)["charts"][0]["series"]] == ["r2", "r3"]


def test_of_equal_runs_the_best_has_the_larger_margin_before_scaling_by_beta(tmp_path):
    # Margins of 0.3 with beta 0.1 and 0.8 with beta 0.4 are 3 and 2 nats.
    runs = [
        open_run(
            make_run(
                tmp_path / f"r{i}", config=f"dpo:\n  reference_policy_kl_penalty: 0.{i}\n", rewards_margin_mean=margin
            )
        )
        for i, margin in ((1, 0.3), (4, 0.8))
    ]
    best = best_of(runs)
    assert best is not None and (best.run.name, best.num_equal, best.is_clear) == ("r1", 1, False)


def test_only_finished_runs_are_compared_for_the_best(tmp_path):
    runs = [make_run(tmp_path / name, accuracy=accuracy) for name, accuracy in (("a", 0.5), ("b", 0.8))]
    failed = make_run(tmp_path / "failed", finished=False, accuracy=0.99, data="other pairs")
    report = write_report([*runs, failed], tmp_path / "three.html")
    assert report.best is not None and (report.best.run.name, report.best.is_clear) == ("b", True)
    without = write_report([runs[0], failed], tmp_path / "two.html")
    assert without.best is None
    assert "No run is marked as the best:</strong> it takes two or more finished runs" in without.page.read_text()


def test_no_run_is_best_if_they_were_measured_on_other_pairs(tmp_path):
    runs = [open_run(make_run(tmp_path / name, data=name)) for name in ("a", "b")]
    assert best_of(runs) is None
    assert (
        "all validated on the same pairs." in write_report([r.path for r in runs], tmp_path / "x.html").page.read_text()
    )


def test_intervals_that_overlap_are_not_a_clear_result(tmp_path):
    runs = [open_run(make_run(tmp_path / name, accuracy=accuracy)) for name, accuracy in (("a", 0.8), ("b", 0.82))]
    best = best_of(runs)
    assert best is not None and (best.run.name, best.is_clear) == ("b", False)


# Writing


def test_the_page_of_a_run_is_written_into_its_directory_and_replaced(tmp_path):
    folder = make_run(tmp_path / "run")
    for _ in range(2):
        assert write_report([folder]).page == folder / "report.html"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_file_that_is_not_a_page_is_never_replaced(tmp_path):
    folder, mine = make_run(tmp_path / "run"), tmp_path / "mine.html"
    mine.write_text("<p>my own")
    with pytest.raises(ConfigError) as error:
        write_report([folder], mine)
    assert str(error.value) == (
        f"{mine}: exists and is not a page of tandem, so it is kept. Choose another file with --out FILE."
    )
    page = write_report([folder], tmp_path / "page.html").page
    (tmp_path / "link.html").symlink_to(page)
    with pytest.raises(ConfigError, match="is not a page of tandem"):
        write_report([folder], tmp_path / "link.html")


def test_places_that_cannot_be_written_are_refused(tmp_path):
    folder = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"{tmp_path}: a directory. Give the name of a file with --out FILE."):
        write_report([folder], tmp_path)
    with pytest.raises(ConfigError, match="is not a writable directory"):
        write_report([folder], tmp_path / "none/page.html")
    with pytest.raises(ConfigError):
        write_report([tmp_path / "other"])
    with pytest.raises(ConfigError, match="0 runs: a page shows 1 to 200"):
        write_report([])
