"""Interpolations that would take all memory or time are refused; ordinary ones are not."""

import time

import pytest

from tandem.config.environment import MAX_RESOLVED
from tandem.config.load import load_config
from tandem.errors import ConfigError

TOO_MUCH = (
    "configuration: its interpolations (${key}) expand to more than 2,000 resolved references, 100,000 values or "
    "4,194,304 characters. Use fewer interpolations."
)
LEVELS = range(40)


@pytest.mark.parametrize(
    "text",
    [
        *("".join(f"a{n}: {one.replace('NEXT', f'a{n + 1}')}\n" for n in LEVELS) + "a40: x\nname: a40\n" for one in (
            "'${NEXT}${NEXT}'",
            "['${NEXT}', '${NEXT}']",
            "{b: '${NEXT}', c: '${NEXT}'}",
            "'${oc.select:NEXT}${oc.select:NEXT}'",
            "'${${name}}${NEXT}${NEXT}'",
        )),
        "a: " + "x" * 400_000 + "\nb: '" + "${a}" * 20 + "'\n",
        "a: [" + "1," * 2000 + "]\nb: [" + "'${a}', " * 60 + "]\n",
    ],
)  # fmt: skip
def test_a_few_lines_that_expand_to_a_billion_values_are_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        load_config(str(file), [])
    assert str(refused.value) == TOO_MUCH
    assert time.monotonic() - began < 60


def test_circular_interpolations_end_in_one_message(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("a: '${b}${b}'\nb: '${a}${a}'\n")
    with pytest.raises(ConfigError, match="configuration: "):
        load_config(str(file), [])


def test_as_many_interpolations_as_configurations_use_are_resolved():
    names = [f"x{number}" for number in range(200)]
    sets = ",".join(f"{name}: ${{data.default.data_path}}" for name in names)
    loaded = load_config(None, ["data.default.data_path=embedded", f"data.val_data_paths={{{sets}}}"])
    assert {one.data_path for one in loaded.config.data.val_data_paths.values()} == {"embedded"}
    assert 2 * len(names) < MAX_RESOLVED
