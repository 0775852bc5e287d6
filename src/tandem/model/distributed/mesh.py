"""How the ranks of a run are arranged: replicas, shards, and ranks that divide rows among them."""

import math
from dataclasses import dataclass

from tandem.config.sections.parallel import REST, Parallel
from tandem.errors import ConfigError
from tandem.terminal.printable import counted


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The sizes of the mesh of ranks (policy.parallel).

    Ranks are numbered with `context` changing fastest. Example: with replicate=1, shard=2 and context=2, ranks 0 and 1 compute
    the same packs, and ranks 2 and 3 compute the other packs.
    """

    replicate: int = 1  # groups of ranks that each hold all weights
    shard: int = 1  # parts of a batch inside such a group
    context: int = 1  # ranks that divide every row of a pack among them

    @property
    def num_ranks(self) -> int:
        return self.data_parallel * self.context

    @property
    def data_parallel(self) -> int:
        """The number of parts that a global batch is divided into."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """The number of ranks that weights, gradients and optimizer states are divided among."""
        return self.shard * self.context

    def __str__(self) -> str:
        """Return the sizes in words, such as "2 replicas of 4 shards, context 2"."""
        replicas = f"{self.replicate} replicas of " if self.replicate > 1 else ""
        context = f", context {self.context}" if self.context > 1 else ""
        return f"{replicas}{counted(self.weight_shards, 'shard')}{context}"


SINGLE_RANK_MESH = MeshShape()


def mesh_shape(parallel: Parallel, num_ranks: int, *, way_out: str = "start another number of ranks") -> MeshShape:
    """Return the sizes of the mesh for this many ranks. In the configuration, -1 stands for all remaining ranks.

    `way_out`: what to do instead of changing policy.parallel, in words.
    """
    sizes = {"replicate": parallel.replicate, "shard": parallel.shard, "context": parallel.context}
    given = math.prod(size for size in sizes.values() if size != REST)
    rest, remainder = divmod(num_ranks, given)
    if remainder or (rest > 1 and REST not in sizes.values()):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != REST)
        kind = "a multiple of " if REST in sizes.values() else ""
        raise ConfigError(
            f"policy.parallel: {product} needs {kind}{given} ranks, and this run has {num_ranks}. Change policy.parallel, or "
            f"{way_out}."
        )
    return MeshShape(**{name: rest if size == REST else size for name, size in sizes.items()})
