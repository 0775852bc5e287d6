"""`tandem plan`: checks options and paths, then estimates what a run needs."""

import json
import sys
from typing import Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowCode, AllowEnv, ConfigFile, FromFormat, Overrides, app
from tandem.planning.cards import card_names


@app.command("plan")
def plan_run(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Plan for this card instead of this machine: {card_names()}.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", help="Plan for this many GPUs in each machine, in place of cluster.gpus_per_node."),
    ] = None,
    machines: Annotated[
        int | None, typer.Option(metavar="N", help="Plan for this many machines, in place of cluster.num_nodes.")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Bandwidth of a GPU to the others of its machine, each way."),
    ] = None,
    network: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Bandwidth of a machine to the others, each way.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="X", help="Price of a GPU per hour, to estimate the cost of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the estimate, warnings and errors.")] = False,
) -> None:
    """Estimate the memory, time, cost and disk space of a run before it starts.

    Loads and downloads no weights. Tokenises the data, and keeps the result for training.
    """
    from tandem.config.load import load_config, require_training_set
    from tandem.paths import check_paths
    from tandem.planning.cards import check_price, find_card
    from tandem.planning.gpus import GpuOptions, planned_mesh

    if gpu is not None:
        find_card(gpu)
    check_price(price_per_hour)
    options = GpuOptions(gpus, machines, link=link, network=network)
    options.check()
    loaded = load_config(config, overrides or [], allow_env or (), allow_code=allow_code, from_format=from_format)
    require_training_set(loaded.config)
    if gpu is not None:  # otherwise torch counts the GPUs of this machine
        planned_mesh(loaded.config, options.count(loaded, None))
    check_paths(loaded.config)
    if not quiet:
        print(LOADING_MESSAGE, flush=True, file=sys.stderr)

    from tandem.planning.plan import plan
    from tandem.planning.show import show
    from tandem.report.reporter import Reporter

    # Everything but the result goes to standard error.
    reporter = Reporter("quiet" if quiet else "normal", as_json=True)
    found = plan(loaded, gpu=gpu, options=options, price_per_hour=price_per_hour, bar=reporter.progress)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show(found, Reporter("normal"))
