"""The page in a real browser: charts are drawn, values are read out, hostile text stays text, and nothing is loaded."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Tab, running_browser
from run_directories import HOSTILE, make_run, record

from tandem.page.serve import serve_run
from tandem.page.write import write_report

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="chromium is not installed, and `make test-page` could not install it (apt-get, as root)",
    ),
]
DRAWN = "Number(document.documentElement.dataset.drawn)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


def page_of(folder: Path, **settings) -> Path:
    return write_report([make_run(folder / "run", **settings)]).page


def opened(browser: Browser, page: Path, **settings) -> Tab:
    tab = Tab(browser, **settings).open(page.as_uri())
    tab.until(f"{DRAWN} >= 0")
    return tab


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_is_drawn_and_fits(browser, tmp_path, width, dark):
    page = page_of(tmp_path, text=HOSTILE, steps=40)
    tab = opened(browser, page, width=width, dark=dark)
    figures = tab.evaluate("document.querySelectorAll('figure[data-chart]').length")
    assert tab.evaluate(DRAWN) == figures > 12
    assert tab.evaluate(
        "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg').childElementCount > 3)"
    )
    assert tab.evaluate("document.querySelector('#chart-loss .line').getTotalLength()") > 100
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    # the text of ticks does not leave the chart
    assert tab.evaluate(
        "[...document.querySelectorAll('.plot svg text')].every((text) => text.getBoundingClientRect().left >= "
        "text.closest('figure').getBoundingClientRect().left)"
    )
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    assert tab.problems() == []
    assert tab.requests() == [page.as_uri()]


def test_hostile_text_stays_text(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path, text=HOSTILE))
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert tab.evaluate("document.images.length") == 0
    shown = HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")
    assert tab.evaluate("document.querySelector('.pair .prompt pre').textContent") == shown
    # also in the read-out of the pack, which the script fills
    tab.evaluate("document.querySelector('#chart-pack svg').focus()")
    tab.press("ArrowRight")
    assert shown in tab.evaluate("document.querySelector('#chart-pack .tip').textContent")
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert tab.problems() == []


def test_the_policy_stops_a_script_that_is_not_the_pages_own(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'}))"
    )
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in problem for problem in tab.problems())


def centre(tab: Tab, selector: str, across: float = 0.5) -> tuple[float, float]:
    tab.evaluate(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = json.loads(tab.evaluate(f"JSON.stringify(document.querySelector('{selector}').getBoundingClientRect())"))
    return box["left"] + across * box["width"], box["top"] + box["height"] / 2


def tip(tab: Tab, chart: str) -> str:
    return tab.evaluate(
        f"(() => {{ const tip = document.querySelector('#{chart} .tip'); return tip.hidden ? '' : tip.textContent; }})()"
    )


def test_the_pointer_reads_out_values_on_every_kind_of_chart(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    tab.move(*centre(tab, "#chart-accuracy svg", across=0.99))
    assert tip(tab, "chart-accuracy") == "step 10training90.0 % 75.0 % to 96.4 %validation90.0 % 82.6 % to 94.5 %"
    assert tab.evaluate("document.querySelector('#chart-loss .cursor').getAttribute('visibility')") == "visible"
    tab.move(*centre(tab, "#chart-margins svg", across=0.99))
    assert tip(tab, "chart-margins") == "margin 1.000 to 1.500step 1020 pairsstep 00 pairs"
    assert tip(tab, "chart-accuracy") == ""
    tab.move(*centre(tab, "#chart-length svg"))
    assert "pairs, mean margin" in tip(tab, "chart-length")
    tab.move(*centre(tab, "#chart-pack svg", across=0.1))
    assert "tokens" in tip(tab, "chart-pack")


def test_the_keyboard_reads_out_values(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    tab.evaluate("document.querySelector('#chart-loss svg').focus()")
    tab.press("Home")
    assert tip(tab, "chart-loss").startswith("step 0")
    tab.press("ArrowRight")
    assert tip(tab, "chart-loss").startswith("step 1")
    tab.press("Escape")
    assert tip(tab, "chart-loss") == ""


def test_the_legend_hides_a_series_and_keeps_the_focus(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    lines = "document.querySelectorAll('#chart-loss .line').length"
    assert tab.evaluate(lines) == 2
    tab.evaluate("document.querySelector('#chart-loss .legend button').click()")
    assert tab.evaluate(lines) == 1
    assert tab.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    tab.evaluate("document.activeElement.click()")
    assert tab.evaluate(lines) == 2


def test_colours_can_be_switched(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert tab.evaluate("document.getElementById('theme').textContent") == "Light"
    tab.evaluate("localStorage.removeItem('tandem-theme')")
    assert tab.problems() == []


def test_everything_that_reacts_can_be_reached_by_the_keyboard_and_has_a_name(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path))
    assert tab.evaluate(
        "[...document.querySelectorAll('.plot svg')].every((one) => one.tabIndex === 0 && one.ariaLabel)"
    )
    assert tab.evaluate(
        "[...document.querySelectorAll('button, a')].every((one) => one.textContent.trim() && one.tabIndex === 0)"
    )


def test_runs_of_one_step_of_none_and_of_ten_thousand(browser, tmp_path):
    for steps, folder in ((1, "one"), (10_000, "many")):
        tab = opened(browser, page_of(tmp_path / folder, steps=steps))
        assert tab.evaluate(DRAWN) > 12
        assert tab.problems() == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.yaml").write_text("{}")
    tab = opened(browser, write_report([tmp_path / "none"]).page)
    assert (tab.evaluate(DRAWN), tab.problems()) == (0, [])


def test_several_runs_share_their_charts(browser, tmp_path):
    runs = [make_run(tmp_path / HOSTILE.replace("/", ""), accuracy=0.6), make_run(tmp_path / "b", accuracy=0.9)]
    tab = opened(browser, write_report(runs, tmp_path / "both.html").page, width=390)
    assert tab.evaluate("document.querySelectorAll('#chart-loss .line').length") == 2
    assert tab.evaluate("document.querySelector('.badge').closest('tr').textContent").startswith("b best")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert (tab.evaluate("typeof window.hacked"), tab.problems()) == ("undefined", [])


def test_a_page_prints_without_its_controls(browser, tmp_path):
    tab = opened(browser, page_of(tmp_path), dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert tab.evaluate("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_watching_a_run_follows_it(browser, tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    with serve_run(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = Tab(browser).open(server.url)
        tab.until(f"{DRAWN} > 12")
        tab.evaluate("document.querySelector('#pairs details:last-of-type').open = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(11)) + "\n")
        tab.until("document.querySelector('.tiles').textContent.includes('11 / 10')")
        assert tab.evaluate("document.querySelector('#pairs details:last-of-type').open")
        assert tab.evaluate(DRAWN) > 12
        assert tab.problems() == []
        assert {url.removeprefix(server.url) for url in tab.requests()} <= {"", "version"}
        server.shutdown()
