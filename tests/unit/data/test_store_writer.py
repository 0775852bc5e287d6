"""Sets written by several processes: the same bytes whoever works, templates without end refused, rows noted."""

import gzip
import json
import multiprocessing
import os
import signal

import pyarrow as pa
import pyarrow.feather as feather
import pytest
from letters import CHAT, END, ids, letter_tokenizer
from patience import within

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.read import sources
from tandem.data.store import making as store_module
from tandem.data.store import pool as workers
from tandem.data.store import processes
from tandem.data.store import writer as store_writer
from tandem.data.store.notes import TEMPLATED
from tandem.data.store.opening import open_store
from tandem.data.store.pool import METHOD
from tandem.data.store.processes import Processes
from tandem.data.store.writer import REPEATED, SWAPPED
from tandem.data.text import template as template_module
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError

RAW = Template(letter_tokenizer(), None, {})
CHATTING = Template(letter_tokenizer(), CHAT, {})
KEYS = DatasetFields()
ANOTHER_TEMPLATE = "Set another with policy.tokenizer.chat_template=FILE.jinja, or use conversations that it accepts."
FILES = ("tokens.arrow", "rejects.jsonl", "manifest.json")

# Writes on for ever, or writes ever more, where the user says so.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set said = namespace(text='x') %}{% for i in range(TIMES) %}{% set said.text = said.text + said.text %}"
    "{% endfor %}{{ said.text }}"
)

forking = pytest.mark.skipif(METHOD != "fork", reason="only a forked process has what the test changed")


@pytest.fixture(autouse=True)
def impatient():
    with within(120):
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def source(tmp_path):
    return tmp_path / "pairs.jsonl"


def lenient(**changes) -> Data:
    return Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, **changes)


def pair(prompt="hi", chosen="yes", rejected="no", **more) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def write(source, *rows) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def opened(source, *, template=RAW, keys=KEYS, max_length=100, progress=lambda share: None, **changes):
    return open_store(str(source), keys, template, lenient(**changes), max_length, progress=progress)


def contents(store) -> dict[str, bytes]:
    return {name: (store.folder / name).read_bytes() for name in FILES}


def only_for(word: str, template: str) -> Template:
    return Template(
        letter_tokenizer(), "{% if messages[0].content == '" + word + "' %}" + template + "{% endif %}" + CHAT, {}
    )


# The same bytes


MIXED = [
    pair("what"),
    "{",
    pair("so", "a", "bb"),
    pair(chosen="no"),
    pair(prompt=" "),
    pair("hi \x07"),
    pair("so", "a", "bb"),
    pair("what a long question this is"),
    pair("why", "c", "d"),
]


@forking
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.arrow"])
def test_the_number_of_processes_changes_no_byte(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    source = tmp_path / name
    rows = [row for row in MIXED if isinstance(row, dict)]
    if name == "pairs.jsonl":
        write(source, *MIXED)
    elif name == "pairs.json":
        source.write_text(json.dumps(rows))
    else:
        feather.write_feather(pa.Table.from_pylist(rows), str(source), compression="uncompressed")
    found = []
    for num_workers in (0, 1, 2, 3):
        monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / f"cache-{num_workers}"))
        store = opened(source, num_workers=num_workers, max_length=20)
        found.append(contents(store))
        assert store.counts.accepted == 5
    assert found[0] == found[1] == found[2] == found[3]
    assert [json.loads(line)["place"] for line in found[0]["rejects.jsonl"].splitlines()] == [
        f"{source}:{line}" for line in ((2, 4, 5, 8) if name == "pairs.jsonl" else (3, 4, 7))
    ]


def test_the_number_of_processes_is_no_part_of_a_stores_name(source):
    write(source, pair())
    assert opened(source, num_workers=0).fingerprint == opened(source, num_workers=2).fingerprint


@pytest.mark.parametrize(("num_bytes", "num_workers"), [(100, 1), (999, 1), (1000, 2), (2999, 3), (9000, 4)])
def test_auto_takes_another_process_for_so_many_bytes_and_no_more_than_there_are_cores(
    source, monkeypatch, num_bytes, num_workers
):
    asked, real = [], Processes.tokenize

    def watched(processes, recipe, chunks, num_workers):
        asked.append(num_workers)
        return real(processes, recipe, chunks, num_workers)

    monkeypatch.setattr(store_module, "default_workers", lambda: 4)
    monkeypatch.setattr(store_module, "BYTES_PER_WORKER", 1000)
    monkeypatch.setattr(Processes, "tokenize", watched)
    source.write_text(json.dumps(pair()).ljust(num_bytes, "\n"), encoding="utf-8")
    assert len(opened(source)) == 1
    assert asked == [num_workers]


