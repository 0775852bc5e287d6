"""The process that runs the LM Evaluation Harness: `python -m tandem.evaluation.harness_child FILE`, with a request on stdin.

Writes the harness' results to FILE as JSON: task -> {"METRIC,FILTER": value}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tandem.model.files.source import describe

UNKNOWN_TASK_EXIT_CODE = 3  # the harness does not know a task; standard error has their names


class UnknownTasksError(Exception):
    """Tasks that the harness does not know. The message lists them."""


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one model on tasks with the harness' Python interface."""
    import torch
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=request["include_path"])
    try:
        found = simple_evaluate(
            model="hf",
            model_args=request["model_args"],
            tasks=request["tasks"],
            task_manager=manager,
            limit=request["limit"],
            device="cuda" if torch.cuda.is_available() else "cpu",
            batch_size="auto" if torch.cuda.is_available() else 8,
            log_samples=False,
        )
    except Exception as error:
        # Checked only now, because the harness accepts more than the names that it lists, such as files.
        known = set(getattr(manager, "all_tasks", request["tasks"]))
        if unknown := [task for task in request["tasks"] if task not in known]:
            raise UnknownTasksError(", ".join(unknown)) from error
        raise
    # Groups are listed with their tasks. Names and counts, whose keys have no filter, are left out.
    return {
        task: {key: value for key, value in metrics.items() if "," in key and isinstance(value, int | float)}
        for task, metrics in found["results"].items()
    }


def main() -> None:
    """Read a request, and write the results. An error is one line on standard error: the last of what the harness prints."""
    try:
        results = run(json.load(sys.stdin))
    except UnknownTasksError as error:
        print(error, file=sys.stderr)
        sys.exit(UNKNOWN_TASK_EXIT_CODE)
    except Exception as error:
        sys.exit(describe(error))
    Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
