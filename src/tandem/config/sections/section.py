"""What every part of the configuration is made of. Imports no torch."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

EMBEDDED = "embedded"

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_NAME_BYTES = 255  # of a file, on every usual file system
MAX_PATH_BYTES = 3000  # of the 4,096 that Linux takes, so that files of tandem's fit below
LARGEST_INT = 2**63 - 1  # of torch and numpy
MAX_SCORE = 3.4028234663852886e38  # the largest float32, as which scores are stored


def in_home(path: str) -> str:
    """A path with ~ as the home directory it stands for: shells leave it as it is after key= and inside quotes."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib would also drop a trailing slash and a leading ./


def _possible(path: str) -> str:
    """Refuse what no file can be called: every question whether it is there would be an error."""
    try:
        parts = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        raise PydanticCustomError("path_characters", "it has characters that no name of a file has") from None
    if b"\0" in os.fsencode(path):
        raise PydanticCustomError("path_characters", "it has characters that no name of a file has")
    if max(map(len, parts)) > MAX_NAME_BYTES or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise PydanticCustomError("path_length", "it is too long to be a path")
    return path


# What may be a path, or the text itself.
PathOrText = Annotated[str, AfterValidator(in_home)]
# What may be a path: a file or folder, or a pattern, where that can also be a name of the hub or embedded.
PathText = Annotated[PathOrText, AfterValidator(_possible)]


class Section(BaseModel):
    """A part of the configuration: closed, frozen, and strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        if type(value) is int and abs(value) > LARGEST_INT:
            raise PydanticCustomError("int_range", "input should be between -{most} and {most}", {"most": LARGEST_INT})
        return value
