"""What every part of the configuration is made of. Imports no torch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

EMBEDDED = "embedded"

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_SCORE = 3.4028234663852886e38  # the largest float32, as which scores are stored


class Section(BaseModel):
    """A part of the configuration: closed, frozen, and strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
