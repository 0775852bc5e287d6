"""`tandem fail-points`: where tests can make the process die. Not in --help: it is for those who work on tandem."""

from tandem.cli.app import app


@app.command("fail-points", hidden=True)
def fail_points() -> None:
    """List the places where TANDEM_FAIL_AT=POINT[:COUNT][=disk_full] kills the process, to try what survives it."""
    from tandem.failpoints import POINTS

    width = max(map(len, POINTS))
    for point, description in POINTS.items():
        print(f"{point:<{width}}  {description}")
