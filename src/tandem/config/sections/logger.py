"""The section `logger`: trackers beside metrics.jsonl, and what is measured of the GPUs."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.sections.section import PathText, Section
from tandem.terminal.commands import install_command


class Wandb(Section):
    """Weights & Biases."""

    project: str = Field(default="tandem", description="W&B project")
    name: str | None = Field(default=None, description="name of the run there; null: the run directory's")
    entity: str | None = Field(default=None, description="user or team; null: W&B's own default")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="offline: kept on disk for `wandb sync`; null: $WANDB_MODE, without it online"
    )


class Tensorboard(Section):
    """TensorBoard."""

    log_dir: PathText | None = Field(
        default=None, description="folder of its event files; null: {logger.log_dir}/tensorboard"
    )


class Mlflow(Section):
    """MLflow."""

    experiment_name: str = Field(default="tandem", description="MLflow experiment, made where it is not there")
    run_name: str | None = Field(default=None, description="name of the run there; null: the run directory's")
    tracking_uri: str | None = Field(
        default=None,
        description="server or database; null: $MLFLOW_TRACKING_URI, without it sqlite:///{logger.log_dir}/mlflow.db",
    )


class GpuMonitoring(Section):
    """How often the GPUs are looked at."""

    collection_interval: float = Field(default=10.0, gt=0, description="seconds between two looks at the GPUs")
    flush_interval: float = Field(
        default=10.0, gt=0, description="seconds summarised in one record; collection_interval or more"
    )

    @model_validator(mode="after")
    def _something_to_summarise(self) -> "GpuMonitoring":
        if self.flush_interval < self.collection_interval:
            raise ValueError(
                f"logger.gpu_monitoring.flush_interval = {self.flush_interval:g} is below collection_interval = "
                f"{self.collection_interval:g}, so there would be nothing to write; raise it or lower the other"
            )
        return self


class Logger(Section):
    """Trackers beside metrics.jsonl, which is always written."""

    log_dir: PathText | None = Field(
        default=None,
        description="what trackers write on disk; given: a folder of the run directory's name in it; null: {run.dir}/logs",
    )
    wandb_enabled: bool = Field(default=False, description=f"log to W&B; needs {install_command('wandb')}")
    tensorboard_enabled: bool = Field(
        default=False, description=f"log to TensorBoard; needs {install_command('tensorboard')}"
    )
    mlflow_enabled: bool = Field(default=False, description=f"log to MLflow; needs {install_command('mlflow')}")
    wandb: Wandb = Field(default=Wandb(), description="W&B")
    tensorboard: Tensorboard = Field(default=Tensorboard(), description="TensorBoard")
    mlflow: Mlflow = Field(default=Mlflow(), description="MLflow")
    num_val_samples_to_print: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="prompts of the first validation set whose answers are shown at every validation, the policy's beside "
        "the reference's",
    )
    monitor_gpus: bool = Field(
        default=True,
        description="GPU utilisation and memory to trackers and {logger.log_dir}/gpu.jsonl; on a CPU nothing",
    )
    gpu_monitoring: GpuMonitoring = Field(default=GpuMonitoring(), description="how often")

    @property
    def enabled(self) -> list[str]:
        """Names of the trackers in use."""
        return [name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, f"{name}_enabled")]

    @model_validator(mode="after")
    def _settings_are_read(self) -> "Logger":
        # Whoever says `wandb_enabled: false` has switched it off, settings and all; whoever never said so forgot it.
        for name in ("tensorboard", "wandb", "mlflow"):
            said = f"{name}_enabled" in self.model_fields_set
            section = getattr(self, name)
            changed = section.model_dump().items() - type(section)().model_dump().items()
            if changed and not said:
                key, value = min(changed)
                raise ValueError(
                    f"logger.{name}.{key} = {value} is read by nobody: {name} is not enabled. Set "
                    f"logger.{name}_enabled=true, or false if you mean it"
                )
        return self
