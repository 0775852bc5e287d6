"""Makes malicious configurations and run directories."""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from hostile import copy_of, files_below, mutate_bytes, mutate_file, mutate_tree, remake_manifest

# YAML that a mutated tree cannot contain: anchors, tags, merges, documents, keys that are not strings, nesting.
FRAGMENTS = [
    "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b]\n"
    "d: &d [*c, *c, *c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e, *e]\n"
    "g: &g [*f, *f, *f, *f, *f, *f, *f, *f]\nh: [*g, *g, *g, *g, *g, *g, *g, *g]\n",
    "dpo: &d\n  beta: *d\n",
    "run: !!python/object/apply:os.system [id]\n",
    "<<: {dpo: {}}\n",
    "<<: [1]\n",
    "---\na: 1\n---\nb: 2\n",
    "? [1, 2]\n: 3\n",
    "1: 2\n",
    "null: 2\n",
    "2026-11-17: 2026-11-17\n",
    "dpo: " + "{a: " * 500 + "1" + "}" * 500 + "\n",
    "dpo: " + "[" * 30_000 + "\n",
    "x: !!binary |\n  R0lGODlhDAAMAIQAAP\n",
    "x: !!set {a, b}\n",
    "run: {name: 'a\\u202eb\x1b[2J'}\n",
    "defaults: [base, _self_]\n",
    "defaults: ../victim/file.txt\n",
    "run: ${run}\n",
    "run: {name: '${run.name}'}\n",
    "run: {name: '${oc.env:TANDEM_CANARY}', dir: ${oc.decode:${oc.env:TANDEM_CANARY}}}\n",
    "run: {name: '${oc.${run.dir}:TANDEM_CANARY}', dir: env}\n",
    "dpo: {preference_loss: '${oc.env:TANDEM_CANARY}'}\n",
    "policy: {train_global_batch_size: '${oc.env:TANDEM_CANARY}'}\n",
    "\ufeff",
    "\t",
    "%YAML 3.0\n---\n",
    "policy: {scheduler: {name: cosine, warmup_ratio: .inf}}\n",
    "policy: {scheduler: [{name: torch.os.system}]}\n",
    "a: '${b}${b}'\nb: '${c}${c}'\nc: " + "'${d}${d}'\nd: '${e}${e}'\ne: '${f}${f}'\nf: '${g}${g}'\ng: '${a}'\n",
    "data: {" + "".join(f"x{n}: '${{data.x{n + 1}}}${{data.x{n + 1}}}', " for n in range(40)) + "x40: x}\n",
    "data: {x: [" + "1, " * 2000 + "], y: [" + "'${data.x}', " * 300 + "]}\n",
    "run: {name: '" + "${policy.model_name}" * 3000 + "'}\n",
]
# Names of foreign files and links in a run directory.
FOREIGN = [
    *(".step_1.backup", ".best.txt", ".config.yaml.swp", "step_²", "step_1", "step_100", "step_100.damaged"),
    *("notes.txt", "model", "samples", "logs"),
]


def mutated_configuration(rng: random.Random, usual: Any) -> bytes:
    content = _written(rng, mutate_tree(rng, usual))
    if rng.random() < 0.2:
        content = mutate_bytes(rng, content)
    if rng.random() < 0.2:
        fragment = rng.choice(FRAGMENTS).encode()
        content = fragment if rng.random() < 0.5 else content + fragment
    return content


def _written(rng: random.Random, tree: Any) -> bytes:
    """Serialise as YAML, or as JSON, which is also YAML and can be nested deeper."""
    try:
        text = (
            yaml.safe_dump(tree) if rng.random() < 0.5 else json.dumps(tree, ensure_ascii=rng.random() < 0.5, indent=1)
        )
    except RecursionError:
        text = json.dumps(tree)
    return text.encode(errors="surrogatepass")


def mutated_run(rng: random.Random, run: Path, to: Path, victim: Path) -> Path:
    """Copy a run with one thing in it changed, added or linked elsewhere. Manifests are usually rewritten to match."""
    given = copy_of(run, to)
    kind = rng.random()
    if kind < 0.15:
        _put_foreign(rng, rng.choice([given, given / "checkpoints"]) / rng.choice(FOREIGN), victim)
    elif kind < 0.25:
        _relink(rng, given / "checkpoints" / rng.choice(["best", "latest", "step_3"]), victim)
    else:
        file = rng.choice(files_below(given))
        mutate_file(rng, file, victim)
        if rng.random() < 0.8 and (file.parent / "manifest.json").exists():
            remake_manifest(file.parent)
        if file.parent.name == "tensors" and rng.random() < 0.8:
            remake_manifest(file.parents[1])
    return given


def _put_foreign(rng: random.Random, place: Path, victim: Path) -> None:
    match rng.choice(["file", "folder", "link", "link to folder"]):
        case "file":
            place.write_text("mine")
        case "folder":
            place.mkdir()
            (place / "mine.txt").write_text("mine")
        case "link":
            place.symlink_to(victim / "file.txt")
        case "link to folder":
            place.symlink_to(victim)


def _relink(rng: random.Random, place: Path, victim: Path) -> None:
    """Replace a link or checkpoint with something else of the same name."""
    if place.is_symlink():
        place.unlink()
    else:
        place.rename(place.with_name(f"was_{place.name}"))
    match rng.choice(["folder", "elsewhere", "upwards", "self", "file", "absent"]):
        case "folder":
            place.mkdir()
            (place / "mine.txt").write_text("mine")
        case "elsewhere":
            place.symlink_to(victim / "checkpoints" / "step_2")
        case "upwards":
            place.symlink_to("../../..")
        case "self":
            place.symlink_to(place.name)
        case "file":
            place.write_text("mine")
        case "absent":
            place.symlink_to("step_77")
