"""`tandem doctor`: checks this machine."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import app
from tandem.terminal.printable import counted

if TYPE_CHECKING:
    from tandem.diagnosis.finding import Finding
    from tandem.report.reporter import Reporter

NAME_CELLS, STATUS_CELLS = 16, 8


@app.command("doctor")
def check_machine(
    no_network: Annotated[bool, typer.Option("--no-network", help="Send nothing over the network.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and problems.")] = False,
) -> None:
    """Check this machine: versions, GPU, disk, network and one training step.

    Says how to fix each problem. The exit code is 1 if there is one.
    """
    from tandem.diagnosis.doctor import doctor, has_problems
    from tandem.report.reporter import Reporter

    bar = Reporter("quiet" if quiet else "normal", as_json=True)  # on standard error
    findings = doctor(network=not no_network, bar=bar.progress)
    if as_json:
        print(json.dumps([asdict(one) for one in findings]))
    else:
        _show(findings, Reporter("normal"), quiet=quiet)
    if has_problems(findings):
        raise typer.Exit(1)


def _show(findings: "list[Finding]", reporter: "Reporter", *, quiet: bool) -> None:
    indent = " " * (STATUS_CELLS + NAME_CELLS + 2)
    for one in findings:
        if quiet and one.status in ("ok", "note"):
            continue
        reporter.say(f"{one.status:<{STATUS_CELLS}} {one.name:<{NAME_CELLS}} {one.text}", hang=len(indent))
        if one.fix:
            reporter.say(f"{indent}{one.fix}", hang=len(indent))
        if one.command:
            reporter.command(one.command)
    if not quiet:
        counts = [(sum(one.status == status for one in findings), status) for status in ("problem", "warning")]
        found = ", ".join(counted(num, status) for num, status in counts if num)
        reporter.say(f"\n{found or 'No problems'}.")
