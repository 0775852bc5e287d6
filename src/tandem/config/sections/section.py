"""The base class and field types of all configuration sections. Does not import torch."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

EMBEDDED = "embedded"

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareOfEpoch = Annotated[float, Field(gt=0, le=1)]  # 1.0 is an epoch, while the integer 1 is a step
MAX_NAME_BYTES = 255  # of a file name, on all common file systems
MAX_PATH_BYTES = 3000  # Linux allows 4,096; the rest is for files that tandem writes below the path
LARGEST_INT = 2**63 - 1  # in torch and numpy
MAX_SCORE = 3.4028234663852886e38  # the largest float32; scores are stored as float32


def expand_home(path: str) -> str:
    """Expand ~ to the home directory. Shells do not expand it after key= or inside quotes."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib would also drop a trailing slash and a leading ./


def _check_possible(path: str) -> str:
    """Refuse text that cannot be a path, before functions such as os.stat fail on it."""
    try:
        parts = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        raise PydanticCustomError("path_characters", "it has characters that file names cannot have") from None
    if b"\0" in os.fsencode(path):
        raise PydanticCustomError("path_characters", "it has characters that file names cannot have")
    if max(map(len, parts)) > MAX_NAME_BYTES or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise PydanticCustomError("path_length", "it is too long to be a path")
    return path


# Either a path or other text, such as a keyword.
PathOrText = Annotated[str, AfterValidator(expand_home)]
# The path of a file or folder. Some keys also accept a glob pattern, a hub name or `embedded`.
PathText = Annotated[PathOrText, AfterValidator(_check_possible)]

# A function of the user's, in a file or given in Python (user_code.py).
UserFunctionName = Annotated[str, Field(pattern=r"^(.*\.py|python):[^\W\d]\w*$")]


class Section(BaseModel):
    """Base class of configuration sections. Refuses unknown keys and values of the wrong type. Instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _fits_int64(cls, value: Any) -> Any:
        if type(value) is int and abs(value) > LARGEST_INT:
            raise PydanticCustomError("int_range", "input should be between -{most} and {most}", {"most": LARGEST_INT})
        return value
