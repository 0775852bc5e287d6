"""The section `cluster`: on how many machines and GPUs a run trains, and what starts its ranks."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.config.sections.section import Positive, Section

Launcher = Literal["auto", "local", "torchrun", "slurm", "ray"]


class Cluster(Section):
    """Machines and GPUs of the run, and what starts its ranks."""

    num_nodes: Positive = Field(
        default=1, description="number of machines; under torchrun or srun, 1 accepts any number"
    )
    gpus_per_node: Positive | Literal["all"] = Field(
        default="all",
        description="GPUs to use on each machine, one rank per GPU; on machines without GPUs: the number of ranks that "
        "compute on the CPU, all: 1",
    )
    launcher: Launcher = Field(
        default="auto",
        description="what starts the ranks; auto: torchrun or srun if it started this process, otherwise local; local: tandem "
        "train, on this machine; ray: Ray Train, on the Ray cluster of this machine; torchrun, slurm: refuse to start without it",
    )

    @model_validator(mode="after")
    def _is_on_one_machine(self) -> "Cluster":
        if self.launcher == "local" and self.num_nodes > 1:
            raise ValueError(
                f"cluster.launcher=local starts ranks on this machine only, but cluster.num_nodes = {self.num_nodes}. Set "
                "cluster.num_nodes=1, or use another launcher (docs/cluster.md)"
            )
        return self
