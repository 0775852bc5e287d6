"""Replaces the process that trains a run of a sweep: prints steps and writes a run's directory within a second.

Its seed says what happens: 12 is refused, 13 fails, 14 crashes, 99 trains until it is stopped.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a sweep starts its processes with Python's safe path

from run_directories import make_run

from tandem.launch.child import stop_with_parent

STEPS = 4


def main() -> None:
    values = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
    run, seed = Path(values["run.dir"]), int(values.get("run.seed", 1))
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(130))
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(143))
    stop_with_parent()
    note = {"run": run.name, "pid": os.getpid(), "time": time.time(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    note["launcher"] = os.environ.get("TANDEM_LAUNCHER")
    with Path(os.environ["STUB_NOTES"]).open("a") as notes:
        notes.write(json.dumps(note) + "\n")
    if seed == 12:
        print("tandem: error: pairs.jsonl has no rows.\nAdd some.", file=sys.stderr)
        sys.exit(3)
    for step in range(1, STEPS + 1):
        time.sleep(float(os.environ.get("STUB_SECONDS", "0")))
        print(f"step {step}/{STEPS}  loss 0.5", flush=True)
        if seed == 13 and step == 2:
            print("tandem: error: step 2: the loss is not finite.", file=sys.stderr)
            sys.exit(5)
        if seed == 14 and step == 2:
            print("Segmentation fault", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while (seed == 99 or stopped) and step == 2:
            if stopped:
                (run / "checkpoints").mkdir(parents=True, exist_ok=True)
                print("saved", flush=True)
                sys.exit(stopped[0])
            time.sleep(0.01)
    make_run(run, steps=STEPS, config=f"run:\n  seed: {seed}\n", accuracy=0.5 + seed / 100)
    print("Done.")


if __name__ == "__main__":
    main()