# Templates without end


@forking
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_template_that_hangs_is_reported_with_the_place_of_its_row(source, cache, monkeypatch, num_workers):
    monkeypatch.setattr(processes, "ROW_SECONDS", 0.5)
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    write(source, pair("a"), pair("b"), "", pair("c"), pair("loop"), pair("d"))
    with pytest.raises(DataError) as caught:
        opened(source, template=only_for("loop", ENDLESS), num_workers=num_workers)
    assert str(caught.value) == (
        f"{source}:5: the chat template did not finish within 0.5 seconds. "
        "Set another with policy.tokenizer.chat_template=FILE.jinja."
    )
    assert list(cache.iterdir()) == []
    assert multiprocessing.active_children() == []


@forking
def test_a_template_that_never_ends_is_refused_before_any_row(source, monkeypatch):
    monkeypatch.setattr(processes, "ROW_SECONDS", 0.3)
    write(source, pair())
    with pytest.raises(ConfigError) as caught:
        opened(source, template=Template(letter_tokenizer(), ENDLESS, {}))
    assert str(caught.value) == (
        "the chat template did not finish within 0.3 seconds. Set another with policy.tokenizer.chat_template=FILE.jinja."
    )
    assert multiprocessing.active_children() == []


@forking
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_template_that_takes_all_memory_is_a_bad_row_and_the_others_are_read(source, monkeypatch, num_workers):
    monkeypatch.setattr(workers, "TEMPLATE_BYTES", 128 * 1024 * 1024)
    write(source, pair("a"), pair("much"), pair("b"))
    store = opened(source, template=only_for("much", DOUBLING.replace("TIMES", "30")), num_workers=num_workers)
    assert [row.place for row in store] == [f"{source}:1", f"{source}:3"]
    assert store.examples == [
        {
            "place": f"{source}:2",
            "kind": "bad",
            "reason": "template fails",
            "message": f"the chat template fails: MemoryError. {ANOTHER_TEMPLATE}",
        }
    ]


@forking
def test_a_template_that_always_takes_all_memory_is_refused_with_the_rows(source, monkeypatch):
    monkeypatch.setattr(workers, "TEMPLATE_BYTES", 128 * 1024 * 1024)
    write(source, pair())
    with pytest.raises(DataError) as caught:
        opened(source, template=Template(letter_tokenizer(), DOUBLING.replace("TIMES", "30"), {}))
    assert str(caught.value) == (
        f"{source}: none of 1 rows can be read:\n  template fails: 1\n    {source}:1: the chat template fails: MemoryError. "
        f"{ANOTHER_TEMPLATE}"
    )


def test_a_template_that_does_not_parse_is_refused_before_any_row(source):
    write(source, pair())
    with pytest.raises(ConfigError) as caught:
        opened(source, template=Template(letter_tokenizer(), "{% for %}", {}))
    assert str(caught.value) == (
        "the chat template is malformed in line 1: Expected an expression, got 'end of statement block'. "
        "Set another with policy.tokenizer.chat_template=FILE.jinja."
    )


def test_a_template_that_needs_a_system_turn_reads_the_rows_that_have_one(source):
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHAT
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    write(source, pair(turns), pair(turns, "c", "d"), pair("hi"))
    store = opened(source, template=Template(letter_tokenizer(), needs, {}))
    assert [row.place for row in store] == [f"{source}:1", f"{source}:2"]
    assert [(e["place"], e["message"]) for e in store.examples] == [
        (f"{source}:3", f"the chat template fails: no system turn. {ANOTHER_TEMPLATE}")
    ]


