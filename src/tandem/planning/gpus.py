"""How many GPUs a run is planned for, how they are connected, and how they form a mesh. Does not import torch."""

import math
from dataclasses import dataclass

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.errors import ConfigError
from tandem.launch.choose import is_number_of_another_trainer
from tandem.model.distributed.mesh import MeshShape, mesh_shape
from tandem.planning.cards import Card, data_sheet_link

GB = 1e9
# What is assumed to be reached of the bandwidths of data sheets: inside a machine, and of a network.
REACHED_SHARE, BETWEEN_SHARE = 2 / 3, 1 / 2
# Network cards in GB/s each way: one of 400 Gb/s for each GPU with NVLink, otherwise one of 100 Gb/s for a machine.
NETWORK_PER_GPU, NETWORK_PER_MACHINE = 50.0, 12.5
MAX_GPUS = 16384  # a plan distributes batches over all ranks, and its time grows with their number


@dataclass(frozen=True, slots=True)
class GpuCount:
    """The GPUs that a run is planned for."""

    per_machine: int = 1
    machines: int = 1

    @property
    def total(self) -> int:
        return self.per_machine * self.machines


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths in bytes a second, each way."""

    inside: float  # of a GPU, to the others of its machine
    between: float  # of a machine, to the others, shared by its GPUs


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The options of `tandem plan` on several GPUs; None: not given. `link` and `network` are in GB/s."""

    gpus: int | None = None  # of each machine
    machines: int | None = None
    link: float | None = None
    network: float | None = None

    def check(self) -> None:
        """Raise ConfigError for impossible numbers."""
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"--gpus {self.gpus}: not a number of GPUs. Give the GPUs of one machine, 1 or more.")
        if self.machines is not None and self.machines < 1:
            raise ConfigError(f"--machines {self.machines}: not a number of machines. Give 1 or more.")
        for name, value in (("--link", self.link), ("--network", self.network)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} {value:g}: not a bandwidth. Give GB/s above 0, such as 300.")

    def count(self, loaded: LoadedConfig, found: int | None) -> GpuCount:
        """Return the number of GPUs to plan for. Raise ConfigError if it is not known, or if another option has no effect.

        `found`: the number of GPUs of this machine if the run is planned for it; None: it is planned for a named card. On a
        machine without GPUs, the number is that of ranks on its CPU, as in training.
        """
        cluster = loaded.config.cluster
        machines = self.machines or cluster.num_nodes
        given = self.gpus
        if (
            given is None
            and cluster.gpus_per_node != "all"
            and not (found == 0 and is_number_of_another_trainer(loaded))
        ):
            given = cluster.gpus_per_node
        if given is None and found is None and machines > 1:
            place = "cluster.num_nodes =" if self.machines is None else "--machines"
            raise ConfigError(
                f"{place} {machines}: how many GPUs each machine has is not known. Add --gpus N or cluster.gpus_per_node=N."
            )
        count = GpuCount(given or found or 1, machines)
        if count.total > MAX_GPUS:
            each = f" in each of {machines:,} machines" if machines > 1 else ""
            raise ConfigError(
                f"{count.per_machine:,} GPUs{each}: a plan is made for at most {MAX_GPUS:,} GPUs. Lower --gpus "
                "(cluster.gpus_per_node) or --machines (cluster.num_nodes)."
            )
        if self.link is not None and count.total == 1:
            raise ConfigError(
                f"--link {self.link:g}: a single GPU exchanges nothing with others. Add --gpus N, or leave it out."
            )
        if self.network is not None and machines == 1:
            raise ConfigError(
                f"--network {self.network:g}: a single machine exchanges nothing with others. Add --machines N, or leave it out."
            )
        return count

    def links(self, card: Card | None, count: GpuCount) -> Links:
        """Return the bandwidths that are given, or those assumed for the card."""
        sheet, has_nvlink = data_sheet_link(card)
        network = NETWORK_PER_GPU * count.per_machine if has_nvlink else NETWORK_PER_MACHINE
        inside, between = self.link or REACHED_SHARE * sheet, self.network or BETWEEN_SHARE * network
        return Links(GB * inside, GB * between)

    def arguments(self, count: GpuCount) -> list[str]:
        """Return the arguments of a command that plans for `count` with the same links."""
        found = ["--gpus", str(count.per_machine)]
        found += ["--machines", str(count.machines)] if count.machines > 1 or self.machines is not None else []
        found += ["--link", f"{self.link:g}"] if self.link is not None else []
        return found + (["--network", f"{self.network:g}"] if self.network is not None else [])


ONE_GPU = GpuCount()
NO_OPTIONS = GpuOptions()


def planned_mesh(config: Config, count: GpuCount) -> MeshShape:
    """Return the mesh of this many GPUs. Raise ConfigError if policy.parallel does not divide them."""
    return mesh_shape(
        config.policy.parallel, count.total, way_out="plan for another number of GPUs (--gpus N, --machines N)"
    )
