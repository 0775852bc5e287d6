"""A cached reference is used only if it has one finite value per token, whoever wrote its manifest."""

import numpy as np
import pytest

from tandem.model.reference import is_intact
from tandem.storage.cache import write_manifest


def written(place, values: bytes) -> None:
    place.mkdir()
    (place / "logps.f32").write_bytes(values)
    write_manifest(place, version=1)


def test_a_reference_with_a_finite_value_for_every_token_is_intact(tmp_path):
    written(tmp_path / "reference", np.array([-1, -2, -3], np.float32).tobytes())
    assert is_intact(tmp_path / "reference", 3)


@pytest.mark.parametrize(
    "values",
    [
        b"",
        np.array([-1, -2], np.float32).tobytes(),
        np.array([-1, -2, -3, -4], np.float32).tobytes(),
        np.array([-1, -2, -3], np.float32).tobytes()[:-1],
        np.array([-1, np.nan, -3], np.float32).tobytes(),
        np.array([-1, -2, -np.inf], np.float32).tobytes(),
    ],
)
def test_a_reference_with_wrong_values_is_moved_aside_to_be_computed_again(tmp_path, values):
    written(tmp_path / "reference", values)
    assert not is_intact(tmp_path / "reference", 3)
    assert not (tmp_path / "reference").exists()
    assert is_intact(tmp_path / "reference", 3) is False


def test_a_reference_without_its_values_is_moved_aside(tmp_path):
    (tmp_path / "reference").mkdir()
    write_manifest(tmp_path / "reference", version=1)
    assert not is_intact(tmp_path / "reference", 3)