@forking
def test_a_template_that_writes_without_measure_is_a_bad_row(source, monkeypatch):
    # Doubled ten times: 1,024 letters, and "user:much<end>\nassistant:", 25 more.
    monkeypatch.setattr(template_module, "MAX_RENDERED", 1048)
    write(source, pair("a"), pair("much"))
    store = opened(source, template=only_for("much", DOUBLING.replace("TIMES", "10")))
    assert [(e["place"], e["message"]) for e in store.examples] == [
        (
            f"{source}:2",
            "the chat template writes 1,049 characters. Set another with policy.tokenizer.chat_template=FILE.jinja.",
        )
    ]


@forking
def test_a_process_that_is_killed_is_reported_with_its_rows(source, cache, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    real = store_writer.read_preference

    def dies_at_row_4(row, *rest):
        return os.kill(os.getpid(), signal.SIGKILL) if row.line == 4 else real(row, *rest)

    monkeypatch.setattr(store_writer, "read_preference", dies_at_row_4)
    write(source, *(pair(letter) for letter in "abcdef"))
    with pytest.raises(DataError) as caught:
        opened(source, num_workers=2)
    assert str(caught.value) == (
        f"{source}:3-4: the process that tokenised these rows was killed, probably out of memory. Try data.num_workers=1."
    )
    assert list(cache.iterdir()) == []


# Killed


def killed_half_way(source) -> None:
    opened(source, num_workers=1, progress=lambda share: os.kill(os.getpid(), signal.SIGKILL) if share > 0.5 else None)


def killed_with_only_its_name_missing(source) -> None:
    def written_then_killed(*args, **facts):
        write_manifest(*args, **facts)
        os.kill(os.getpid(), signal.SIGKILL)

    write_manifest, store_module.write_manifest = store_module.write_manifest, written_then_killed
    opened(source, num_workers=1)


@forking
@pytest.mark.parametrize("killed", [killed_half_way, killed_with_only_its_name_missing])
def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_store_and_the_rerun_is_the_same(
    tmp_path, source, cache, monkeypatch, killed
):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 1)
    write(source, *(pair("x" * n) for n in range(1, 21)))
    victim = multiprocessing.get_context("fork").Process(target=killed, args=(source,))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    left = [folder.name for folder in cache.iterdir()]
    assert len(left) == 1 and left[0].startswith(".")
    again = opened(source)
    assert len(again) == 20
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "undisturbed"))
    assert contents(opened(source)) == contents(again)


# What is noted of rows that are used


def test_control_characters_are_noted_once_a_row_and_line_ends_and_tabs_are_not(source):
    write(source, pair("a\x00\x07"), pair("b", chosen="\x1b", rejected="\x7f"), pair("c\t\r\nd"), pair("e"))
    assert opened(source).notes == {"control characters in the text": 2}


def test_special_tokens_that_a_message_spells_are_noted_and_those_of_the_template_are_not(source):
    write(source, pair("a <end>"), pair("b", rejected="</s><s>"), pair("c"))
    store = opened(source, template=CHATTING)
    assert store.notes == {"special tokens spelled in a message, encoded as plain text": 2, TEMPLATED: 1}
    assert store[0].prompt.tolist().count(END) == 1
    assert opened(source).notes == {}  # in raw text they are meant


def scored(chosen, rejected) -> dict:
    return {
        "prompt": "hi",
        "chosen_response": "yes",
        "rejected_response": "no",
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }


def test_a_chosen_completion_scored_below_the_rejected_one_is_noted(source):
    write(source, scored(1.0, 2.0), scored(2.0, 1.0), scored(1.0, 1.0), scored(None, 2.0), scored(-3.0, -2.5))
    assert opened(source).notes == {"chosen scored below rejected": 2, REPEATED: 4}


def test_of_several_completions_a_pair_is_noted_only_where_it_is_made(source):
    # best_worst pairs 3.0 with 1.0 alone; all pairs 1.0 with 2.0 too.
    group = [
        {"rank": i, "completion": text, "score": s} for i, (text, s) in enumerate(zip("abc", (3, 1, 2), strict=True))
    ]
    write(source, {"context": "hi", "completions": group})
    assert opened(source).notes == {}
    assert opened(source, pairing="all").notes == {"chosen scored below rejected": 1}


