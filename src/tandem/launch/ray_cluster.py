"""Connects this process to a Ray cluster: that of RAY_ADDRESS, one that runs on this machine, or one that it starts.

Ray alone would wait for minutes, or forever, for a cluster that does not answer.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.errors import MachineError, Terminated
from tandem.terminal.streams import print_error

ADDRESS = "RAY_ADDRESS"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REACH_SECONDS = 5.0  # how long the machine of the address may take to accept a connection
ANSWER_SECONDS = 60.0  # how long Ray may take to connect; with several drivers and few cores, it needs ten seconds


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS or of this machine. Without one, start a cluster on this machine.

    Raise MachineError if no cluster answers at RAY_ADDRESS.
    """
    import ray.util  # pyright: ignore[reportMissingImports]

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    address = os.environ.get(ADDRESS, "")
    if address not in ("", "auto", "local"):
        check_address(address, this_machine=ray.util.get_node_ip_address())
    if address != "local":
        try:
            with _limited(address):
                _init(address="auto")
            return
        except ConnectionError:
            if address not in ("", "auto"):
                raise MachineError(_no_answer(address)) from None
    _init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1")


def _init(**options: Any) -> None:
    """Call ray.init. It replaces the handler of SIGTERM by one that ends the process without a message."""
    import ray  # pyright: ignore[reportMissingImports]

    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except SystemExit:
        raise Terminated from None
    finally:
        signal.signal(signal.SIGTERM, before)


def check_address(address: str, this_machine: str = "127.0.0.1") -> None:
    """Raise MachineError if RAY_ADDRESS is not an address, or if nothing listens there.

    `this_machine`: its address in the network. Ray uses that where RAY_ADDRESS names the loopback address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise MachineError(
            f"{ADDRESS} = {address}: not the address of a Ray cluster. Give HOST:PORT as ray start prints it (port 6379 by "
            "default), or unset the variable."
        )
    reason = ""
    for one in (host, this_machine) if host in LOOPBACK else (host,):
        try:
            socket.create_connection((one, int(port)), timeout=REACH_SECONDS).close()
            return
        except (OSError, UnicodeError) as error:
            reason = reason or (getattr(error, "strerror", None) or str(error)).lower()
    raise MachineError(_no_answer(address, f" ({reason})"))


def _no_answer(address: str, why: str = "") -> str:
    return (
        f"{ADDRESS} = {address}: no Ray cluster answers there{why}. Start it with ray start --head, correct the address, or "
        "unset the variable."
    )


@contextmanager
def _limited(address: str) -> Iterator[None]:
    """End the process with an error if the code inside takes too long: Ray cannot be interrupted while it connects."""

    def give_up() -> None:
        unanswered = (
            f"a Ray cluster was started on this machine, but it has not answered for {ANSWER_SECONDS:g} seconds. "
        )
        text = unanswered + f"Run ray stop, then start the cluster again, or set {ADDRESS}."
        if address not in ("", "auto"):
            text = _no_answer(address, f", although something listens: Ray waited {ANSWER_SECONDS:g} seconds")
        print_error(f"tandem: error: {text}")
        os._exit(MachineError.exit_code)

    timer = threading.Timer(ANSWER_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
