"""`tandem fail-points`: lists the points at which tests can kill the process.

The command is for developers of tandem, so --help does not show it.
"""

from tandem.cli.app import app


@app.command("fail-points", hidden=True)
def fail_points() -> None:
    """List the points at which TANDEM_FAIL_AT=POINT[:COUNT][=disk_full|=hang] makes the process fail, to test recovery."""
    from tandem.failpoints import POINTS

    width = max(map(len, POINTS))
    for point, description in POINTS.items():
        print(f"{point:<{width}}  {description}")
