"""Draws measurements of benchmarks/train.py: pairs per second and memory over the pack length, and where the time of a step goes.
Also draws how many times as fast as TRL tandem is, and the curves of one run.

    python benchmarks/plots.py RESULTS.jsonl [--lengths docs/pack-length.svg] [--step docs/step-time.svg]
    python benchmarks/plots.py benchmarks/results/versus_trl.jsonl --ratios docs/versus-trl.svg
    python benchmarks/plots.py benchmarks/results/embedded_run.jsonl --curve docs/curve.svg

RESULTS.jsonl: the last lines of runs of benchmarks/train.py. Runs with the same shape, weights or adapters, and checkpointing
form a line of the first plot; each run with --profile is a bar of the second. Other options are not distinguished.
versus_trl.jsonl: one line for each setting that benchmarks/versus_trl.py measured, with its conditions.
embedded_run.jsonl: metrics.jsonl of a run of the embedded default (`make train`).
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from drawing import COLOURS, key, line, rule, svg, text
from options import options_of

WIDTH, LEFT, RIGHT, PANEL, BAR = 760, 70, 30, 200, 26
IDLE = "nothing runs"


def label_of(run: dict[str, Any]) -> str:
    """The label of a run: the model's shape, its weights or adapters, and its checkpointing if any."""
    kinds = [f"{run['weights'].partition('_')[0]} weights" if not run["lora"] else f"adapters of rank {run['lora']}"]
    kinds += [f"checkpointing {run['checkpointing']}"] if run["checkpointing"] != "none" else []
    return ", ".join([run["shape"], *kinds])


def over_length(runs: list[dict[str, Any]]) -> str:
    """Two panels over the pack length, one above the other: speed and peak memory."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["pack_length"]):
        lines[label_of(run)].append(run)
    lines = {name: of for name, of in lines.items() if len(of) > 1}
    lengths = sorted({run["pack_length"] for of in lines.values() for run in of})
    if len(lengths) < 2:
        raise SystemExit("no two runs of one shape, weights and checkpointing differ in --pack-length")

    def x(length: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * lengths.index(length) / (len(lengths) - 1)

    parts: list[str] = []
    for number, (field, title) in enumerate((("pairs_per_second", "pairs a second"), ("peak_gib", "GiB at most"))):
        top = 50 + number * (PANEL + 70)
        most = max(run[field] for of in lines.values() for run in of)

        def y(value: float, top: float = top, most: float = most) -> float:
            return top + PANEL * (1 - value / most)

        parts.append(text(LEFT, top - 14, title, weight="bold"))
        for share in (0, 0.25, 0.5, 0.75, 1):
            parts.append(rule(LEFT, y(share * most), WIDTH - LEFT - RIGHT))
            parts.append(text(LEFT - 8, y(share * most) + 4, f"{share * most:.0f}", anchor="end"))
        parts += [text(x(length), top + PANEL + 20, f"{length:,}", anchor="middle") for length in lengths]
        for of, colour in zip(lines.values(), COLOURS, strict=False):
            parts.append(line([(x(run["pack_length"]), y(run[field])) for run in of], colour))
    below = 50 + 2 * (PANEL + 70)
    parts.append(text(WIDTH - RIGHT, below - 28, "tokens in a pack", anchor="end"))
    for number, (name, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        parts += key(LEFT, below + number * 24, name, colour)
    return svg(WIDTH, below + len(lines) * 24, parts)


def of_step(runs: list[dict[str, Any]]) -> str:
    """A stacked bar for each run: the share of each kind of kernel and of idle time."""
    bars = {label_of(run): _shares(run["where_time_goes"]) for run in runs if run.get("where_time_goes")}
    if not bars:
        raise SystemExit("no run has --profile")
    kinds = [*dict.fromkeys(kind for shares in bars.values() for kind in shares if kind != IDLE), IDLE]
    colours = dict(zip(kinds, COLOURS, strict=False)) | {IDLE: "#eeeeee"}
    parts = [text(LEFT, 28, "where a step's time goes", weight="bold")]
    for number, (name, shares) in enumerate(bars.items()):
        top, at = 64 + number * (BAR + 34), float(LEFT)
        parts.append(text(LEFT, top - 8, name))
        for kind in kinds:
            width = (WIDTH - LEFT - RIGHT) * shares.get(kind, 0.0)
            parts.append(f'<rect x="{at:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colours[kind]}"/>')
            at += width
    below = 64 + len(bars) * (BAR + 34)
    for number, kind in enumerate(kinds):
        parts += key(LEFT + number % 3 * 225, below + number // 3 * 24, kind, colours[kind])
    return svg(WIDTH, below + -(-len(kinds) // 3) * 24, parts)


def versus_trl(measured: list[dict[str, Any]]) -> str:
    """Two bars for each setting, tandem's speed over TRL's and TRL's as 1; below them the conditions, one line each."""
    if not measured:
        raise SystemExit("no line is of versus_trl")
    unit = (WIDTH - LEFT - RIGHT - 150) / max(one["ratio"] for one in measured)
    parts = [text(LEFT, 28, "training speed in pairs a second, TRL = 1", weight="bold")]
    for number, one in enumerate(measured):
        top = 64 + number * (2 * BAR + 40)
        parts.append(text(LEFT, top - 8, one["name"]))
        for system, ratio, label, at, colour in (
            ("tandem", one["ratio"], f"{one['ratio']:.2f}", top, COLOURS[0]),
            ("trl", 1.0, "1", top + BAR, COLOURS[5]),
        ):
            end = LEFT + unit * ratio
            parts.append(text(LEFT - 8, at + 16, {"trl": "TRL"}.get(system, system), anchor="end"))
            parts.append(f'<path d="M{LEFT} {at}H{end:.1f}v{BAR - 4}H{LEFT}z" fill="{colour}"/>')
            parts.append(text(end + 8, at + 16, f"{label} ({one[system]['pairs_per_second']} pairs/s)"))
    below = 64 + len(measured) * (2 * BAR + 40)
    conditions = [*dict.fromkeys(condition for one in measured for condition in one["conditions"])]
    parts += [text(LEFT, below + number * 20, condition) for number, condition in enumerate(conditions)]
    return svg(WIDTH, below + len(conditions) * 20, parts)


