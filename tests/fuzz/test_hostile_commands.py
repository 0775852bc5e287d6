"""Runs commands on 200 mutated inputs. Each ends with a message and a known exit code, and changes no other files."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import CANARY, MEMORY, Attempts, copy_of, files_below, mutate_file, remake_manifest, snapshot
from hostile_inputs import mutated_configuration, mutated_run
from killing import tandem_in
from models import MODEL
from running import SHORT, few_pairs, saving_settings, unfinished_run

from tandem.config.load import load_config
from tandem.prepare import prepare_data
from tandem.report.reporter import Reporter
from tandem.terminal.printable import UNSAFE

pytestmark = pytest.mark.slow

NUMBER = 50  # inputs of each kind
SECONDS = 60.0
EXIT_CODES = range(8)
# Keys that could make a run write elsewhere.
PLACES = ["checkpointing.checkpoint_dir=null", "reference.cache_dir=null", "logger.log_dir=null"]

Make = Callable[[random.Random], list[str]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs of commands, which must not change, and a folder `own`, in which commands may write."""
    top = tmp_path_factory.mktemp("commands")
    pairs = few_pairs(top / "pairs", 20)
    copy_of(unfinished_run(top, saving_settings(top / "pairs")), top / "victim")
    (top / "victim" / "file.txt").write_text("{}")
    prepare_data(load_config(None, [*SHORT, pairs]).config, Reporter("silent").progress, [1024], top / "sets", None)
    for name in ("home", "own"):
        (top / name).mkdir()
    return top


def test_commands_read_or_refuse_mutated_models(places: Path) -> None:
    pairs = f"data.train.data_path={places}/pairs/few.jsonl"

    def make(rng: random.Random) -> list[str]:
        given = copy_of(Path(MODEL), places / "given")
        mutate_file(rng, rng.choice(files_below(given)), places / "victim")
        name = f"policy.model_name={given}"
        inspected = ["inspect", f"{places}/pairs/few.jsonl", "--model", str(given)]
        trained = ["train", *SHORT, pairs, name, "dpo.max_num_steps=1", f"run.dir={places}/own/run"]
        return rng.choice([inspected, ["prepare", *SHORT, pairs, name], trained])

    tried = _try_commands("model", make, places)
    assert not tried.problems, str(tried)
    assert len(tried.counts) > 1  # some inputs are refused


def test_commands_read_or_refuse_mutated_prepared_folders(places: Path) -> None:
    def make(rng: random.Random) -> list[str]:
        given = copy_of(places / "sets" / "train", places / "given")
        mutate_file(rng, rng.choice(files_below(given)), places / "victim")
        if rng.random() < 0.8:
            remake_manifest(given)
        trained = ["train", *SHORT, f"data.train.data_path={given}", "dpo.max_num_steps=1"]
        inspected = ["inspect", str(given), *SHORT]
        return rng.choice([inspected, [*trained, f"run.dir={places}/own/run"]])

    tried = _try_commands("prepared", make, places)
    assert not tried.problems, str(tried)
    assert len(tried.counts) > 1  # some inputs are refused


def test_commands_read_or_refuse_mutated_configurations(places: Path) -> None:
    usual = yaml.safe_load(load_config(None, []).as_yaml())
    trained = [*PLACES, "dpo.max_num_steps=1", f"run.dir={places}/own/run"]

    def make(rng: random.Random) -> list[str]:
        file = copy_of(places / "pairs", places / "given") / "config.yaml"
        file.write_bytes(mutated_configuration(rng, usual))
        given = ["--config", str(file)]
        inspected = ["inspect", f"{places}/pairs/few.jsonl", *given]
        return rng.choice([["config", *given], ["prepare", *given], inspected, ["train", *given, *trained]])

    tried = _try_commands("configuration", make, places)
    assert not tried.problems, str(tried)
    assert len(tried.counts) > 1  # some inputs are refused


def test_commands_resume_or_refuse_mutated_runs(places: Path) -> None:
    again = ["train", *SHORT, *saving_settings(places / "pairs"), f"run.dir={places}/own/run"]

    def make(rng: random.Random) -> list[str]:
        given = mutated_run(rng, places / "run", places / "own" / "run", places / "victim")
        return rng.choice([["train", "--resume", str(given)], again, [*again, "--json"]])

    tried = _try_commands("run", make, places)
    assert not tried.problems, str(tried)
    assert len(tried.counts) > 1  # some inputs are refused


def _try_commands(kind: str, make: Make, places: Path) -> Attempts:
    """Run the command for every seed. Returns the problems, and the number of commands by exit code."""
    wrong: list[str] = []
    counts: dict[int, int] = {}
    for seed in range(NUMBER):
        copy_of(places / "home", places / "own")  # empty
        arguments = make(random.Random(f"{kind} {seed}"))
        before = _others(places)
        environment = {"TANDEM_CANARY": CANARY, "TANDEM_CACHE": f"{places}/own/cache", "HOME": f"{places}/home"}
        ended = tandem_in(places / "own", places / "said", arguments, seconds=SECONDS, memory=MEMORY, **environment)
        problems = [f"still running after {SECONDS} seconds"] if ended is None else _problems(ended)
        after = _others(places)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        problems += [f"changed {changed}"] if changed else []
        wrong += [f"{kind} {seed}: tandem {' '.join(arguments)}\n  {problem}" for problem in problems]
        if ended is not None:
            counts[ended.code] = counts.get(ended.code, 0) + 1
    return Attempts(wrong, counts)


def _problems(ended: Any) -> list[str]:
    said = ended.out + ended.err
    found = {
        f"exit code {ended.code}": ended.code not in EXIT_CODES,
        "a traceback": "Traceback" in said,
        "control characters": UNSAFE.search(said) is not None,
        "a value of the environment": CANARY in said,
        "an error without a message": ended.code != 0 and re.search("error|Error", ended.err) is None,
    }
    return [f"{what}: {said[-1500:]!r}" for what, is_so in found.items() if is_so]


def _others(places: Path) -> dict[str, Any]:
    """The files that a command must not change."""
    return {name: found for name, found in snapshot(places).items() if not name.startswith(("own", "said"))}
