"""Completions with tool turns as tokens: which are scored, on disk, cut, in packs, and through a model."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from calling import ADD, CALLING, TOKENIZER, calls, four, read
from letters import CHAT, END, EOS, ids
from models import as_policy, plain_token_logps, random_preference, tiny_model
from rows import KEYS, said

from tandem.config.sections.datasets import Data
from tandem.data.formats.preference import Preference
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.data.text.tokens import TokenizedPreference, tokenize
from tandem.errors import DataError
from tandem.packing.layout import join, lay_out


def tokenized(preference: Preference, **options) -> TokenizedPreference:
    (found,) = tokenize([preference], CALLING, pairing="all", **{"max_length": 200, **options})
    assert isinstance(found, TokenizedPreference), found
    return found


def test_calls_that_differ_only_in_an_argument_are_a_preference():
    found = read(chosen=[calls("", x="c")], rejected=[calls("", x="d")])
    assert [c.tolist() for c in tokenized(found).completions] == [
        [*ids(" call add x c"), END],
        [*ids(" call add x d"), END],
    ]


def test_special_tokens_spelled_in_tools_calls_and_answers_are_plain_text():
    found = tokenized(
        read(
            prompt="hi",
            tools=[{"function": {"name": "<end>"}}],
            chosen=[calls("", "<end>", x="</s>"), said("tool", "<end>"), said("assistant", "a<end>b")],
        )
    )
    assert found.prompt.tolist().count(END) == 2  # of the tools and of the user's turn
    chosen = found.completions[0].tolist()
    assert (chosen.count(END), chosen.count(EOS)) == (3, 0)
    assert TOKENIZER.decode(chosen).replace(" ", "") == (
        "call<unk>end<unk>x<unk><unk>s<unk><end>\ntool:<unk>end<unk><end>\nassistant:a<unk>end<unk>b<end>"
    )


def test_special_tokens_spelled_in_the_name_of_an_argument_are_plain_text():
    found = tokenized(read(chosen=[calls("", **{"<end>": "x"})]))
    assert found.completions[0].tolist().count(END) == 1


# Scored or not


def test_unscored_are_the_positions_of_tool_turns_and_the_headers_after_them():
    found = tokenized(read(prompt="hi", chosen=four(), rejected="no"))
    first, between, last = (
        [*ids(" call add"), END],
        [*ids("\ntool:four"), END, *ids("\nassistant:")],
        [*ids("four."), END],
    )
    assert found.completions[0].tolist() == first + between + last
    assert (len(first), len(between), len(last)) == (10, 22, 6)
    assert [positions.tolist() for positions in found.unscored] == [list(range(10, 32)), []]
    assert found.scored(0).tolist() == [*range(10), *range(32, 38)]
    assert found.scored(1).tolist() == [0, 1, 2]
    assert found.completions[0][found.scored(0)].tolist() == first + last


def test_without_tool_turns_nothing_is_unscored():
    assert tokenized(read(chosen=[calls("so")])).unscored == ()


@pytest.mark.parametrize(
    ("cut", "unscored"),
    [
        (34, [*range(10, 32)]),  # within the last turn
        (32, [*range(10, 32)]),
        (20, [*range(10, 20)]),  # within the tool's turn
        (7, []),  # within the call
    ],
)
def test_a_truncated_completion_loses_the_positions_after_the_cut(cut, unscored):
    prompt = [*ids("user:hi"), END, *ids("\nassistant:")]
    found = tokenized(
        read(prompt="hi", chosen=four(), rejected="no"), max_length=len(prompt) + cut, overlong="truncate_completion"
    )
    assert [len(completion) for completion in found.completions] == [cut, 3]
    assert [positions.tolist() for positions in found.unscored] == [unscored, []]
    assert found.scored(0).tolist() == [i for i in range(cut) if i not in unscored]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))

    def open_rows(name, rows, template=CALLING):
        source = tmp_path / name
        if name.endswith(".parquet"):
            parquet.write_table(pa.Table.from_pylist(rows), source)
        else:
            source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return open_store(str(source), KEYS, template, Data(), 200)

    return open_rows


ROWS = [
    {"prompt": "hi", "chosen": four("so", c="d"), "rejected": [said("assistant", "no")]},
    {"prompt": "so", "chosen": [said("assistant", "a")], "rejected": [said("assistant", "b")]},
    {"prompt": "hm", "chosen": [*four(c="d")[:2], *four(e="f")], "rejected": [calls("", "sum", g="h"), *four()[1:]]},
    {"prompt": "oh", "chosen": [said("assistant", "no")], "rejected": four("well", c="d")},
]


def test_unscored_tokens_are_read_back_from_the_disk_as_written(opened):
    store = opened("pairs.jsonl", ROWS)
    assert len(store) == 4
    for stored, given in zip(store, ROWS, strict=True):
        fresh = tokenized(read(**given))
        assert [c.tolist() for c in stored.completions] == [c.tolist() for c in fresh.completions]
        assert [u.tolist() for u in stored.unscored] == [u.tolist() for u in fresh.unscored]
        assert [stored.scored(i).tolist() for i in (0, 1)] == [fresh.scored(i).tolist() for i in (0, 1)]
    assert [len(stored.unscored) for stored in store] == [2, 0, 2, 2]
    assert store.num_scored_tokens.tolist() == [sum(len(stored.scored(i)) for i in (0, 1)) for stored in store]
    # With their ends "so call add c d" has 16, "four." 6 and "no" 3; 22 are between them.
    assert store.num_scored_tokens[0] == 16 + 6 + 3
    assert store.num_completion_tokens[0] == 16 + 22 + 6 + 3


def test_a_table_fills_every_call_with_nulls_and_the_same_tokens_are_read(opened):
    tools = [ADD, {"type": "function", "function": {"name": "sum", "strict": True}}]
    rows = [{**given, "tools": tools if i else None} for i, given in enumerate(ROWS)]
    lines, table = opened("pairs.jsonl", rows), opened("pairs.parquet", rows)
    assert [row.prompt.tolist() for row in table] == [row.prompt.tolist() for row in lines]
    for a, b in zip(lines, table, strict=True):
        assert [c.tolist() for c in a.completions] == [c.tolist() for c in b.completions]
        assert [u.tolist() for u in a.unscored] == [u.tolist() for u in b.unscored]
    assert table[1].prompt.tolist()[:14] == ids("tools:add.sum.")


def test_tools_as_a_text_in_a_table_reach_the_template(opened):
    store = opened("pairs.parquet", [{"prompt": "hi", "chosen": "yes", "rejected": "no", "tools": json.dumps([ADD])}])
    assert store[0].prompt.tolist() == [*ids("tools:add."), END, *ids("\nuser:hi"), END, *ids("\nassistant:")]


def test_rows_with_tools_are_refused_without_a_template(opened):
    with pytest.raises(DataError, match="messages without a template: 3"):
        opened("pairs.jsonl", ROWS, Template(TOKENIZER, None, {}))
    assert len(opened("plain.jsonl", ROWS[1:2], Template(TOKENIZER, CHAT, {}))) == 1


# Packs


def preference(prompt, *completions, unscored=()) -> TokenizedPreference:
    return TokenizedPreference(
        np.array(prompt, np.int32),
        tuple(np.array(completion, np.int32) for completion in completions),
        ((0, 1),),
        "pairs.jsonl:1",
        tuple(np.array(positions, np.int32) for positions in unscored),
    )


# 21 and 22 are a tool's turn; B has none.
A = preference([10, 11], [20, 21, 22, 23, 24], [30, 31], unscored=([1, 2], []))
B = preference([40], [50], [60, 61])


def test_only_scored_tokens_are_targets_and_the_rest_is_laid_out_all_the_same():
    pack = lay_out([0, 1], [A, B], length=16)
    #                        0   1 | 2   3   4   5   6 | 7   8 | 9 |10 |11  12| filler
    assert pack.token_ids.tolist() == [[10, 11, 20, 21, 22, 23, 24, 30, 31, 40, 50, 60, 61, 0, 0, 0]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3, 0, 1, 1, 2, 0, 0, 0]]
    # 22, at 4, is not scored, and predicts 23, which is.
    assert pack.predicting.tolist() == [1, 4, 5, 1, 7, 9, 9, 11]
    assert pack.target_ids.tolist() == [20, 23, 24, 30, 31, 50, 60, 61]
    assert pack.completion_lengths.tolist() == [3, 2, 1, 2]
    assert pack.num_tokens == 13
    assert (pack.winners.tolist(), pack.losers.tolist(), pack.owner.tolist()) == ([0, 2], [1, 3], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("arrangement", "predicting"),
    [
        # 10 11 20 21 22 23 24 | 10 11 30 31 in one row
        ("repeated", [1, 4, 5, 8, 9]),
        # 10 11 20 21 22 23 24 and, from 12 on, 10 11 30 31 in rows of 12
        ("separate", [1, 4, 5, 13, 14]),
    ],
)
def test_scored_tokens_do_not_depend_on_the_arrangement(arrangement, predicting):
    pack = lay_out([0], [A], length=12, arrangement=arrangement)
    assert pack.predicting.tolist() == predicting
    assert (pack.target_ids.tolist(), pack.completion_lengths.tolist()) == ([20, 23, 24, 30, 31], [3, 2])


def test_packs_with_and_without_tool_turns_are_joined():
    pack = join([lay_out([0], [A], length=16), lay_out([1], [B], length=16)])
    assert pack.predicting.tolist() == [1, 4, 5, 1, 7, 16, 16, 18]
    assert pack.completion_lengths.tolist() == [3, 2, 1, 2]


@pytest.mark.parametrize("arrangement", ["shared", "repeated", "separate"])
def test_packed_logps_of_scored_tokens_equal_those_of_each_sequence_alone(arrangement):
    rng = np.random.default_rng(11)
    plain = [random_preference(rng, num_completions=n, max_completion=20) for n in (3, 2, 2)]
    # Every third token is a tool's, but no completion's first.
    with_tools = [
        TokenizedPreference(
            p.prompt, p.completions, p.pairs, p.place, tuple(np.arange(2, len(c), 3) for c in p.completions)
        )
        for p in plain[:2]
    ]
    preferences = [*with_tools, plain[2]]
    assert sum(len(positions) for p in with_tools for positions in p.unscored) > 4
    model = tiny_model("llama")
    alone = [
        logps[torch.from_numpy(p.scored(number)).long()]
        for p in preferences
        for number, logps in enumerate(plain_token_logps(model, p))
    ]
    pack = lay_out(range(3), preferences, length=256, arrangement=arrangement)
    policy = as_policy(model)
    inputs = policy.inputs(pack, torch.device("cpu"))
    packed = policy(inputs)[: inputs.num_scored]
    assert pack.completion_lengths.tolist() == [len(logps) for logps in alone]
    torch.testing.assert_close(packed, torch.cat(alone), atol=2e-5, rtol=0)