def test_scores_are_read_from_a_csv_file_and_an_empty_one_is_none(tmp_path):
    source = tmp_path / "pairs.csv"
    source.write_text(
        "prompt,chosen_response,rejected_response,chosen_reward,rejected_reward\n"
        "hi,yes,no,1.5,2\nso,a,b,-1e0,-2.25\nwhy,c,d,,\nwell,e,f,good,1\n"
    )
    store = opened(source)
    assert [row.scores for row in store][:2] == [(1.5, 2.0), (-1.0, -2.25)]
    assert str(store[2].scores) == "(nan, nan)"
    assert store.notes == {"chosen scored below rejected": 1}
    assert [(e["place"], e["reason"], e["message"]) for e in store.examples] == [
        (f"{source}:5", "bad score", "chosen_reward: 'good' is not a finite number.")
    ]


def test_a_preference_among_helpsteers_csv_columns_is_a_number(tmp_path):
    source = tmp_path / "pairs.csv"
    source.write_text("context,response1,response2,overall_preference\nhi,yes,no,2\n")
    store = opened(source)
    assert store.format == "HelpSteer3"
    assert store[0].pairs == ((1, 0),)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.csv"])
def test_a_byte_order_mark_is_noted_for_each_file_that_has_one(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 1)
    rows = [pair(), pair("so")]
    text = {
        "pairs.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "pairs.json": json.dumps(rows),
        "pairs.csv": "prompt,chosen,rejected\nhi,yes,no\nso,yes,no\n",
    }[name]
    for number, mark in enumerate([b"\xef\xbb\xbf", b"", b"\xef\xbb\xbf"]):
        (tmp_path / f"{number}-{name}").write_bytes(mark + text.encode())
    store = opened(tmp_path / f"?-{name}")
    assert store.notes == {"byte-order mark at the start of a file": 2, REPEATED: 4}
    assert [row.prompt.tolist() for row in store] == [ids("hi"), ids("so")] * 3


@forking
@pytest.mark.parametrize("large", [False, True])
def test_small_sets_share_their_processes_and_are_what_they_are_alone(source, tmp_path, monkeypatch, large):
    monkeypatch.setattr(processes, "MAX_REUSED_CHUNKS", 4 if large else 5)
    others = tmp_path / "others.jsonl"
    write(source, *(pair(f"hi {number}") for number in range(20)))
    write(others, *({"question": f"so {number}", "response_j": "yes", "response_k": "no"} for number in range(20)))
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 4)
    alone = [contents(opened(one, template=CHATTING, num_workers=2)) for one in (source, others)]
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "another"))
    working = []
    with Processes(CHATTING) as kept:
        for number, one in enumerate((source, others)):
            store = open_store(str(one), KEYS, CHATTING, lenient(num_workers=2), 100, processes=kept)
            assert contents(store) == alone[number]
            working.append({child.pid for child in multiprocessing.active_children()})
    assert len(working[0]) == (0 if large else 2)
    assert working[0] == working[1]
    assert multiprocessing.active_children() == []


# Duplicates and lengths


@pytest.mark.parametrize("rows_a_chunk", [1, 512])
def test_each_preference_that_stood_before_is_a_duplicate(source, monkeypatch, rows_a_chunk):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", rows_a_chunk)
    others = [pair("so"), pair(chosen="yess"), pair(rejected="nno"), pair(chosen="no", rejected="yes")]
    write(source, pair(), *others, pair(), pair("so"), pair())
    store = opened(source)
    assert len(store) == 8
    assert store.notes == {REPEATED: 3, SWAPPED: 4}
    assert store.noted_at == {REPEATED: f"{source}:6", SWAPPED: f"{source}:1"}


def test_preferences_that_contradict_each_other_are_noted(source):
    opposite = pair(chosen="no", rejected="yes")
    write(source, pair(), pair(), opposite, pair("so"), pair("so", chosen="no", rejected="yess"))
    store = opened(source)
    assert store.notes == {"preferences that another row has with chosen and rejected swapped": 3, REPEATED: 1}
    assert store.noted_at == {SWAPPED: f"{source}:1", REPEATED: f"{source}:2"}


def test_the_order_in_which_ranked_completions_stand_makes_no_other_preference(source):
    answers = [{"completion": "yes", "score": 1}, {"completion": "no", "score": 0}]
    write(source, *({"prompt": "hi", "completions": some} for some in (answers, answers[::-1])))
    store = opened(source)
    assert store.notes == {"preferences that repeat an earlier one": 1}


