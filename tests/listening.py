"""The addresses at which processes listen, read from /proc (Linux)."""

import ipaddress
import struct
from pathlib import Path

LISTEN = "0A"


def listening(*pids: int) -> set[str]:
    """The addresses, without ports, at which these processes listen. "::" and "0.0.0.0" mean every interface."""
    sockets = {link for pid in pids for link in _links(pid) if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _links(pid: int) -> list[str]:
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return links


def _address(written: str) -> str:
    """Parse an address in 32-bit words, each in this machine's byte order: 0100007F -> 127.0.0.1"""
    words = struct.unpack(f">{len(written) // 8}I", bytes.fromhex(written))
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))
