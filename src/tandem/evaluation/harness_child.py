"""The process that runs the LM Evaluation Harness: `python -m tandem.evaluation.harness_child FILE`, with a request on stdin.

Writes the harness' results to FILE as JSON: task -> {"METRIC,FILTER": value}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tandem.model.files.source import describe


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one model on tasks with the harness' Python interface."""
    import torch
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    found = simple_evaluate(
        model="hf",
        model_args=request["model_args"],
        tasks=request["tasks"],
        task_manager=TaskManager(include_path=request["include_path"]),
        limit=request["limit"],
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size="auto" if torch.cuda.is_available() else 8,
        log_samples=False,
    )
    # Groups are listed with their tasks. Names and counts, whose keys have no filter, are left out.
    return {
        task: {key: value for key, value in metrics.items() if "," in key and isinstance(value, int | float)}
        for task, metrics in found["results"].items()
    }


def main() -> None:
    """Read a request, and write the results. An error is one line on standard error: the last of what the harness prints."""
    try:
        results = run(json.load(sys.stdin))
    except Exception as error:
        sys.exit(describe(error))
    Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
