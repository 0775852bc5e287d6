"""The section `checkpointing`: when checkpoints are saved, and which are kept."""

from pydantic import Field, field_validator, model_validator

from tandem.config.sections.section import PathText, Positive, Section, ShareOfEpoch


class Checkpointing(Section):
    """When checkpoints are saved, and which are kept."""

    enabled: bool = Field(default=True, description="save checkpoints")
    checkpoint_dir: PathText | None = Field(
        default=None,
        description="checkpoint folder; null: {run.dir}/checkpoints; if run.dir is null, this folder is the run directory",
    )
    save_period: Positive | ShareOfEpoch = Field(
        default=50,
        description="steps between checkpoints; 0.5: half an epoch, 1.0: an epoch; the last step is always saved",
    )
    keep_top_k: Positive = Field(
        default=3,
        description="number of best checkpoints to keep, ranked by metric_name; the latest is always kept too",
    )
    metric_name: str | None = Field(
        default=None,
        description="metric that ranks checkpoints: val_loss (first validation set), validation-default_loss (the set named "
        "default) or train:loss; a checkpoint is ranked by the last value measured up to its step; null: val_loss, or the age "
        "of checkpoints if there are no validation sets",
    )
    higher_is_better: bool = Field(
        default=False,
        description="whether higher values of metric_name are better; must be true for accuracies and margins, "
        "false for losses",
    )
    save_optimizer: bool = Field(
        default=True, description="save optimizer states; false: smaller checkpoints that cannot be resumed from"
    )
    checkpoint_must_save_by: str | None = Field(
        default=None,
        description="time limit, DD:HH:MM:SS after the start; the run saves a checkpoint and stops before it; null: no limit",
    )

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _is_duration(cls, value: str | None) -> str | None:
        if value is not None:
            parse_seconds(value)
        return value

    @model_validator(mode="after")
    def _can_save(self) -> "Checkpointing":
        if self.checkpoint_must_save_by is not None and not self.enabled:
            raise ValueError(
                f"checkpointing.checkpoint_must_save_by = {self.checkpoint_must_save_by} needs checkpoints, but "
                "checkpointing.enabled=false: the run would stop without saving. Set checkpointing.enabled=true, or leave "
                "out this key"
            )
        return self

    @property
    def seconds_to_save_by(self) -> float | None:
        return None if self.checkpoint_must_save_by is None else parse_seconds(self.checkpoint_must_save_by)


def parse_seconds(duration: str) -> float:
    """Convert DD:HH:MM:SS to seconds. Leading parts may be left out: "01:30:00" is returned as 5400.0."""
    parts = duration.split(":")
    if len(parts) > 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"checkpointing.checkpoint_must_save_by = {duration!r} is not a time. Write DD:HH:MM:SS, such as 00:03:45:00"
        )
    days, hours, minutes, seconds = (int(part) for part in (["0"] * 4 + parts)[-4:])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
