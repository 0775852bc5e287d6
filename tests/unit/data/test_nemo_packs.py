"""Packed files of NeMo Aligner: read in both layouts, written so that Aligner loads them, and never executed."""

import math
import os
import pickle
import resource
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.data.formats.nemo_packs import nemo_pack_tokens, read_nemo, single_pairs, write_nemo
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import DataError

PACK_AGAIN_HINT = " Pack it again, or prepare from the JSONL file that it was packed from."
NAN = float("nan")


def pack(**changes) -> dict:
    """Prompt 5 6 with answers 7 8 and 9; prompt 4 with answers 70000 and 3 300. Labels in place."""
    return {
        "input_ids": [5, 6, 7, 8, 5, 6, 9, 4, 70000, 4, 3, 300],
        "labels": [-100, -100, 7, 8, -100, -100, 9, -100, 70000, -100, 3, 300],
        "reward": [1.0, 0.0, 3.5, -2.0],
        "lengths": [4, 3, 2, 3],
        "seq_boundaries": [0, 4, 7, 9, 12],
    } | changes


def pack_ahead(**changes) -> dict:
    """The same with labels one ahead: the last token of each sequence is a label only."""
    return {
        "input_ids": [5, 6, 7, 5, 6, 4, 4, 3],
        "labels": [-100, 7, 8, -100, 9, 70000, 3, 300],
        "reward": [1.0, 0.0, 3.5, -2.0],
        "lengths": [3, 2, 1, 2],
        "seq_boundaries": [0, 3, 5, 6, 8],
    } | changes


def save(file, *packs):
    """As the packing script does: a list of dicts of lists."""
    np.save(file, list(packs), allow_pickle=True)
    return file


