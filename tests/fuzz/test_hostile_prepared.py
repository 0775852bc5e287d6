"""Mutated prepared folders, most with a matching manifest, are read, or refused with a message."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import copy_of, files_below, mutate_file, remake_manifest, try_all
from models import MODEL

from tandem.config.load import load_config
from tandem.data.store import opening
from tandem.data.store.processes import Processes
from tandem.data.store.sets import open_sets
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.embedded.files import TRAIN
from tandem.packing.packer import DATASET_PACK, make_packer
from tandem.packing.packs import open_packs
from tandem.prepare import prepare_data
from tandem.report.reporter import Reporter

pytestmark = pytest.mark.slow

NUMBER = 2500
SETTINGS = [
    f"policy.model_name={MODEL}",
    "policy.max_total_sequence_length=512",
    "policy.packing.mode=dataset",
    "policy.train_global_batch_size=4",
    "data.on_bad_row=skip",
    "data.max_bad_share=0.5",
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    lines = TRAIN.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join([*lines[:20], '{"prompt": 1}\n']), encoding="utf-8")
    config = load_config(None, [*SETTINGS, f"data.train.data_path={folder}/few.jsonl"]).config
    prepare_data(config, Reporter("silent").progress, [1024], folder / "sets", None)
    return folder / "sets" / "train"


@pytest.mark.parametrize("part", range(5))
def test_mutated_prepared_folders_are_read_or_refused(
    tmp_path: Path, prepared: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    copy_of(prepared, victim)
    (victim / "file.txt").write_text("{}")
    template = make_template(load_tokenizer(Path(MODEL)), load_config(None, SETTINGS).config.policy.tokenizer)
    # Computed once for all children: the configuration, and the facts about the template.
    given = copy_of(prepared, tmp_path / "given")
    config = load_config(None, [*SETTINGS, f"data.train.data_path={given}", "policy.packing.pack_length=1024"]).config
    with Processes(template) as processes:
        facts = opening._text_fingerprints(processes)
    monkeypatch.setattr(opening, "_text_fingerprints", lambda processes: facts)

    def read() -> None:
        sets = open_sets(config, template)
        for index in range(len(sets.train)):
            sets.train[index].pairs, sets.train.place(index)
        packer = make_packer(sets.train, config.policy.packing, usual_auto=DATASET_PACK, pairs_per_batch=4, seed=0)
        for pack in open_packs(packer):
            packer.row(pack.tolist(), packer.length)

    read()

    def make(rng: random.Random) -> Callable[[], Any]:
        copy_of(prepared, given)
        mutate_file(rng, rng.choice(files_below(given)), victim)
        if rng.random() < 0.8:
            remake_manifest(given)
        return read

    tried = try_all("prepared", range(part * NUMBER // 5, (part + 1) * NUMBER // 5), make, victim)
    assert not tried.problems, str(tried)
