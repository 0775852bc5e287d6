"""Compares the speed of `tandem eval` with TRL's evaluation loop (DPOTrainer.evaluate) on the same pairs.

    python benchmarks/evaluate.py --shape qwen2.5-0.5b --pairs 2048 [--settings tuned stock] [--trl-python PYTHON]
    python benchmarks/evaluate.py --model FOLDER --reference FOLDER --data pairs.jsonl

Both read the same token ids and compute the same rewards; their accuracies are printed side by side. tandem has computed the
reference's log-probabilities before, as in every evaluation but the first. tuned: so has TRL, with pairs sorted by length and the
fastest attention. stock: TRL's defaults, which compute the reference in each evaluation. Each side runs once to warm up. Without
--trl-python only tandem is timed. The last line is one JSON object.
"""

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import trl_python
from made_model import SHAPES, make_model
from options import options_of
from versus_trl import ratio, run

from tandem.embedded.files import TRAIN, VALIDATION
from tandem.evaluation.measure import MeasuredSet, measure_model
from tandem.evaluation.request import check_request
from tandem.model.files.tiny import tiny_model
from tandem.report.reporter import Reporter
from tandem.training.metrics import above

# TRL's pairs in a batch. 16 leave room for the logits of long pairs; 8 is TRL's default.
MICRO_BATCH = {"tuned": 16, "stock": 8}


def write_pairs(path: Path, num: int, words: int) -> Path:
    """Write pairs of random words: prompts of `words` on average, completions of a quarter more, log-normal with sigma 0.7."""
    chosen = random.Random(0)
    rng = np.random.default_rng(0)
    known = sorted({word for line in TRAIN.read_text().splitlines() for word in json.loads(line)["chosen"].split()})

    def text(mean: float) -> str:
        return " ".join(chosen.choices(known, k=max(2, int(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7)))))

    rows = [{"prompt": text(words), "chosen": text(1.25 * words), "rejected": text(1.25 * words)} for _ in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_ids(path: Path, one: MeasuredSet) -> Path:
    """Write the tokens that tandem measured, for TRL."""
    with path.open("w") as out:
        for preference in one.set.store:
            for winner, loser in preference.pairs:
                ids = (preference.prompt, preference.completions[winner], preference.completions[loser])
                names = ("prompt_ids", "chosen_ids", "rejected_ids")
                out.write(json.dumps({name: part.tolist() for name, part in zip(names, ids, strict=True)}) + "\n")
    return path


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="a random model of this shape, instead of --model")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--reference", help="if not given, the same as the model")
    parser.add_argument("--data", type=Path, help="pairs; if not given, --pairs of random words, or the bundled ones")
    parser.add_argument("--pairs", type=int, help="make this many pairs of random words")
    parser.add_argument("--words", type=int, default=100, help="mean words of a prompt")
    parser.add_argument("--settings", choices=MICRO_BATCH, nargs="+", default=["tuned"], help="how TRL is set up")
    parser.add_argument("--repeats", type=int, default=1, help="timed evaluations of each, of which the median counts")
    parser.add_argument("--trl-python", help="a Python that has TRL")
    parser.add_argument(
        "--folder", type=Path, help="where models and pairs are written; if not given, a temporary folder"
    )
    o = parser.parse_args()
    if o.trl_python:
        trl_python.check(o.trl_python, "datasets", "trl")
    folder = o.folder or Path(tempfile.mkdtemp(prefix="tandem-evaluate-"))
    folder.mkdir(parents=True, exist_ok=True)
    model, reference = o.model, o.reference or o.model
    if o.shape:
        model = str(make_model(o.shape, str(tiny_model()), folder / o.shape))
        reference = str(make_model(o.shape, str(tiny_model()), folder / f"{o.shape}-reference", seed=1))
    data = o.data or (write_pairs(folder / "pairs.jsonl", o.pairs, o.words) if o.pairs else VALIDATION)
    request = check_request(model, [str(data)], reference=reference)
    quiet = Reporter("quiet")
    measure_model(request.subject, request.data, None, quiet)  # computes the reference and warms up
    measured = [measure_model(request.subject, request.data, None, quiet) for _ in range(o.repeats)]
    (only,) = measured[0].sets
    found: dict[str, Any] = {
        "benchmark": "evaluate",
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(o).items()},
        "num_pairs": len(only.table),
        "tandem": {
            "pairs_per_second": round(len(only.table) / statistics.median(one.seconds for one in measured), 2),
            "seconds": [round(one.seconds, 3) for one in measured],
            "accuracy": float(above(only.table.margin, 0.0).mean()),
        },
    }
    print(f"tandem: {found['tandem']['pairs_per_second']} pairs/s", flush=True)  # TRL may take minutes
    theirs: dict[str, Any] = {}
    if o.trl_python:
        folders = [str(tiny_model()) if one == "embedded" else one for one in (model, reference)]
        ids = write_ids(folder / "ids.jsonl", only)
        for setting in o.settings:
            theirs[setting] = run(
                o.trl_python,
                "trl_evaluate.py",
                *("--model", folders[0], "--reference", folders[1], "--data", str(ids)),
                *("--micro-batch", str(MICRO_BATCH[setting]), "--repeats", str(o.repeats)),
                *(["--stock"] if setting == "stock" else []),
            )
            speed = theirs[setting]["pairs_per_second"]
            print(f"TRL, {setting}: {speed} pairs/s, ratio {ratio(found['tandem'], theirs[setting])}", flush=True)
    print(json.dumps(found | {"trl": theirs}))
    raise SystemExit(any(one["pairs_per_second"] is None for one in theirs.values()))


if __name__ == "__main__":
    main()
