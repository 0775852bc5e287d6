"""`tandem eval`: checks options and paths, then measures a model on preference pairs."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowCode, app, expand_home_callback

OVERRIDE = re.compile(r"[+~]*[a-z_]+(\.[A-Za-z0-9_-]+)+=.*|~[a-z_.]+", re.DOTALL)


@app.command("eval")
def evaluate_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            callback=expand_home_callback,
            help="A model folder or hub name, embedded, or a run (its model, with its own reference) or one of its checkpoints.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Data files, RewardBench's files, or embedded. Default: the run's validation sets. KEY=VALUE overrides a key.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", callback=expand_home_callback, help="Measure implicit rewards against this model."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER", callback=expand_home_callback, help="Compare with another model or run on the same pairs."
        ),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(metavar="X", help="Factor of implicit rewards. Default: the run's, or 0.1.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Also show results by this field of the rows.")
    ] = None,
    per_pair: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=expand_home_callback,
            help="Write the metrics of every pair to FILE, smallest margin first.",
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Run these tasks of the LM Evaluation Harness: arc_easy,hellaswag."),
    ] = None,
    include_path: Annotated[
        str | None,
        typer.Option(metavar="DIR", callback=expand_home_callback, help="Folder with more tasks for --lm-eval."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Examples per task of --lm-eval. Default: all.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, warnings and errors.")] = False,
) -> None:
    """Measure a model on preference pairs: accuracy, margins and calibration.

    Never writes into a run.
    """
    from tandem.config.sections.section import expand_home
    from tandem.evaluation.request import check_request

    given = data or []
    request = check_request(
        model,
        [expand_home(one) for one in given if not OVERRIDE.fullmatch(one)],
        reference=reference,
        against=against,
        beta=beta,
        by=by,
        per_pair=Path(per_pair) if per_pair else None,
        lm_eval=[task.strip() for task in (lm_eval or "").split(",") if task.strip()],
        include_path=Path(include_path) if include_path else None,
        limit=limit,
        overrides=[one for one in given if OVERRIDE.fullmatch(one)],
        allow_code=allow_code,
    )
    if not quiet:
        print(LOADING_MESSAGE, flush=True, file=sys.stderr)

    from tandem.evaluation.evaluate import run_request
    from tandem.evaluation.show import show
    from tandem.report.reporter import Reporter
    from tandem.terminal.console import SafeConsole

    # Everything but the result goes to standard error.
    reporter = Reporter("quiet" if quiet else "normal", as_json=True)
    has_replaced = request.per_pair is not None and request.per_pair.exists()
    found = run_request(request, reporter)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show(found, SafeConsole(), request.per_pair, has_replaced=has_replaced)
