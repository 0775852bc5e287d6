"""`tandem fail-points`: lists where tests can kill the process. For developers of tandem, so --help does not show it."""

from tandem.cli.app import app


@app.command("fail-points", hidden=True)
def fail_points() -> None:
    """List the points where TANDEM_FAIL_AT=POINT[:COUNT][=disk_full] kills the process, to test recovery."""
    from tandem.failpoints import POINTS

    width = max(map(len, POINTS))
    for point, description in POINTS.items():
        print(f"{point:<{width}}  {description}")
