"""10,000 mutated inputs, configurations among them, are read or refused in words: nothing raises, crashes, hangs or leaks."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import CANARY, mutate_bytes, mutate_tree, try_all

from tandem.config.load import load_config
from tandem.paths import check_run

pytestmark = pytest.mark.slow

NUMBER = 4000
# What trees cannot say: anchors, tags, merges, documents, keys that are no text, nesting.
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
]


@pytest.mark.parametrize("part", range(4))
def test_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setenv("TANDEM_CANARY", CANARY)
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file.txt").write_text("run: {name: victim}\n")
    usual = yaml.safe_load(load_config(None, []).as_yaml())
    file = tmp_path / "given" / "config.yaml"
    file.parent.mkdir()

    def make(rng: random.Random) -> Callable[[], Any]:
        content = _written(rng, mutate_tree(rng, usual))
        if rng.random() < 0.2:
            content = mutate_bytes(rng, content)
        if rng.random() < 0.2:
            fragment = rng.choice(FRAGMENTS).encode()
            content = fragment if rng.random() < 0.5 else content + fragment
        file.write_bytes(content)
        return lambda: _read(file)

    try_all("configuration", range(part * NUMBER // 4, (part + 1) * NUMBER // 4), make, victim)


def _written(rng: random.Random, tree: Any) -> bytes:
    """As YAML, or as JSON, which is YAML too and can be nested deeper."""
    try:
        text = (
            yaml.safe_dump(tree) if rng.random() < 0.5 else json.dumps(tree, ensure_ascii=rng.random() < 0.5, indent=1)
        )
    except RecursionError:
        text = json.dumps(tree)
    return text.encode(errors="surrogatepass")


def _read(file: Path) -> None:
    loaded = load_config(str(file), [])
    loaded.as_yaml()
    check_run(loaded, fresh=False, per_pair=None)
