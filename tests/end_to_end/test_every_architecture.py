"""Every causal model type in transformers is exact or refused, packed and unpacked, as docs/architectures.md says."""

import re

import pytest
import transformers
from architectures import NAMES, PAGE, outcomes, table

VERSION = "5.23.0"  # of transformers, for which the table was written
of_this_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the table is for transformers {VERSION}"
)


@of_this_version
def test_the_page_lists_every_model_type_and_names_the_version():
    assert list(table()) == NAMES
    assert re.findall(r"transformers (\d+\.\d+\.\d+)", PAGE.read_text(encoding="utf-8")) == [VERSION]


@of_this_version
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_type_is_exact_or_refused_as_the_page_says(name):
    assert outcomes(name) == table()[name]