def as_npy(pickled: bytes, num=1) -> bytes:
    header = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({num},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + pickled


def refusal(file) -> str:
    with pytest.raises(DataError) as caught:
        read_nemo(file)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


def plain(preference: TokenizedPreference) -> tuple:
    """A preference as lists, so that it compares."""
    return (
        preference.prompt.tolist(),
        [completion.tolist() for completion in preference.completions],
        preference.pairs,
        preference.scores,
        [positions.tolist() for positions in preference.unscored],
    )


def preference(prompt, *completions, pairs=((0, 1),), scores=(), unscored=(), place="a.jsonl:1"):
    def array(ids):
        return np.array(ids, np.int32)

    return TokenizedPreference(
        array(prompt),
        tuple(array(ids) for ids in completions),
        pairs,
        place,
        tuple(array(positions) for positions in unscored),
        {"score": scores or tuple(2.0 - i for i in range(len(completions)))},
    )


PAIRS = [([5, 6], [[7, 8], [9]], ((0, 1),), (1.0, 0.0), []), ([4], [[70000], [3, 300]], ((0, 1),), (3.5, -2.0), [])]


# Reading


@pytest.mark.parametrize("entry", [pack(), pack_ahead()], ids=["in place", "one ahead"])
def test_a_pack_becomes_its_pairs_whichever_layout_its_labels_have(tmp_path, entry):
    file = save(tmp_path / "packed_12_seed1.npy", entry, entry)
    packs = read_nemo(file)
    assert [[plain(pair) for pair in one] for one in packs] == [PAIRS, PAIRS]
    assert [pair.place for one in packs for pair in one] == [f"{file}:{at}" for at in ("0.0", "0.1", "1.0", "1.1")]
    first = packs[0][0]
    assert [array.dtype for array in (first.prompt, *first.completions)] == [np.dtype(np.int32)] * 3


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_and_numpy_numbers_are_read_like_lists(tmp_path, protocol):
    for order in "<>":
        entry = pack(
            input_ids=np.array(pack()["input_ids"], f"{order}i8"),
            labels=np.array(pack()["labels"], f"{order}i4"),
            reward=[np.float32(1), 0, np.float64(3.5), np.int64(-2)],
            lengths=np.array([4, 3, 2, 3], np.uint8),
        )
        objects = np.empty(1, object)
        objects[0] = entry
        file = tmp_path / "x.npy"
        file.write_bytes(as_npy(pickle.dumps(objects, protocol)))
        assert [plain(pair) for pair in read_nemo(file)[0]] == PAIRS


def test_old_and_new_module_names_of_numpy_are_accepted(tmp_path):
    file = save(tmp_path / "x.npy", pack())
    old = pickle.dumps(np.load(file, allow_pickle=True), 3).replace(b"numpy._core.", b"numpy.core.")
    new = old.replace(b"numpy.core.", b"numpy._core.")
    assert old != new
    for data in (old, new):
        file.write_bytes(as_npy(data))
        assert [plain(pair) for pair in read_nemo(file)[0]] == PAIRS


def test_padding_after_the_length_is_left_out(tmp_path):
    # As written for context parallelism: sequences padded with the end token 2, and their labels with -100.
    entry = pack(
        input_ids=[5, 6, 7, 8, 2, 2, 5, 6, 9, 2],
        labels=[-100, -100, 7, 8, -100, -100, -100, -100, 9, -100],
        reward=[1, 0],
        lengths=[4, 3],
        seq_boundaries=[0, 6, 10],
    )
    assert [plain(pair) for pair in read_nemo(save(tmp_path / "x.npy", entry))[0]] == [PAIRS[0]]


def test_tokens_without_a_label_inside_an_answer_are_not_scored(tmp_path):
    entry = pack(
        input_ids=[5, 7, 8, 9, 5, 6],
        labels=[-100, 7, -100, 9, -100, 6],
        reward=[1, 0],
        lengths=[4, 2],
        seq_boundaries=[0, 4, 6],
    )
    [[pair]] = read_nemo(save(tmp_path / "x.npy", entry))
    assert plain(pair) == ([5], [[7, 8, 9], [6]], ((0, 1),), (1.0, 0.0), [[1], []])
    assert pair.scored(0).tolist() == [0, 2]


def test_rolled_labels_without_a_last_one_are_one_ahead(tmp_path):
    entry = pack(
        input_ids=[5, 6, 7, 8, 5, 6, 9],
        labels=[-100, 7, 8, -100, -100, 9, -100],
        reward=[1, 0],
        lengths=[4, 3],
        seq_boundaries=[0, 4, 7],
    )
    assert [plain(pair) for pair in read_nemo(save(tmp_path / "x.npy", entry))[0]] == [PAIRS[0]]


def test_answers_that_match_both_layouts_take_the_layout_of_the_file(tmp_path):
    # In place: prompt 5, answers 7 and 8. One ahead, these would be prompts 5 7 and 5 8, which differ.
    one_token = pack(
        input_ids=[5, 7, 5, 8], labels=[-100, 7, -100, 8], reward=[1, 0], lengths=[2, 2], seq_boundaries=[0, 2, 4]
    )
    # One ahead: prompt 5 7, answers 7 and 8. In place, the first would be prompt 5, answer 7.
    either = pack(
        input_ids=[5, 7, 5, 7], labels=[-100, 7, -100, 8], reward=[1, 0], lengths=[2, 2], seq_boundaries=[0, 2, 4]
    )
    assert plain(read_nemo(save(tmp_path / "x.npy", one_token))[0][0])[:2] == ([5], [[7], [8]])
    assert plain(read_nemo(save(tmp_path / "x.npy", one_token, pack()))[0][0])[:2] == ([5], [[7], [8]])
    assert plain(read_nemo(save(tmp_path / "x.npy", either, pack_ahead()))[0][0])[:2] == ([5, 7], [[7], [8]])


def test_pairs_with_the_same_prompt_stay_separate_preferences(tmp_path):
    same = pack(
        input_ids=[5, 7, 5, 8, 5, 7, 5, 9],
        labels=[-100, 7, -100, 8, -100, 7, -100, 9],
        lengths=[2, 2, 2, 2],
        seq_boundaries=[0, 2, 4, 6, 8],
    )
    assert [plain(pair)[:2] for pair in read_nemo(save(tmp_path / "x.npy", same))[0]] == [
        ([5], [[7], [8]]),
        ([5], [[7], [9]]),
    ]


# What is wrong with a pack


BAD_PACKS = {
    "no dict": ("a pack", "pack 1: 'a pack', not a dict with input_ids, labels, reward, lengths, seq_boundaries."),
    "a key too few": (
        {key: value for key, value in pack().items() if key != "labels"},
        "pack 1: 'labels' is missing.",
    ),
    "a key too many": (pack(media=[]), "pack 1: 'media' is an unknown key."),
    "no list": (pack(input_ids="5 6 7"), "pack 1: input_ids is '5 6 7', not a list."),
    "labels": (pack(labels=[7] * 11), "pack 1: 11 labels for 12 tokens."),
    "lengths": (pack(lengths=[4, 3, 2]), "pack 1: 3 lengths for 4 sequences."),
    "rewards": (pack(reward=[1.0] * 5), "pack 1: 5 reward for 4 sequences."),
    "no boundaries": (pack(seq_boundaries=[]), "pack 1: seq_boundaries start with nothing, not with 0."),
    "first boundary": (pack(seq_boundaries=[1, 4, 12]), "pack 1: seq_boundaries start with 1, not with 0."),
    "boundaries fall": (
        pack(seq_boundaries=[0, 7, 4, 9, 12]),
        "pack 1, sequence 1: seq_boundaries do not increase: 4 follows 7.",
    ),
    "boundaries stay": (
        pack(seq_boundaries=[0, 4, 7, 7, 12]),
        "pack 1, sequence 2: seq_boundaries do not increase: 7 follows 7.",
    ),
    "last boundary": (
        pack(seq_boundaries=[0, 4, 7, 9, 11]),
        "pack 1: seq_boundaries end with 11, but there are 12 tokens.",
    ),
    "half a boundary": (
        pack(seq_boundaries=[0, 4.0, 12]),
        "pack 1: boundary 1 is 4.0, not a 64-bit integer.",
    ),
    "odd": (
        pack(seq_boundaries=[0, 4, 7, 12]),
        "pack 1: 3 sequences cannot be divided into pairs of chosen and rejected.",
    ),
    "empty": (
        {key: [] for key in pack()} | {"seq_boundaries": [0]},
        "pack 1: 0 sequences cannot be divided into pairs of chosen and rejected.",
    ),
    "too long": (
        pack(lengths=[4, 4, 2, 3]),
        "pack 1, sequence 1: the sequence has 3 tokens, but its length is given as 4.",
    ),
    "no length": (
        pack(lengths=[4, 3, 0, 3]),
        "pack 1, sequence 2: the sequence has 2 tokens, but its length is given as 0.",
    ),
    "length of text": (
        pack(lengths=[4, 3, "2", 3]),
        "pack 1, sequence 2: the sequence has 2 tokens, but its length is given as '2'.",
    ),
    "labels in the padding": (
        pack(lengths=[4, 3, 2, 2]),
        "pack 1, sequence 3: the sequence has length 2, but tokens after this length have labels.",
    ),
    "half a token": (
        pack(input_ids=[5, 6, 7, 8, 5, 6.5, 9, 4, 70000, 4, 3, 300]),
        "pack 1, sequence 1: token 1 is 6.5, not a 64-bit integer.",
    ),
    "a true token": (
        pack(input_ids=[5, 6, 7, 8, 5, 6, 9, True, 70000, 4, 3, 300]),
        "pack 1, sequence 2: token 0 is True, not a 64-bit integer.",
    ),
    "floats": (
        pack(input_ids=np.ones(12)),
        "pack 1, sequence 0: token 0 is 1.0, not a 64-bit integer.",
    ),
    "an endless token": (
        pack(input_ids=[5, 6, 7, 8, 5, 6, 9, 4, 2**63, 4, 3, 300]),
        "pack 1, sequence 2: token 1 is 9223372036854775808, not a 64-bit integer.",
    ),
    "a negative token": (
        pack(input_ids=[5, 6, 7, 8, 5, 6, 9, 4, 70000, -4, 3, 300]),
        "pack 1, sequence 3: token 0 is -4, which is not a token id.",
    ),
    "a huge token": (
        pack(input_ids=[5, 6, 7, 8, 5, 6, 9, 4, 70000, 2**31, 3, 300]),
        "pack 1, sequence 3: token 0 is 2147483648, which is not a token id.",
    ),
    "a negative label": (
        pack(labels=[-1, -100, 7, 8, -100, -100, 9, -100, 70000, -100, 3, 300]),
        "pack 1, sequence 0: label 0 is -1, neither a token id nor -100.",
    ),
    "no answer": (
        pack(labels=[-100, -100, 7, 8, -100, -100, -100, -100, 70000, -100, 3, 300]),
        "pack 1, sequence 1: all labels are -100, so the sequence has no completion.",
    ),
    "no reward": (
        pack(reward=[1.0, NAN, 1.0, 0.0]),
        "pack 1, sequence 1: its reward is nan, not a finite number.",
    ),
    "an endless reward": (
        pack(reward=[1.0, 0.0, 1.0, 10**400]),
        f"pack 1, sequence 3: its reward is 1{'0' * 79}..., not a finite number.",
    ),
    "a reward beyond float32": (
        pack(reward=[1.0, 0.0, 1.0, -1e39]),
        "pack 1, sequence 3: its reward -1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
    "a reward of text": (
        pack(reward=[1.0, 0.0, "1", 0.0]),
        "pack 1, sequence 2: its reward is '1', not a finite number.",
    ),
    "one wrong label": (
        pack(labels=[-100, -100, 7, 9, -100, -100, 9, -100, 70000, -100, 3, 300]),
        "pack 1, sequence 0: labels match neither their tokens (label 3 is 9, token 3 is 8) nor the next tokens (label 2 "
        "is 7, token 3 is 8).",
    ),
    "the other layout": (
        pack_ahead(),
        "pack 1, sequence 0: each label is the next token, but in pack 0, sequence 0 each label is the token itself. All "
        "sequences of a file must have the same layout.",
    ),
    "prompts": (
        pack(input_ids=[5, 6, 7, 8, 5, 1, 9, 4, 70000, 4, 3, 300]),
        "pack 1, sequences 0 and 1: their prompts differ (token 1 is 6 and 1), but a pair must have one prompt.",
    ),
    "prompt lengths": (
        pack(labels=[-100, -100, 7, 8, -100, -100, 9, -100, 70000, -100, -100, 300]),
        "pack 1, sequences 2 and 3: their prompts differ (1 and 2 tokens), but a pair must have one prompt.",
    ),
    "no prompt": (
        pack(labels=[-100, -100, 7, 8, -100, -100, 9, 4, 70000, 4, 3, 300]),
        "pack 1, sequence 2: the first token of the sequence has a label, so there is no prompt.",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKS)
def test_a_bad_pack_is_refused_by_place_value_and_reason(tmp_path, name):
    entry, message = BAD_PACKS[name]
    assert refusal(save(tmp_path / "x.npy", pack(), entry)) == message + PACK_AGAIN_HINT


def test_a_list_repeated_many_times_is_refused_before_it_is_expanded(tmp_path):
    file = save(tmp_path / "x.npy", *[pack()] * 200)
    size = file.stat().st_size
    assert refusal(file) == f"{size} bytes expand to {200 * 37} numbers, because lists are repeated.{PACK_AGAIN_HINT}"


# What is wrong with a file


@pytest.mark.parametrize(
    "data",
    [b"", b"\x93NUMPY", b"PK\x03\x04", b"\x93NUMPY\x02\x00" + as_npy(b"")[8:], as_npy(b"N.").replace(b"|O", b"i8")],
    ids=["empty", "cut", "zip", "another version", "numbers"],
)
def test_a_file_that_is_not_an_array_of_objects_is_refused(tmp_path, data):
    file = tmp_path / "x.npy"
    file.write_bytes(data)
    assert (
        refusal(file) == f"the file is not a one-dimensional array of objects written by numpy.save.{PACK_AGAIN_HINT}"
    )


def test_a_missing_file_is_reported_with_its_path(tmp_path):
    assert refusal(tmp_path / "x.npy") == "No such file or directory. Give the path of a packed_*.npy file."
    assert refusal(tmp_path) == "Is a directory. Give the path of a packed_*.npy file."


def test_a_header_with_a_wrong_count_is_refused(tmp_path):
    file = save(tmp_path / "x.npy", pack())
    data = file.read_bytes()
    file.write_bytes(data.replace(b"(1,), }" + b" " * 11, b"(999999999999,), }"))
    assert refusal(file) == f"the file has 1 packs, but its header says 999999999999.{PACK_AGAIN_HINT}"
    file.write_bytes(data.replace(b"(1,)", b"(0,)"))
    assert refusal(file) == f"the file has 1 packs, but its header says 0.{PACK_AGAIN_HINT}"
    file.write_bytes(data.replace(b"(1,), ", b"(1, 1)"))
    assert (
        refusal(file) == f"the file is not a one-dimensional array of objects written by numpy.save.{PACK_AGAIN_HINT}"
    )


def test_a_file_that_was_cut_off_is_reported_with_its_end(tmp_path):
    file = save(tmp_path / "x.npy", pack())
    data = file.read_bytes()
    file.write_bytes(data[:-40])
    assert refusal(file) == f"the file is cut off at byte {len(data) - 40}.{PACK_AGAIN_HINT}"


def test_a_shape_beyond_the_data_is_refused(tmp_path):
    """numpy's own arrays would read past the end of the list."""
    objects = np.empty(1, object)
    objects[0] = pack()
    data = pickle.dumps(objects, 3)
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(data.replace(b"(K\x01K\x01\x85", b"(K\x01K\xff\x85"), num=255))
    assert refusal(file).startswith("the file fills an array in a way that packs do not use, before byte ")


def test_an_array_has_as_many_bytes_as_its_numbers_take(tmp_path):
    file = save(tmp_path / "x.npy", pack(lengths=np.array([4, 3, 2, 3])))
    data = file.read_bytes()
    assert data.count(b"K\x04\x85") == 1
    file.write_bytes(data.replace(b"K\x04\x85", b"K\x03\x85"))
    expected = "the file contains an array of a wrong size or type (3 items of type 'i8' in 32 bytes)."
    assert refusal(file) == f"{expected}{PACK_AGAIN_HINT}"


HOSTILE = {
    "a huge index into the memo": b"\x80\x03Nr\xff\xff\xff\xff.",
    "a huge text": b"\x80\x03X\xff\xff\xff\xffa.",
    "a deep key": b"\x80\x03})" + b"\x85" * 200_000 + b"Ns.",
    "an endless frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a text encoded a thousand times": b"\x80\x03X\x40\x42\x0f\x00" + b"a" * 10**6 + b"q\x00c_codecs\nencode\nq\x01"
    b"X\x06\x00\x00\x00latin1q\x02" + b"h\x01h\x00h\x02\x86R" * 1000 + b".",
    "a list in itself": b"\x80\x03]q\x00h\x00a.",
    "an empty stack": b"\x80\x03t.",
    "nothing": b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_little_memory(tmp_path, name):
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(HOSTILE[name]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


# Nothing is run


class Call:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def stack_global(module: str, name: str, *args: str) -> bytes:
    """A pickle that calls `module.name` with texts; the name may have dots."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + b"".join(map(text, args)) + b"tR."


@pytest.fixture
def trap(tmp_path):
    """A file that exists once foreign code has run."""
    return tmp_path / "trap"


def attacks(trap) -> dict[str, tuple[bytes, str]]:
    touch, python = f"touch {trap}", f"open({str(trap)!r}, 'w')"
    inside = np.empty(1, object)
    inside[0] = pack(input_ids=[5, Call(os.system, touch)])
    return {
        "os.system": (pickle.dumps(Call(os.system, touch)), "posix.system"),
        "eval": (pickle.dumps(Call(eval, python)), "builtins.eval"),
        "subprocess": (pickle.dumps(Call(subprocess.check_output, ["touch", str(trap)])), "subprocess.check_output"),
        "inside a pack": (pickle.dumps(inside), "posix.system"),
        "old protocol": (pickle.dumps(inside, 2), "posix.system"),
        "dotted name": (stack_global("numpy", "ndarray.__class__", python), "numpy.ndarray.__class__"),
        "dotted module": (stack_global("numpy.os", "system", touch), "numpy.os.system"),
        "through numpy": (stack_global("numpy", "os.system", touch), "numpy.os.system"),
        "f2py": (stack_global("numpy.f2py.capi_maps", "eval", python), "numpy.f2py.capi_maps.eval"),
        "rundocs": (stack_global("numpy.testing", "rundocs", str(trap)), "numpy.testing.rundocs"),
        "load": (stack_global("numpy", "load", str(trap)), "numpy.load"),
        "decode": (stack_global("_codecs", "decode", str(trap)), "_codecs.decode"),
        "a known name of elsewhere": (stack_global("codecs", "encode", str(trap), "latin1"), "codecs.encode"),
        "import": (stack_global("builtins", "__import__", "antigravity"), "builtins.__import__"),
        "getattr": (stack_global("builtins", "getattr", "a", "b"), "builtins.getattr"),
    }


@pytest.mark.parametrize("name", sorted(attacks("")))
def test_a_foreign_name_is_refused_and_nothing_is_run(tmp_path, trap, name):
    data, named = attacks(trap)[name]
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(data))
    assert (
        refusal(file)
        == f"the file names '{named}', which packs do not use. No code from the file was run.{PACK_AGAIN_HINT}"
    )
    assert not trap.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        stack_global("_codecs", "encode", "a", "rot13"),
        stack_global("_codecs", "encode", "a"),
        stack_global("numpy", "dtype", "i8"),
        stack_global("numpy", "ndarray", "a"),
        stack_global("numpy.core.multiarray", "scalar", "a", "b"),
        stack_global("numpy._core.multiarray", "_reconstruct", "a", "b", "c"),
    ],
)
def test_allowed_names_only_make_objects_that_packs_use(tmp_path, pickled):
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(pickled))
    assert (
        refusal(file)
        == f"the file contains an object that packs do not use, before byte {len(as_npy(pickled)) - 1}.{PACK_AGAIN_HINT}"
    )


@pytest.mark.parametrize("code", [b"i", b"o", b"\x81", b"\x92", b"P", b"Q", b"\x82", b"\x97", b"0", b"2", b"I", b"S"])
def test_instructions_that_packs_do_not_use_are_refused(tmp_path, code):
    """Among them those that make objects (i, o, \\x81, \\x92), or ask for objects of elsewhere (P, Q, \\x82, \\x97)."""
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(b"\x80\x04" + code + b"os\nsystem\n."))
    assert (
        refusal(file)
        == f"the file contains a pickle instruction that packs do not use ({code!a} at byte 130).{PACK_AGAIN_HINT}"
    )


def test_reading_imports_nothing(tmp_path):
    file = save(tmp_path / "x.npy", pack())
    file.write_bytes(file.read_bytes().replace(b"ndarray", b"ma.core"))
    before = set(sys.modules)
    assert refusal(file).startswith("the file names 'numpy.ma.core'")
    assert set(sys.modules) == before


@pytest.fixture(scope="module")
def good_files(tmp_path_factory):
    """Bytes of files by every writer: lists and arrays, in protocols 3 and 4."""
    folder = tmp_path_factory.mktemp("good")
    arrays = {key: np.array(value) for key, value in pack().items()}
    write_nemo(folder / "own.npy", [[preference([5, 6], [7, 8], [9])]])
    files = [save(folder / "lists.npy", pack(), pack()), save(folder / "arrays.npy", arrays), folder / "own.npy"]
    return [file.read_bytes() for file in files]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_changed_bytes_give_packs_or_one_line(good_files, tmp_path, data):
    content = bytearray(data.draw(st.sampled_from(good_files)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.integers(0, 7)) == 0:
        del content[data.draw(st.integers(0, len(content))) :]
    file = tmp_path / "x.npy"
    file.write_bytes(content)
    try:
        packs = read_nemo(file)
    except DataError as error:
        assert str(error).startswith(f"{file}: ")
        assert "\n" not in str(error)
    else:
        assert all(len(pair.completions) == 2 and len(pair.prompt) for one in packs for pair in one)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pickled=st.lists(st.sampled_from([bytes([i]) for i in b"K\x01(teu]})abRN.q\x00h\x94\x85\x86\x87\x8c\x93cC"])))
@pytest.mark.slow
def test_any_instructions_give_packs_or_one_line(tmp_path, pickled):
    file = tmp_path / "x.npy"
    file.write_bytes(as_npy(b"\x80\x04" + b"".join(pickled)))
    refusal(file)


# Writing


def test_written_files_load_with_numpy_as_documented(tmp_path):
    file = tmp_path / "deep" / "packed_64_seed3.npy"
    write_nemo(file, [[preference([5, 6], [7, 8], [9]), preference([4], [70000], [3], scores=(3.5, -2.0))], []])
    loaded = np.load(file, allow_pickle=True)
    assert (loaded.dtype, loaded.shape) == (np.dtype(object), (1,))
    assert loaded[0] == {
        "input_ids": [5, 6, 7, 8, 5, 6, 9, 4, 70000, 4, 3],
        "labels": [-100, -100, 7, 8, -100, -100, 9, -100, 70000, -100, 3],
        "reward": [2.0, 1.0, 3.5, -2.0],
        "lengths": [4, 3, 2, 2],
        "seq_boundaries": [0, 4, 7, 9, 11],
    }
    kinds = {key: {type(value) for value in values} for key, values in loaded[0].items()}
    assert kinds == {key: {float if key == "reward" else int} for key in pack()}
    assert b"numpy._core" not in file.read_bytes()  # which numpy before 1.26 cannot load
    assert list(file.parent.iterdir()) == [file]


def test_every_pair_of_a_preference_repeats_its_prompt(tmp_path):
    ranked = preference([5], [1], [2], [3], pairs=((2, 0), (2, 1)), scores=(0.5, 0.25, 4.0))
    write_nemo(tmp_path / "x.npy", [[ranked]])
    [[first, second]] = read_nemo(tmp_path / "x.npy")
    assert plain(first) == ([5], [[3], [1]], ((0, 1),), (4.0, 0.5), [])
    assert plain(second) == ([5], [[3], [2]], ((0, 1),), (4.0, 0.25), [])
    assert [plain(pair) for pair in single_pairs(ranked)] == [plain(first), plain(second)]


def test_rewards_default_to_one_and_zero(tmp_path):
    write_nemo(tmp_path / "x.npy", [[preference([5], [1], [2], scores=(NAN, NAN))]])
    assert np.load(tmp_path / "x.npy", allow_pickle=True)[0]["reward"] == [1.0, 0.0]


@pytest.mark.parametrize(("scores", "shown"), [((NAN, 1.0), "nan"), ((math.inf, 1.0), "inf")])
def test_a_pair_with_only_one_score_is_refused(tmp_path, scores, shown):
    with pytest.raises(DataError) as caught:
        write_nemo(tmp_path / "x.npy", [[preference([5], [1], [2], scores=scores)]])
    assert str(caught.value) == (
        f"a.jsonl:1: the scores are {shown} (chosen) and 1 (rejected), but a NeMo pack needs two finite numbers. Give both "
        "completions a score, or neither."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_completion_without_scored_tokens_is_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        write_nemo(tmp_path / "x.npy", [[preference([5], [1], [2], unscored=[[0], []])]])
    assert str(caught.value) == (
        "a.jsonl:1: a completion has no scored tokens, which a NeMo pack cannot represent. Remove the row."
    )


def test_a_failed_write_leaves_no_files(tmp_path):
    folder = tmp_path / "x.npy"
    folder.mkdir()
    with pytest.raises(OSError):
        write_nemo(folder, [[preference([5], [1], [2])]])
    assert list(tmp_path.iterdir()) == [folder]


def test_tool_turns_have_no_label(tmp_path):
    pair = preference([5], [1, 2, 3], [4], unscored=[[1], []])
    write_nemo(tmp_path / "x.npy", [[pair]])
    assert np.load(tmp_path / "x.npy", allow_pickle=True)[0]["labels"] == [-100, 1, -100, 3, -100, 4]
    assert plain(read_nemo(tmp_path / "x.npy")[0][0]) == plain(pair)


def test_the_size_of_a_preference_counts_the_inputs_of_the_model(tmp_path):
    # Two sequences of 2 + 2 and 2 + 1 tokens are 3 + 2 inputs, each with its next token as the label.
    assert nemo_pack_tokens(preference([5, 6], [7, 8], [9])) == 5
    # Pairs (2, 0) and (2, 1) of completions of 1, 2 and 3 tokens after 2: 4 + 2 and 4 + 3.
    assert nemo_pack_tokens(preference([5, 6], [1], [1, 2], [1, 2, 3], pairs=((2, 0), (2, 1)))) == 13
    write_nemo(tmp_path / "x.npy", [[preference([5, 6], [7, 8], [9])]])
    bounds = np.load(tmp_path / "x.npy", allow_pickle=True)[0]["seq_boundaries"]
    assert sum(end - start - 1 for start, end in pairwise(bounds)) == 5


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
PREFERENCES = st.builds(
    lambda prompt, chosen, rejected, scores: preference(prompt, chosen, rejected, scores=scores),
    IDS,
    IDS,
    IDS,
    st.tuples(FLOATS, FLOATS),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packs=st.lists(st.lists(PREFERENCES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_written_files_read_back_the_same(tmp_path, packs):
    file = tmp_path / "x.npy"
    write_nemo(file, packs)
    assert [[plain(pair) for pair in one] for one in read_nemo(file)] == [
        [plain(pair) for pair in one] for one in packs
    ]


def test_a_pipe_in_place_of_packs_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(DataError) as refused:
        read_nemo(tmp_path / "pipe.npy")
    assert str(refused.value) == f"{tmp_path}/pipe.npy: a pipe or a device. Give the path of a packed_*.npy file."
