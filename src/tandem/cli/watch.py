"""`tandem watch`: serves the page of a run on this machine, and follows it."""

from typing import Annotated

import typer

from tandem.cli.app import app


@app.command()
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="The port. Default: the first free one from 8765.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the address.")] = False,
) -> None:
    """Show a run in the browser, and follow it as it trains.

    Serves the page of the run on 127.0.0.1, for browsers on this machine only.
    """
    from tandem.page.serve import serve_run

    with serve_run(run, port) as server:
        print(server.url if quiet else f"Watching {run} at {server.url} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # the usual end
            return
