"""Runs `tandem` in separate processes that may be killed. They are forked from a server that has imported everything."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import MODEL
from running import VARYING, weights_of

from tandem.storage.cache import read_manifest
from tandem.training.checkpoint.checkpoints import checkpoints

# torch reads it when it is imported, which is in the server. `tandem` sets it for ranks.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "tandem.cli.main",
        "tandem.training.trainer",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)

# A run of about a second that reaches every fail point: four steps of eight pairs, each saved, every second one validated.
SETTINGS = [
    *("dpo.max_num_steps=4", "dpo.val_period=2", "dpo.val_at_start=true", "dpo.val_at_end=true"),
    *("checkpointing.save_period=1", "checkpointing.keep_top_k=1"),
    *("policy.train_global_batch_size=8", "policy.max_total_sequence_length=128", "data.max_filtered_share=0.2"),
    *(
        "policy.packing.mode=dataset",
        "policy.packing.pack_length=128",
        *("policy.optimizer.kwargs.lr=1e-3", "policy.optimizer.kwargs.weight_decay=0.01"),
        "policy.scheduler=null",
    ),
]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended and what it printed."""

    code: int  # negative: the signal that killed it
    out: str
    err: str


@dataclass(slots=True)
class Child:
    process: Any
    folder: Path

    def ended(self, seconds: float = 300) -> Ended:
        """Wait until the process ends."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {seconds} seconds:\n{self._printed('out')}{self._printed('err')}")
        return Ended(self.process.exitcode, self._printed("out"), self._printed("err"))

    def wait_until_stopped(self, seconds: float = 120) -> None:
        """Wait until a signal stopped the process. Fail if it ends instead."""
        until = time.monotonic() + seconds
        status = Path(f"/proc/{self.process.pid}/stat")
        while not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert self.process.is_alive(), f"ended, but was never stopped: {self.ended()}"
            assert time.monotonic() < until, f"not stopped after {seconds} seconds"
            time.sleep(0.01)

    def _printed(self, stream: str) -> str:
        file = self.folder / f"{self.process.pid}.{stream}"
        return file.read_text(errors="replace") if file.exists() else ""  # killed before it could print anything


def start(output: Path, arguments: list[str], **environment: str) -> Child:
    """Start `tandem` with these arguments. Its output goes to files in the folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    process = SERVER.Process(target=run_command, args=(output, arguments, environment))
    process.start()
    return Child(process, output)


def run_command(output: Path, arguments: list[str], environment: dict[str, str]) -> None:
    """Run `tandem` with these arguments in this process."""
    from tandem.cli import main as cli

    os.environ.update(environment)
    redirect_output(output)
    sys.argv = ["tandem", *arguments]
    cli.main()


def tandem_in(
    folder: Path, output: Path, arguments: list[str], *, seconds: float, memory: int, **environment: str
) -> Ended | None:
    """Run `tandem` in a folder; None if it did not end in time. memory: bytes that it may use in addition to the server's."""
    output.mkdir(exist_ok=True)
    process = SERVER.Process(target=_run_in, args=(folder, output, arguments, memory, environment))
    process.start()
    assert process.pid is not None
    try:
        return Child(process, output).ended(seconds)
    except TimeoutError:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started


def _run_in(folder: Path, output: Path, arguments: list[str], memory: int, environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(folder)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    run_command(output, arguments, environment)


def redirect_output(folder: Path) -> None:
    """Send the output of this process to the files that `Child` reads."""
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{os.getpid()}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)


class Small:
    """A few pairs on disk, and runs on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        rows = [{"prompt": f"Say {n}", "chosen": f"{n} it is", "rejected": f"No {n}"} for n in range(36)]
        same = {"prompt": "Say", "chosen": "as", "rejected": "as"}  # so that rejects.jsonl is not empty
        for name, part in (("train", [*rows[:32], same]), ("validation", [*rows[32:], same])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def overrides(self, run: Path, *more: str) -> list[str]:
        return [
            *SETTINGS,
            f"policy.model_name={MODEL}",
            f"data.train.data_path={self.folder}/train.jsonl",
            f"data.validation.data_path={self.folder}/validation.jsonl",
            f"run.dir={run}",
            *more,
        ]

    def start(self, run: Path, cache: Path, *more: str, fail_at: str = "") -> Child:
        """Start or resume a run with this cache, and write the metrics of every pair at the end."""
        run.parent.mkdir(parents=True, exist_ok=True)
        given = [f"--per-pair={run.with_name('pairs.jsonl')}", "--quiet", *self.overrides(run, *more)]
        output = self.folder / "output"  # not in the run, whose disk may be full
        return start(output, ["train", *given], TANDEM_CACHE=str(cache), TANDEM_FAIL_AT=fail_at)

    def run(self, run: Path, cache: Path, *more: str, fail_at: str = "") -> Ended:
        return self.start(run, cache, *more, fail_at=fail_at).ended()

    def killed(self, run: Path, cache: Path, *more: str, at: str) -> None:
        """Run until a fail point kills the process, and check that it did."""
        ended = self.run(run, cache, *more, fail_at=at)
        assert ended.code == -signal.SIGKILL, f"{at} was never reached: {ended}"


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run writes that must not depend on how often it was interrupted."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = run / "checkpoints"
    return {
        "metrics": [
            {k: v for k, v in line.items() if k not in VARYING}
            for line in lines
            if line["split"] != "timing/validation"
        ],
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights_of(run).items()},
        "verdicts": (run / "verdicts.json").read_bytes(),
        "pairs": run.with_name("pairs.jsonl").read_bytes(),
        "checkpoints": sorted(path.name for path in checkpoints(kept)),
        "latest": (kept / "latest").readlink().name,
        "best": (kept / "best").readlink().name,
        "names": sorted(path.name for path in run.iterdir()),
    }


def assert_same(cut: Path, whole: Path) -> None:
    """Assert that two runs are equal bit for bit, and name what differs."""
    one, other = outcome(cut), outcome(whole)
    assert one["metrics"] == other["metrics"], (one["metrics"], other["metrics"])
    differing = {name: (one[name], other[name]) for name in one if one[name] != other[name] and name != "weights"}
    assert not differing, differing
    assert one["weights"] == other["weights"], "the weights differ"


def assert_intact(*folders: Path) -> None:
    """Assert that every subfolder with its final name, which would be read, matches its manifest."""
    for folder in folders:
        for place in folder.glob("*/"):
            if not place.is_symlink() and not place.name.startswith("."):
                read_manifest(place)