def test_preferences_over_each_limit_are_counted_those_left_out_too(source):
    # Tokens of prompt and longest completion with its end: 256, 257, 512, 513 and 1,025.
    write(source, *(pair("p" * (n - 5), "yyyy", "no") for n in (256, 257, 512, 513, 1025)))
    store = opened(source, max_length=512)
    assert (len(store), store.counts.filtered) == (3, {"over-long": 2})
    assert {limit: count for limit, count in store.longer_than.items() if count} == {256: 4, 512: 2, 1024: 1}
    assert list(store.longer_than) == [2**power for power in range(8, 18)]


def test_preferences_that_are_cut_are_counted_by_what_they_were(source):
    write(source, pair("p" * 252, "yyyy", "no"), pair("hi"))
    store = opened(source, max_length=100, overlong="truncate_prompt")
    assert store.longest.tolist() == [100, 6]
    assert store.longer_than[256] == 1


# Progress


def shares_told(source, **changes) -> list[float]:
    told: list[float] = []
    opened(source, progress=told.append, **changes)
    return told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_progress_rises_with_the_bytes_read_up_to_the_whole(source, monkeypatch, num_workers):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    write(source, *(pair(letter) for letter in "abcdefgh"))  # lines of equal length
    assert shares_told(source, num_workers=num_workers) == [0.25, 0.5, 0.75, 1.0]


def test_progress_over_several_files_goes_by_their_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    for name, letters in (("a", "ab"), ("b", "cdefgh")):
        write(tmp_path / f"{name}.jsonl", *(pair(letter) for letter in letters))
    assert shares_told(tmp_path / "?.jsonl") == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["pairs.jsonl.gz", "pairs.json", "pairs.csv", "pairs.parquet"])
def test_progress_of_every_kind_of_file_never_falls_and_ends_at_the_whole(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 3)
    rows = [pair(letter) for letter in "abcdefgh"]
    source = tmp_path / name
    if name == "pairs.parquet":
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), source)
    elif name == "pairs.csv":
        source.write_text("prompt,chosen,rejected\n" + "".join(f"{row['prompt']},yes,no\n" for row in rows))
    elif name == "pairs.json":
        source.write_text(json.dumps(rows))
    else:
        source.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    told = shares_told(source)
    assert len(told) == 3
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_progress_of_an_arrow_file_never_falls(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    table = pa.Table.from_pylist([pair(letter) for letter in "abcdefgh"])
    source = tmp_path / "pairs.arrow"
    with pa.OSFile(str(source), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    assert shares_told(source) == [0.25, 0.5, 0.75, 1.0]


@forking
def test_texts_of_extraordinary_length_are_not_encoded_together(tmp_path, monkeypatch):
    """Over-long rows are left out before the next ones are encoded, and what is kept is the same."""
    noted = tmp_path / "sizes"  # by another process
    real = store_writer.encode

    def watched(rendered, *rest):
        with noted.open("a") as file:
            file.write(f"{sum(item[1].num_characters for item in rendered)}\n")
        return real(rendered, *rest)

    rows = [{"prompt": f"hi {i}", "chosen": "yes " * (400 if i % 2 else 1), "rejected": "no"} for i in range(12)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lenient = Data(max_filtered_share=1.0, num_workers=0)
    stores = []
    for limit in (10**9, 2000):
        monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / str(limit)))
        monkeypatch.setattr(store_writer, "CHARACTERS_AT_ONCE", limit)
        monkeypatch.setattr(store_writer, "encode", watched)
        noted.write_text("")
        stores.append(open_store(str(source), DatasetFields(), Template(letter_tokenizer(), CHAT, {}), lenient, 100))
        sizes = [int(line) for line in noted.read_text().splitlines()]
        assert max(sizes) <= limit + 2000
        assert len(sizes) == (1 if limit == 10**9 else 3)
    assert [[p.place, *map(list, p.completions)] for p in stores[0]] == [
        [p.place, *map(list, p.completions)] for p in stores[1]
    ]
    assert stores[0].counts == stores[1].counts
    assert stores[0].counts.filtered == {"over-long": 6}


def test_what_was_cut_is_counted(source):
    write(source, pair(), pair("what a question"), pair("why"))
    store = opened(source, max_length=8, overlong="truncate_prompt")
    assert len(store) == 3
    assert store.notes == {"over-long, cut by data.overlong=truncate_prompt": 1}


def test_pairs_of_identical_completions_are_counted(source):
    answers = [[("a", 3), ("a", 2), ("b", 1)], [("a", 3), ("b", 2), ("c", 1)], [("a", 3), ("b", 2), ("a", 1)]]
    write(
        source,
        *(
            {"prompt": "hi", "completions": [{"completion": text, "score": score} for text, score in row]}
            for row in answers
        ),
    )
    store = opened(source, pairing="all")
    assert store.num_pairs.tolist() == [2, 3, 2]
    assert store.notes == {"pairs of identical completions, left out": 2}


def test_a_question_that_the_template_leaves_out_is_counted(source):
    answers = "bot:{% for m in messages if m.role != 'user' %}{{ m.content }}<end>{% endfor %}"
    write(source, pair("what"), pair("so", "a", "b"))
    store = opened(source, template=Template(letter_tokenizer(), answers, {}))
    assert store.notes == {"turns of the prompt that the chat template leaves out": 2}


def test_texts_that_were_hardly_meant_are_counted(source):
    turns = json.dumps([{"role": "user", "content": "so"}])
    write(
        source,
        pair(turns),
        pair(str([{"role": "user", "content": "so"}]), "a", "b"),
        pair("what is this", "what is this a"),
    )
    store = opened(source)
    assert store.notes == {
        "messages that are written as a text, and taken as one": 2,
        "completions that begin with their prompt": 1,
    }
    assert store.noted_at["completions that begin with their prompt"] == f"{source}:3"


def test_reasoning_that_the_template_leaves_out_is_counted(source):
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "well"}
    write(source, pair(chosen=[thought]), pair("so"))
    assert opened(source, template=CHATTING).notes == {"reasoning that the chat template leaves out": 1}
    thinking = Template(
        letter_tokenizer(), CHAT.replace("message.content", "(message.reasoning_content or '') + message.content"), {}
    )
    assert opened(source, template=thinking).notes == {}


