"""The section `logger`: experiment trackers and GPU monitoring."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.sections.section import PathText, Section
from tandem.terminal.commands import install_command


class Wandb(Section):
    """Weights & Biases."""

    project: str = Field(default="tandem", description="W&B project")
    name: str | None = Field(default=None, description="W&B run name; null: name of the run directory")
    entity: str | None = Field(default=None, description="W&B user or team; null: W&B's default")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline: write to disk, for `wandb sync` to upload; null: $WANDB_MODE, or online if it is not set",
    )


class Tensorboard(Section):
    """TensorBoard."""

    log_dir: PathText | None = Field(
        default=None, description="folder for event files; null: {logger.log_dir}/tensorboard"
    )


class Mlflow(Section):
    """MLflow."""

    experiment_name: str = Field(default="tandem", description="MLflow experiment; created if missing")
    run_name: str | None = Field(default=None, description="MLflow run name; null: the name of the run directory")
    tracking_uri: str | None = Field(
        default=None,
        description="server or database; null: $MLFLOW_TRACKING_URI, or sqlite:///{logger.log_dir}/mlflow.db if it is not set",
    )


class GpuMonitoring(Section):
    """How often the GPUs are sampled."""

    collection_interval: float = Field(default=10.0, gt=0, description="seconds between samples")
    flush_interval: float = Field(
        default=10.0, gt=0, description="seconds summarised in one record; at least collection_interval"
    )

    @model_validator(mode="after")
    def _records_have_samples(self) -> "GpuMonitoring":
        if self.flush_interval < self.collection_interval:
            raise ValueError(
                f"logger.gpu_monitoring.flush_interval = {self.flush_interval:g} is below collection_interval = "
                f"{self.collection_interval:g}, so some records would have no samples. Raise "
                "flush_interval, or lower collection_interval"
            )
        return self


class Logger(Section):
    """Experiment trackers, in addition to metrics.jsonl, which is always written."""

    log_dir: PathText | None = Field(
        default=None,
        description="folder for tracker files; each run has a subfolder named like its run directory; null: {run.dir}/logs",
    )
    wandb_enabled: bool = Field(default=False, description=f"log to W&B; needs {install_command('wandb')}")
    tensorboard_enabled: bool = Field(
        default=False, description=f"log to TensorBoard; needs {install_command('tensorboard')}"
    )
    mlflow_enabled: bool = Field(default=False, description=f"log to MLflow; needs {install_command('mlflow')}")
    wandb: Wandb = Field(default=Wandb(), description="settings of W&B")
    tensorboard: Tensorboard = Field(default=Tensorboard(), description="settings of TensorBoard")
    mlflow: Mlflow = Field(default=Mlflow(), description="settings of MLflow")
    log_nemo_names: bool = Field(
        default=False,
        description="trackers also get the metrics under NeMo RL's names, with their meaning there: rewards without beta, "
        "for example (docs/trackers.md)",
    )
    log_trl_names: bool = Field(
        default=False, description="trackers also get the metrics under TRL's names, with their meaning there"
    )
    num_val_samples_to_print: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="at every validation, print the answers of policy and reference to this many prompts of the first "
        "validation set",
    )
    report: bool = Field(default=True, description="write report.html, a page of the run's curves, pairs and settings")
    monitor_gpus: bool = Field(
        default=True,
        description="log GPU utilisation and memory to trackers and {logger.log_dir}/gpu.jsonl; no effect on a CPU",
    )
    gpu_monitoring: GpuMonitoring = Field(default=GpuMonitoring(), description="how often GPUs are sampled")

    @property
    def enabled(self) -> list[str]:
        """Names of the enabled trackers."""
        return [name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, f"{name}_enabled")]

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "Logger":
        # An explicit `wandb_enabled: false` keeps W&B off on purpose, so its settings may stay. If the key is missing, it was
        # probably forgotten.
        for name in ("tensorboard", "wandb", "mlflow"):
            is_decided = f"{name}_enabled" in self.model_fields_set
            section = getattr(self, name)
            changed = section.model_dump().items() - type(section)().model_dump().items()
            if changed and not is_decided:
                key, value = min(changed)
                raise ValueError(
                    f"logger.{name}.{key} = {value} has no effect: {name} is not enabled. Set "
                    f"logger.{name}_enabled=true; to keep {name} off on purpose, set it to false"
                )
        return self

    @model_validator(mode="after")
    def _names_have_trackers(self) -> "Logger":
        switches = [f"{name}_enabled" for name in ("tensorboard", "wandb", "mlflow")]
        for key in ("log_nemo_names", "log_trl_names"):
            if getattr(self, key) and not self.enabled and not self.model_fields_set.intersection(switches):
                raise ValueError(
                    f"logger.{key} = true has no effect: no tracker is enabled. Set "
                    f"{', '.join(f'logger.{switch}=true' for switch in switches[:-1])} or logger.{switches[-1]}=true, or leave "
                    f"out logger.{key}"
                )
        return self
