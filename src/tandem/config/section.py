"""What every part of the configuration is made of. Imports no torch."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

EMBEDDED = "embedded"

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_SCORE = 3.4028234663852886e38  # the largest float32, as which scores are stored


def in_home(path: str) -> str:
    """A path with ~ as the home directory it stands for: shells leave it as it is after key= and inside quotes."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib would also drop a trailing slash and a leading ./


# What may be a path: a file or folder, or a pattern, where that can also be a name of the hub or embedded.
PathText = Annotated[str, AfterValidator(in_home)]


class Section(BaseModel):
    """A part of the configuration: closed, frozen, and strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
