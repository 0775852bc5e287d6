"""`tandem plan`: checks options and paths, then estimates what a run needs."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowCode, AllowEnv, ConfigFile, FromFormat, Overrides, app
from tandem.planning.cards import card_names

if TYPE_CHECKING:
    from tandem.config.schema import Config


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
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="X", help="Price of the machine per hour, to estimate the cost of the run.")
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

    if gpu is not None:
        find_card(gpu)
    check_price(price_per_hour)
    loaded = load_config(config, overrides or [], allow_env or (), allow_code=allow_code, from_format=from_format)
    require_training_set(loaded.config)
    check_paths(loaded.config)
    if not quiet:
        print(LOADING_MESSAGE, flush=True, file=sys.stderr)

    from tandem.planning.plan import plan
    from tandem.planning.show import show
    from tandem.report.reporter import Reporter

    # Everything but the result goes to standard error.
    reporter = Reporter("quiet" if quiet else "normal", as_json=True)
    for key, value in _several_gpus(loaded.config):
        reporter.warn(
            f"the estimate is for one GPU: {key} = {value} does not change it. docs/scaling.md has estimates for several GPUs."
        )
    found = plan(loaded, gpu=gpu, price_per_hour=price_per_hour, bar=reporter.progress)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show(found, Reporter("normal"))


def _several_gpus(config: "Config") -> list[tuple[str, int]]:
    """Return the keys that ask for several GPUs or divide the work among them, with their values."""
    cluster, parallel = config.cluster, config.policy.parallel
    asked = {
        "cluster.num_nodes": cluster.num_nodes,
        "cluster.gpus_per_node": cluster.gpus_per_node,
        "policy.parallel.replicate": parallel.replicate,
        "policy.parallel.shard": parallel.shard,
        "policy.parallel.context": parallel.context,
    }
    return [(key, value) for key, value in asked.items() if value != "all" and value > 1]
