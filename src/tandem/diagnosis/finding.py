"""The record of one check of this machine."""

import os
import re
from dataclasses import dataclass
from typing import Literal

from tandem.terminal.printable import SECRETS, scrubbed

# note: not a problem, but good to know, such as a machine without a network
Status = Literal["ok", "note", "warning", "problem"]
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix`: what to do, as a sentence. `command`: a command that fixes it and runs as printed."""

    name: str
    status: Status
    text: str
    fix: str = ""
    command: str = ""


def finding(name: str, status: Status, text: str, *, fix: str = "", command: str = "") -> Finding:
    """Make a Finding without secrets: values of secret environment variables and passwords in URLs are hidden."""
    return Finding(name, status, scrubbed(" ".join(text.split())), scrubbed(fix), scrubbed(command))


def hide_secrets() -> None:
    """Hide the values of all environment variables whose names look like those of secrets."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and value:
            SECRETS.add(name, value, words=())
