"""The machines of a run: which ranks are on which, and the exchanges of the first ranks of all machines."""

import socket
from typing import Any

import torch.distributed as dist

from tandem.data.store.machines import ALONE, Machines
from tandem.errors import ConfigError
from tandem.model.distributed.presence import note_exchange
from tandem.model.distributed.process_group import Ranks
from tandem.storage.cache import cache_dir, real_path


def join_machines(ranks: Ranks) -> Machines:
    """Return the machines of the run, for the first rank of each. The other ranks take no part. Every rank must call this.

    Raise ConfigError on all ranks if those of one machine have different cache directories: one rank fills it for all.
    """
    of_ranks = ranks.gather((ranks.is_first_here, socket.gethostname(), str(real_path(cache_dir()))))
    ranks.run_or_stop_all(lambda: _refuse_different_caches(of_ranks), on=ranks.is_first)
    firsts = [number for number, (is_first_here, _, _) in enumerate(of_ranks) if is_first_here]
    if len(firsts) < 2:
        return ALONE
    group = dist.new_group(firsts, backend="gloo", timeout=ranks.timeout)
    if not ranks.is_first_here:
        return ALONE

    def exchange(message: Any) -> list[Any]:
        messages = [message] * len(firsts)
        note_exchange()
        dist.all_gather_object(messages, message, group=group)
        return messages

    names = [f"rank {number} on {of_ranks[number][1]}" for number in firsts]
    return Machines(firsts.index(ranks.number), names, exchange)


def num_ranks_here(ranks: Ranks) -> int:
    """Return the number of ranks on this rank's machine. Every rank must call this."""
    firsts = ranks.gather(ranks.is_first_here)
    # Ranks of a machine follow each other: with first ranks 0 and 4 of 8, rank 5 is on the second machine.
    machines = [sum(firsts[: number + 1]) for number in range(len(firsts))]
    return machines.count(machines[ranks.number])


def _refuse_different_caches(of_ranks: list[tuple[bool, str, str]]) -> None:
    first, of_first = 0, of_ranks[0][2]
    for number, (is_first_here, host, folder) in enumerate(of_ranks):
        if is_first_here:
            first, of_first = number, folder
        elif folder != of_first:
            raise ConfigError(
                f"TANDEM_CACHE: ranks {first} and {number} on {host} have different cache directories, {of_first} and {folder}, "
                "but one rank of a machine fills the cache for all of them. Set the same directory for all ranks of a machine."
            )
