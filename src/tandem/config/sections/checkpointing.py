"""The section `checkpointing`: when the run saves itself, and what is kept."""

from pydantic import Field, field_validator, model_validator

from tandem.config.sections.section import PathText, Positive, Section


class Checkpointing(Section):
    """When the run saves itself, and what is kept."""

    enabled: bool = Field(default=True, description="save checkpoints")
    checkpoint_dir: PathText | None = Field(
        default=None,
        description="where they are; null: {run.dir}/checkpoints; given without run.dir: the run's directory",
    )
    save_period: Positive = Field(default=50, description="steps between checkpoints; the last step is always saved")
    keep_top_k: Positive = Field(default=3, description="checkpoints kept, by metric_name; the latest is kept too")
    metric_name: str | None = Field(
        default=None,
        description="what ranks them, by the latest validation at or before each: validation-default_loss, val_loss (of the "
        "first set), train:loss; null: the loss of the first validation set, without one their age",
    )
    higher_is_better: bool = Field(
        default=False, description="of metric_name; must be true of accuracies and margins, false of losses"
    )
    save_optimizer: bool = Field(default=True, description="false: smaller checkpoints, from which no run can go on")
    checkpoint_must_save_by: str | None = Field(
        default=None, description="DD:HH:MM:SS after the start by which the run has saved and stopped; null: no limit"
    )

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @model_validator(mode="after")
    def _saves_in_time(self) -> "Checkpointing":
        if self.checkpoint_must_save_by is not None and not self.enabled:
            raise ValueError(
                f"checkpointing.checkpoint_must_save_by = {self.checkpoint_must_save_by} contradicts "
                "checkpointing.enabled=false: the run would stop and lose everything"
            )
        return self

    @property
    def seconds_to_save_by(self) -> float | None:
        return None if self.checkpoint_must_save_by is None else seconds_of(self.checkpoint_must_save_by)


def seconds_of(duration: str) -> float:
    """DD:HH:MM:SS in seconds; leading parts may be left out. "01:30:00" -> 5400.0"""
    parts = duration.split(":")
    if len(parts) > 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"checkpointing.checkpoint_must_save_by = {duration!r} is no time; write DD:HH:MM:SS, such as 00:03:45:00"
        )
    days, hours, minutes, seconds = (int(part) for part in (["0"] * 4 + parts)[-4:])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
