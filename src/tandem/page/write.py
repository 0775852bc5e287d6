"""Writes the page of a run, or the comparison of several, as one HTML file."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError, full_disk
from tandem.page.comparison import Best, best_of, comparison
from tandem.page.curves import run_charts
from tandem.page.data_sections import answers, data, length_charts, pack_chart, packing, pair_charts, pairs
from tandem.page.document import GENERATOR, document, footer, header
from tandem.page.html import joined, tag
from tandem.page.sections import curves, headline, settings, summary, verdicts_of
from tandem.runs import Run, open_run, refuse_other_than_run
from tandem.storage.cache import replacing
from tandem.terminal.arguments import option
from tandem.terminal.printable import escaped, listed
from tandem.training.run.other_folders import SWEEP_FILE, SWEEP_LOGS, other_than_run

SECTIONS = {
    "summary": "Summary",
    "curves": "Curves",
    "pairs": "Pairs",
    "answers": "Answers",
    "packing": "Packing",
    "data": "Data",
    "settings": "Settings",
}
MAX_RUNS = 200
COMPARISON = "comparison.html"


@dataclass(frozen=True, slots=True)
class Report:
    """A page that was written, and the runs on it."""

    page: Path
    runs: tuple[Run, ...]
    best: Best | None  # of several finished runs, the one with the highest accuracy on the same pairs
    has_replaced: bool  # whether an earlier page was at this path
    left_out: tuple[str, ...] = ()  # of several paths, those without a run, or with the run of another, in sentences

    def __repr__(self) -> str:
        """Where the page is, and its runs. A notebook prints this."""
        names = listed(run.name for run in self.runs)
        best = "" if self.best is None else f"; best: {self.best.run.name}"
        return escaped(f"<Report {self.page}: {names}{best}>")


def write_report(
    runs: Sequence[str | Path], out: str | Path | None = None, each: Callable[[list[Path]], Iterable[Path]] = iter
) -> Report:
    """Read runs and write their page: RUN/report.html for one, SWEEP/comparison.html for a sweep, comparison.html for several.

    runs: directories of runs or of sweeps. Of several, those that are no runs are left out, and each run is shown once.
    out: another file. A file that is not a page of tandem is never replaced. each: goes through the runs, for a progress bar.
    """
    given = [Path(run) for run in runs]
    paths, left_out = _find_runs(given)
    if not 0 < len(paths) <= MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs: a page shows 1 to {MAX_RUNS}. Name fewer runs.")
    found = tuple(open_run(path) for path in each(paths))
    page = _default_page(given, paths) if out is None else Path(out)
    check_page(page)
    has_replaced = page.exists()
    try:
        write_page(found, page)
    except OSError as error:
        if full_disk(error):
            raise
        raise ConfigError(
            f"{page}: cannot be written ({error.strerror}). Choose another file with {option('out', metavar='FILE')}."
        ) from None
    best = best_of(found) if len(found) > 1 else None
    return Report(page=page, runs=found, best=best, has_replaced=has_replaced, left_out=tuple(left_out))


def _default_page(given: Sequence[Path], runs: Sequence[Path]) -> Path:
    if len(given) == 1 and _is_sweep(given[0]):
        return given[0] / COMPARISON
    return runs[0] / "report.html" if len(runs) == 1 else Path(COMPARISON)


def _find_runs(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the runs that paths name, each once, and a sentence for each path that is left out.

    Raise ConfigError for a path that does not exist, and if no path names a run. The own files of a sweep, which SWEEP/* lists,
    are left out without a sentence.
    """
    runs: dict[Path, Path] = {}  # by their place on disk
    left_out: list[str] = []
    for path in given:
        inside = _runs_in(path)
        if not path.exists() or (len(given) == 1 and not _is_sweep(path)):
            refuse_other_than_run(path)
        if not inside and not _is_sweep(path.parent):
            left_out.append(f"{path} is left out: {_no_run_of(path) if _is_sweep(path) else other_than_run(path)}.")
        for run in inside:
            same = runs.setdefault(run.resolve(), run)
            if same is not run:
                which = "named twice" if same == run else f"the same run as {same}"
                left_out.append(f"{run} is {which}, and shown once.")
    if given and not runs:
        sweeps = (one for path in given for one in (path, path.parent) if _is_sweep(one))
        if (sweep := next((one for one in sweeps if not _runs_in(one)), None)) is not None:
            raise ConfigError(f"{sweep}: {_no_run_of(sweep)}.")
        refuse_other_than_run(given[0])
    return list(runs.values()), left_out


def _no_run_of(sweep: Path) -> str:
    """Return why a sweep has no run to show, without the period at the end."""
    logs = sweep / SWEEP_LOGS
    return f"none of its runs has written results{f'; {logs} has what they printed' if logs.is_dir() else ''}"


def _runs_in(path: Path) -> list[Path]:
    """Return the runs that a path names: itself, or those of a sweep."""
    if _is_sweep(path):
        return sorted(one for one in path.iterdir() if other_than_run(one) is None)
    return [path] if other_than_run(path) is None else []


def _is_sweep(path: Path) -> bool:
    return (path / SWEEP_FILE).is_file()


def check_page(page: Path) -> None:
    """Refuse to write to a place that holds something else than an earlier page."""
    if page.is_dir():
        raise ConfigError(f"{page}: a directory. Give the name of a file with {option('out', metavar='FILE')}.")
    if not page.parent.is_dir() or not os.access(page.parent, os.W_OK):
        raise ConfigError(
            f"{page}: {page.parent} is not a writable directory. Choose another file with {option('out', metavar='FILE')}."
        )
    if os.path.lexists(page) and not is_page(page):
        raise ConfigError(
            f"{page}: exists and is not a page of tandem, so it is kept. Choose another file with "
            f"{option('out', metavar='FILE')}."
        )


def is_page(path: Path) -> bool:
    """Whether a file is a page that tandem wrote. A link is not."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return f'content="{GENERATOR} '.encode() in file.read(400)


def write_page(runs: Sequence[Run], page: Path) -> None:
    """Replace the page in one rename, so that a reader never sees half of it."""
    content = run_page(runs[0]) if len(runs) == 1 else comparison(runs)
    with replacing(page, binary=True) as file:
        file.write(content.encode("utf-8", "replace"))


def run_page(run: Run, *, live: bool = False) -> str:
    """The complete page of one run. live: it is served by `tandem watch`, and follows the run."""
    over_steps, of_pairs = run_charts(run), pair_charts(run)
    pack, lengths = [*pack_chart(run), *(one for one in over_steps if one["id"] == "fill")], length_charts(run)
    verdicts = verdicts_of(run)
    everything = [*over_steps, *of_pairs, *pack_chart(run), *lengths]
    body = joined(
        [
            header(run.name, headline(run), list(SECTIONS.items()), run.status),
            tag(
                "main",
                summary(run, everything, verdicts),
                curves(run, over_steps, verdicts),
                pairs(run, of_pairs, verdicts),
                answers(run),
                packing(run, pack),
                data(run, lengths),
                settings(run),
                footer(),
            ),
        ]
    )
    return document(f"{run.name} · tandem", body, {"charts": everything}, live=live)
