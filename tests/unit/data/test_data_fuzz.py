"""Whatever a line holds, reading it gives a preference or says why not: no other exception, no text that cannot be encoded."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import GOOD, KEYS

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, detect_format, read_preference
from tandem.data.formats.paths import with_paths
from tandem.data.formats.preference import Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import RowError, SourceRow, read_rows

STRANGE = st.sampled_from(
    ["", " ", "\x00\x1b\x7f", "\ud800", "a\udc00b", "\ufeff", "\u2028", "user", "gpt", "tool", "text"]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -1, 0, 1]),
    st.floats(),
    st.text(max_size=5),
    STRANGE,
    st.sampled_from(["\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b", "Human: a\n\nAssistant:"]),
)
KEY = st.sampled_from(sorted({key for row in GOOD.values() for key in row} | {"role", "content", "type", "value"}))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY | STRANGE, inner, max_size=3),
    max_leaves=4,
)


def places(value, path=()):
    """The paths of everything inside a value: keys and indices from the top."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def mutated_rows(draw):
    """A good row of some format with up to four of its values, at any depth, removed, replaced or doubled."""
    row = json.loads(json.dumps(GOOD[draw(st.sampled_from(sorted(GOOD)))]))
    for _ in range(draw(st.integers(1, 4))):
        paths = list(places(row))
        if not paths:
            break
        *above, last = draw(st.sampled_from(paths))
        holder = row
        for key in above:
            holder = holder[key]
        change = draw(st.sampled_from(["remove", "replace", "wrap", "repeat", "rename"]))
        if change == "remove":
            del holder[last]
        elif change == "replace":
            holder[last] = draw(VALUES)
        elif change == "wrap":
            holder[last] = draw(st.sampled_from([[holder[last]], {"text": holder[last]}, str(holder[last])]))
        elif isinstance(holder, list):
            holder.insert(last, json.loads(json.dumps(holder[last])))
        else:
            holder[draw(KEY | STRANGE)] = holder.pop(last) if change == "rename" else holder[last]
    return row


@st.composite
def mutated_lines(draw):
    """A row as bytes; some are cut, some have bytes replaced, some have raw control characters or surrogates."""
    line = json.dumps(draw(mutated_rows()), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(line)))
        line = line[:start] + draw(st.binary(max_size=3)) + line[start + draw(st.integers(0, 3)) :]
    if draw(st.integers(0, 7)) == 0:
        line = line[: draw(st.integers(0, len(line)))]
    return line


def check(line: bytes) -> None:
    """Read one line as what it seems to be and as every format there is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_bytes(b"\n" + line)  # so that no line is taken for an archive
        for row in read_rows(file):
            assert isinstance(row, SourceRow | RowError)
            if isinstance(row, SourceRow):
                name, reason = detect_format(row, KEYS)
                assert name in FORMATS and reason
                for known in FORMATS.values():
                    check_reading(known.read, row)
                for keys in (KEYS, *WITH_SETTINGS):
                    check_reading(by_settings, row, keys)


# Settings for labels and for paths, each with the paths of some good row.
WITH_SETTINGS = (
    DatasetFields(label_values={"1": "a", "0": "b", "true": "tie", "null": "b"}),
    DatasetFields(label_key="preference_strength"),
    DatasetFields(columns={"prompt": "prompt", "completions": "answers[*].answer", "scores": "answers[*].rank"}),
    DatasetFields(columns={"chosen": "messages[:-1]", "rejected": "conversations[-1].value"}),
    DatasetFields(
        columns={"prompt": "prompt", "response_a": "response_1", "response_b": "completions[0].text", "label": "choice"}
    ),
)


def by_settings(row: SourceRow, keys: DatasetFields) -> Preference:
    found = with_paths(row, keys)
    return read_preference(found, keys, detect_format(found, keys)[0], Wording())


def check_reading(read, row: SourceRow, keys: DatasetFields = KEYS) -> None:
    try:
        preference = read(row, keys)
    except RowError as error:
        assert error.place == row.place and error.reason and error.message.endswith((".", "?"))
        return
    assert isinstance(preference, Preference) and len(preference.completions) >= 2
    prompt = preference.prompt
    texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
    for completion in preference.completions:
        answer = completion.answer
        texts += [answer] if isinstance(answer, str) else [message.content for message in answer]
    for text in texts:
        text.encode("utf-8")
    assert len({completion.rank for completion in preference.completions}) > 1


@given(mutated_lines())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_line_gives_a_preference_or_a_reason(line):
    check(line)


@pytest.mark.slow
@given(mutated_lines())
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_of_ten_thousand_lines_gives_a_preference_or_a_reason(line):
    check(line)
