"""The sections of a run's page on its data: pairs, sample answers, packing, and the report on the sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.page.curves import Chart
from tandem.page.document import callout, empty, figure, section
from tandem.page.html import Markup, joined, number, percent, table, tag
from tandem.page.sections import figures_of
from tandem.run_numbers import number_in
from tandem.runs import Run, StoredVerdict
from tandem.terminal.printable import counted

KINDS = {
    "pairs_lost": (
        "Lost",
        "The policy prefers the rejected completion. The clearest disagreements, first: check their labels.",
    ),
    "pairs_won": ("Won", "The policy prefers the chosen completion by the largest margins."),
    "pairs_changed": ("Most changed", "The pairs whose margin changed most since the first validation."),
}
MAX_SPLITS = 8
MAX_LISTED = 50
LENGTHS = {
    "prompt_lengths": "Prompts",
    "completion_lengths": "Completions",
    "whole_lengths": "Prompt with longest completion",
}
SAMPLES_KEY = "logger.num_val_samples_to_print"


def pair_charts(run: Run) -> list[Chart]:
    """Histograms of margins, and accuracy by difference of length, of each validation set."""
    charts: list[Chart] = []
    for number_, (split, found) in enumerate(_sets(run)):
        ending = f"-{number_}" if number_ else ""
        of = "" if not number_ else f", {split}"
        charts += [*_margins_chart(found, f"margins{ending}", of), *_length_chart(found, f"length{ending}", of)]
    return charts


def _margins_chart(found: Mapping[str, Any], id: str, of: str) -> list[Chart]:
    bins = found.get("histogram")
    if not isinstance(bins, dict) or not _is_counts(bins.get("now")):
        return []
    first, width = number_in(bins, "first"), number_in(bins, "width")
    if first is None or not width:
        return []
    series = [{"name": f"step {found.get('step')}", "colour": 1, "counts": bins["now"]}]
    if _is_counts(bins.get("start")):
        series.append({"name": f"step {found.get('start_step')}", "colour": "muted", "counts": bins["start"]})
    return [
        {
            "kind": "histogram",
            "id": id,
            "title": f"Margins of the pairs{of}",
            "first": first,
            "width": width,
            "series": series,
            "x": "margin",
            "unit": "number of pairs",
            "help": "Right of 0 the policy agrees with the label.",
            "guides": [0],
        }
    ]


def _length_chart(found: Mapping[str, Any], id: str, of: str) -> list[Chart]:
    groups = found.get("lengths")
    groups = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    names = ("low", "high", "num_pairs", "accuracy", "margin")
    groups = [one for one in groups if all(number_in(one, name) is not None for name in names)]
    if len(groups) < 2:
        return []
    help = (
        "Pairs grouped by the tokens of the chosen completion minus those of the rejected. A slope: length is learnt."
    )
    return [
        {
            "kind": "bars",
            "id": id,
            "title": f"Accuracy by length{of}",
            "help": help,
            "format": "percent",
            "range": [0, 1],
            "unit": "",
            "x": "chosen minus rejected tokens",
            "guides": [0.5],
            "bars": [
                {
                    "label": _span(one["low"], one["high"]),
                    "value": one["accuracy"],
                    "note": f"{counted(int(one['num_pairs']), 'pair')}, mean margin {number(one['margin'], 3)}",
                }
                for one in groups
            ],
        }
    ]


def _span(low: float, high: float) -> str:
    words = f"{low:+.0f}" if low == high else f"{low:+.0f} to {high:+.0f}"
    return words.replace("-", "−").replace("+0", "0")


def _is_counts(found: Any) -> bool:
    return isinstance(found, list) and 0 < len(found) < 1000 and all(type(one) is int and one >= 0 for one in found)


def _sets(run: Run) -> list[tuple[str, dict[str, Any]]]:
    sets = run.pairs.get("sets")
    found = sets.items() if isinstance(sets, dict) else ()
    return [(split, one) for split, one in found if isinstance(one, dict)][:MAX_SPLITS]


def pairs(run: Run, charts: Sequence[Chart], verdicts: Sequence[StoredVerdict]) -> Markup:
    """Margins and accuracy over the pairs of the newest validation, and the pairs to read."""
    figures = figures_of(charts, verdicts)
    sets = _sets(run)
    if not sets:
        hint = (
            "No validation has been measured. Hold out some pairs with data.validation_share=0.1, or name a set: "
            "data.validation=FILE."
        )
        return section("pairs", "Pairs", empty(hint))
    return section("pairs", "Pairs", tag("div", *figures, class_="grid"), *(_split(*one) for one in sets))


def _split(split: str, found: Mapping[str, Any]) -> Markup:
    won, lost, num = (int(number_in(found, name) or 0) for name in ("won", "lost", "num_pairs"))
    tied = max(num - won - lost, 0)
    where = f"{split}, step {found.get('step')}: {won:,} won, {tied:,} tied, {lost:,} lost of {counted(num, 'pair')}"
    starts = {"won": (0, won), "tied": (won, tied), "lost": (won + tied, lost)}
    parts = [tag("rect", x=x, width=width, y=0, height=1, class_=name) for name, (x, width) in starts.items()]
    box = {"viewBox": f"0 0 {max(num, 1)} 1", "preserveAspectRatio": "none"}
    bar = tag("svg", *parts, class_="shares", role="img", aria_label=where, **box)
    lists = [_list(name, found.get(name)) for name in KINDS]
    return tag("div", tag("h3", where), bar, *lists, class_="split-pairs")


def _list(kind: str, found: Any) -> Markup | None:
    rows = [one for one in found if isinstance(one, dict)][:MAX_LISTED] if isinstance(found, list) else []
    title, meaning = KINDS[kind]
    if not rows:
        return tag("details", tag("summary", f"{title} (none)"), empty("No pair.")) if kind == "pairs_lost" else None
    doubtful = sum(bool(one.get("doubtful")) for one in rows)
    label = (
        f"{title} ({len(rows)} shown{f', {doubtful} likely mislabelled' if doubtful and kind == 'pairs_lost' else ''})"
    )
    is_open = kind == "pairs_lost"
    return tag(
        "details",
        tag("summary", label),
        tag("p", meaning, class_="help"),
        *(_pair(one, kind) for one in rows),
        open=is_open,
    )


def _pair(one: Mapping[str, Any], kind: str) -> Markup:
    margin, before = number_in(one, "margin"), number_in(one, "before")
    change = f"{number(before, 3)} → {number(margin, 3)}" if before is not None else number(margin, 3)
    badge = tag("span", "check the label", class_="badge") if one.get("doubtful") and kind == "pairs_lost" else None
    head = tag(
        "div",
        _place(one.get("place")),
        tag("span", f"margin {change}", class_="margin"),
        badge,
        class_="pair-head",
    )
    return tag(
        "article",
        head,
        _text("Prompt", one.get("prompt"), "prompt"),
        tag(
            "div",
            _text(_answer_title("Chosen", one, "chosen"), one.get("chosen"), "chosen"),
            _text(_answer_title("Rejected", one, "rejected"), one.get("rejected"), "rejected"),
            class_="two",
        ),
        class_="pair",
    )


def _answer_title(name: str, one: Mapping[str, Any], role: str) -> str:
    tokens, reward = number_in(one, f"tokens_{role}"), number_in(one, f"reward_{role}")
    size = "" if tokens is None else f", {counted(int(tokens), 'token')}"
    return f"{name}{size}{'' if reward is None else f', reward {number(reward, 3)}'}"


def _text(title: str, words: Any, role: str) -> Markup:
    shown = words if isinstance(words, str) else ""
    blank = f"(white space only, {len(shown):,} characters)" if shown else "(empty)"
    inside = tag("pre", shown, dir="auto", tabindex="0") if shown.strip() else empty(blank)
    return tag("div", tag("h4", title), inside, class_=f"text {role}")


def _place(found: Any) -> Markup:
    """The file and line of a row. The folder is shown only under the pointer: it is long, and often private."""
    place = found if isinstance(found, str) else ""
    return tag("code", place.rpartition("/")[2], title=place)


def answers(run: Run) -> Markup:
    """The answers to validation prompts, before and after."""
    if not run.samples:
        hint = joined(
            [
                "None were generated. ",
                tag("code", f"{SAMPLES_KEY}=4"),
                " answers four validation prompts at every validation.",
            ]
        )
        return section("answers", "Sample answers", empty(hint))
    first, last = min(run.samples), max(run.samples)
    before = {str(one["prompt"]): one for one in run.samples[first]}
    rows = []
    for one in run.samples[last][:MAX_LISTED]:
        earlier = before.get(str(one["prompt"]), {}).get("policy") if first != last else None
        reference = one.get("reference")
        start, title = (earlier, f"Step {first:,}") if earlier is not None else (reference, "Reference")
        rows.append(
            tag(
                "article",
                tag("div", _place(one.get("place")), class_="pair-head"),
                _text("Prompt", one["prompt"], "prompt"),
                tag(
                    "div",
                    None if start is None else _text(title, start, "before"),
                    _text(f"Step {last:,}", one["policy"], "after"),
                    class_="two",
                ),
                class_="pair",
            )
        )
    return section("answers", "Sample answers", *rows, intro="The same prompts, answered greedily by the policy.")


def packing(run: Run, charts: Sequence[Chart]) -> Markup:
    figures = [figure(one) for one in charts]
    rows = run.setup.get("rows")
    words = f"Rows: {rows}." if isinstance(rows, str) else ""
    return section("packing", "Packing", *figures or [empty("No pack was recorded.")], intro=words)


def pack_chart(run: Run) -> list[Chart]:
    """The picture of a pack, if the run stored one."""
    pack = run.setup.get("pack")
    if not isinstance(pack, dict) or not isinstance(pack.get("segments"), list):
        return []
    length = int(number_in(pack, "length") or 0)
    segments = [one for one in pack["segments"] if isinstance(one, dict) and _is_inside(one, length)]
    if not segments or length > 1 << 20:
        return []
    tokens = sum(one["tokens"] for one in segments)
    preferences = len({one.get("preference") for one in segments})
    help = (
        f"The first row of the first batch: {counted(preferences, 'preference')}, {tokens:,} of {length:,} "
        f"positions used ({percent(tokens / length)}). Each colour is one preference: its prompt is dark, its chosen completion "
        "medium, its rejected completion light. Read it line by line, like text."
    )
    return [
        {
            "kind": "pack",
            "id": "pack",
            "title": "A pack of this run",
            "help": help,
            "length": length,
            "segments": segments,
            "unit": "",
        }
    ]


def _is_inside(one: Mapping[str, Any], length: int) -> bool:
    start, tokens = one.get("start"), one.get("tokens")
    return type(start) is int and type(tokens) is int and 0 <= start < start + tokens <= length


def data(run: Run, charts: Sequence[Chart]) -> Markup:
    sets = _preflights(run)
    if not sets:
        return section("data", "Data", empty("The run did not store its report on the data."))
    rows = [_row(one) for one in sets]
    heads = [
        "set",
        "rows",
        "accepted",
        "bad",
        "filtered",
        "pairs",
        "prompt tokens",
        "completion tokens",
        "longest",
        "sharing saves",
    ]
    warnings = [text for one in sets if isinstance(found := one.get("warnings"), list) for text in found]
    notes = [callout("warn", "", text) for text in warnings if isinstance(text, str)]
    return section(
        "data",
        "Data",
        table(heads, rows, numeric=range(1, 10)),
        *notes,
        *(_notes(one, run) for one in sets),
        tag("div", *(figure(one) for one in charts), class_="grid three"),
    )


def _preflights(run: Run) -> list[dict[str, Any]]:
    found = run.setup.get("sets")
    return [one for one in found if isinstance(one, dict)][:100] if isinstance(found, list) else []


def _row(one: Mapping[str, Any]) -> list[str]:
    counts = one.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    reasons = [found if isinstance(found := counts.get(kind), dict) else {} for kind in ("bad", "filtered")]
    left_out = [sum(count for count in one.values() if type(count) is int) for one in reasons]
    totals = [number_in(counts, "rows"), number_in(counts, "accepted"), *left_out]
    totals += [number_in(one, name) for name in ("num_pairs", "prompt_tokens", "completion_tokens", "longest")]
    saved = number_in(one, "shared_saving")
    shown = ["–" if total is None else f"{int(total):,}" for total in totals]
    return [str(one.get("name")), *shown, "–" if saved is None else percent(saved, 0)]


def _notes(one: Mapping[str, Any], run: Run) -> Markup:
    """How a set was read, what was skipped and noted, and its overlap with training."""
    name = str(one.get("name"))
    items = [f"read as {one.get('format')}, {one.get('format_reason')}"]
    if held_out := number_in(one, "num_held_out"):
        items.append(
            f"held out: {counted(int(held_out), 'preference')}; pairs, tokens and lengths are of those trained on"
        )
    items += [f"skipped {count:,}: {reason}" for (split, reason), count in run.rejects.items() if split == name]
    noted = one.get("notes")
    items += (
        [f"noted {count:,}: {note}" for note, count in noted.items() if type(count) is int]
        if isinstance(noted, dict)
        else []
    )
    overlap, ngrams = number_in(one, "prompt_overlap"), number_in(one, "ngram_overlap")
    if overlap is not None:
        shared = "" if ngrams is None else f", 8-gram overlap of completions {percent(ngrams)}"
        items.append(f"prompt overlap with training {int(overlap):,}{shared}")
    return tag("div", tag("strong", name), tag("ul", *(tag("li", item) for item in items)), class_="notes")


def length_charts(run: Run) -> list[Chart]:
    """Histograms of the lengths of the training data, and of the first validation set."""
    charts = []
    sets = _preflights(run)[:2]
    for name, title in LENGTHS.items():
        series = []
        for number_, one in enumerate(sets):
            found = one.get(name)
            if isinstance(found, dict) and _is_counts(found.get("histogram")):
                longest = number_in(found, "longest") or 0
                series.append(
                    {"name": str(one.get("name")), "colour": number_, "counts": found["histogram"], "longest": longest}
                )
        if series:
            charts.append(_length_histogram(name, title, series))
    return charts


def _length_histogram(name: str, title: str, series: list[dict[str, Any]]) -> Chart:
    """Sets have bins of different widths, so each series has its own, and shares of the set instead of counts."""
    for one in series:
        total, bins = sum(one["counts"]) or 1, len(one["counts"])
        one["width"] = max(one.pop("longest"), bins) / bins
        one["counts"] = [count / total for count in one["counts"]]
    return {
        "kind": "histogram",
        "id": f"lengths-{name}",
        "title": title,
        "first": 0,
        "width": series[0]["width"],
        "series": series,
        "x": "tokens",
        "unit": "share of the set",
        "help": "",
        "format": "percent",
    }