def test_what_is_left_out_is_told_though_somebody_says_the_same(source):
    """A tool, a system turn and a thought whose words stand elsewhere in the row."""
    tools = [{"type": "function", "function": {"name": "so", "parameters": {}}}]
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "be kind to me"}]
    thought = {"role": "assistant", "content": "yes yes", "reasoning_content": "yes"}
    write(source, {**pair("what is so"), "tools": tools}, pair(asked), pair("why", [thought]))
    no_system = CHAT.replace("for message in messages", "for message in messages if message.role != 'system'")
    assert no_system != CHAT
    assert opened(source, template=Template(letter_tokenizer(), no_system, {})).notes == {
        "tools that the chat template leaves out": 1,
        "system turns that the chat template leaves out": 1,
        "reasoning that the chat template leaves out": 1,
    }
    assert "system turns that the chat template leaves out" not in opened(source, template=CHATTING).notes


def test_what_the_template_leaves_out_or_adds_is_counted(source):
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    again = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "so"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    write(source, pair(asked), pair(again), {**pair("why"), "tools": [*tools, {"function": "odd"}]})
    assert opened(source, template=CHATTING).notes == {"tools that the chat template leaves out": 1}
    last = "{% set message = messages[-1] if messages[-1].role == 'user' else messages[-2] %}{{ message.content }}<end>"
    answer = "{% if messages[-1].role == 'assistant' %}{{ 'assistant:' + messages[-1].content }}<end>{% endif %}"
    assert opened(source, template=Template(letter_tokenizer(), last + answer, {})).notes == {
        "system turns that the chat template leaves out": 1,
        "turns of the prompt that the chat template leaves out": 1,
        "tools that the chat template leaves out": 1,
        "answers that the chat template begins with more text, which is scored": 3,
    }


def test_an_empty_completion_that_no_pair_needs_costs_nothing(source):
    answers = [{"completion": text, "score": score} for text, score in (("a", 3), (" ", 2), ("b", 1))]
    write(source, {"prompt": "hi", "completions": answers}, {"prompt": "so", "completions": answers[::2]})
    assert (len(opened(source)), opened(source).counts.filtered) == (2, {})
    assert opened(source, pairing="all").counts.filtered == {"empty completion": 1}