def over_steps(records: list[dict[str, Any]]) -> str:
    """A panel for each metric over the steps of a run: the training pairs of every step, and the validation set."""
    training = [one for one in records if one.get("split") == "train"]
    validation = [one for one in records if one.get("split", "").startswith("validation-")]
    if not training or not validation:
        raise SystemExit("no training steps or no validation: this needs metrics.jsonl of a run")
    last = training[-1]["step"]

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    parts: list[str] = []
    panels = (("loss", "loss"), ("accuracy", "accuracy"), ("rewards_margin_mean", "rewards margin"))
    for number, (field, title) in enumerate(panels):
        top = 50 + number * (PANEL + 60)
        most = max(one[field] for one in (*training, *validation))
        for share in (0, 0.25, 0.5, 0.75, 1):
            at = top + PANEL * (1 - share)
            parts += [rule(LEFT, at, WIDTH - LEFT - RIGHT), text(LEFT - 8, at + 4, f"{share * most:.2f}", anchor="end")]
        parts.append(text(LEFT, top - 14, title, weight="bold"))
        parts += [text(x(step), top + PANEL + 18, f"{step}", anchor="middle") for step in range(0, last + 1, 2)]
        for lines, colour, dash in ((training, COLOURS[0], ""), (validation, COLOURS[1], "6 4")):
            points = [(x(one["step"]), top + PANEL * (1 - one[field] / most)) for one in lines]
            parts.append(line(points, colour, dash))
    below = 50 + len(panels) * (PANEL + 60)
    parts.append(text(WIDTH - RIGHT, below - 18, "optimizer step", anchor="end"))
    parts += key(LEFT, below + 4, "training pairs of each step", COLOURS[0])
    parts += key(LEFT + 260, below + 4, f"{validation[-1]['num_pairs']} validation pairs", COLOURS[1], "6 4")
    return svg(WIDTH, below + 24, parts)


def _shares(given: dict[str, float]) -> dict[str, float]:
    """Shares that add up to 1: kernels can overlap slightly, so theirs are scaled to the time that is not idle."""
    kinds = {kind: share for kind, share in given.items() if kind not in ("idle", "seconds")}
    scale = (1 - given["idle"]) / sum(kinds.values())
    return {**{kind: share * scale for kind, share in kinds.items()}, IDLE: given["idle"]}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--step", type=Path)
    parser.add_argument("--ratios", type=Path)
    parser.add_argument("--curve", type=Path)
    o = parser.parse_args()
    if not o.results.is_file():
        parser.error(f"{o.results}: there is no such file")
    runs = [json.loads(written) for written in o.results.read_text(encoding="utf-8").splitlines() if written.strip()]
    if o.lengths is None and o.step is None and o.ratios is None and o.curve is None:
        sys.exit("nothing to draw: give --lengths FILE, --step FILE, --ratios FILE or --curve FILE")
    plots = ((o.lengths, over_length, "train"), (o.step, of_step, "train"), (o.ratios, versus_trl, "versus_trl"))
    for place, draw, benchmark in plots:
        if place is not None:
            place.write_text(draw([run for run in runs if run.get("benchmark") == benchmark]), encoding="utf-8")
    if o.curve is not None:
        o.curve.write_text(over_steps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
