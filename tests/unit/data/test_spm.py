"""SentencePiece models: the ids of the sentencepiece library, and completions that continue their prompt."""

import json
import random
from pathlib import Path

import pytest
from sentences import KINDS, SYMBOLS, library, model

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.config.sections.policy import Tokenizer
from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.store.opening import open_store
from tandem.data.text.chat import SHIELD
from tandem.data.text.sentencepiece_model import SentencePiece, convert
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import state_of
from tandem.data.text.tokens import tokenize

EOS, TURN = 2, 4  # ids of </s> and <turn>
FIXED = [
    *("", " ", "  ", "\n", "\t", "a", " a", "a ", "  a  b  ", "a\n\nb\n", "\ta\tb", "a\u00a0b\u3000c", "a\r\nb\rc"),
    *("Hello world", "▁x ▁", "▁", "=====----=====", "aaaaaaaaaaaaa", "1234567890", "q" * 3000, "      x"),
    *(
        "<extra_id_0>System\n\n<extra_id_1>User\nHi\n<extra_id_1>Assistant\n",
        " <extra_id_1> x",
        "<b>bold<b>",
        "<extra_id_",
    ),
    *("😀 👩‍👩‍👧 🇩🇪", "ｶﾞｷﾞ ﾊﾟ", "ﬁ Å é e\u0301 ㎏ ½ ①", "가각 \u1100\u1161\u11a8", "नमस्ते", "مرحبا", "\u200bzero\u200d"),
    *("\ufeffbom", "\x00nul\x01\x7f", "…", "<unk> <0x0A>", "ꙮ\U00010348", "\ufffd"),
]
ALPHABETS = (
    [
        *"abcdefghijklmnopqrstuvwxyz eetao   .,!?'\n\t-=_01éüßжя中文日ガｶﾞ가😀🇩🇪\u00a0\u3000\u0301ﬁ½",
        *SYMBOLS,
        " the",
        "ing ",
    ],
    [*"ab "],
    [*" \n▁"],
)
LETTERS = random.Random(0)
TEXTS = FIXED + [
    "".join(LETTERS.choices(letters, k=LETTERS.randrange(1, 50))) for letters in ALPHABETS for _ in range(200)
]


def tokenizer(**settings) -> SentencePiece:
    return SentencePiece(model(**settings))


def shown(tokenizer: SentencePiece, ids: list[int]) -> list[str]:
    """Pieces as SentencePiece writes them: "▁Yes"."""
    return [tokenizer.decode([id]).replace(" ", "▁") for id in ids]


# Texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_of_the_library(kind):
    ours, theirs = SentencePiece(model(*kind)), library(model(*kind))
    assert [text for text in TEXTS if ours(text)["input_ids"] != theirs.encode(text)] == []


def test_a_model_with_samples_of_its_own_normaliser_is_read(tmp_path):
    """Some releases of the library refuse a model whose pieces are not those of its samples."""
    bare = model("unigram", True, True, "nmt_nfkc", True)
    file = tmp_path / "x.model"
    file.write_bytes(
        bare.read_bytes() + _self_test_data("½ ①  x", " ".join(library(bare).encode("½ ①  x", out_type=str)))
    )
    ours, theirs = SentencePiece(file), library(file)
    assert [text for text in TEXTS if ours(text)["input_ids"] != theirs.encode(text)] == []


def _self_test_data(text: str, pieces: str) -> bytes:
    """ModelProto's field 4, written by hand, since the library's 0.2.3 has no name for it any more."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    return field(4, field(1, field(1, text.encode()) + field(2, pieces.encode())))


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] == "bpe" and k[3] == "identity"])
def test_a_byte_pair_model_that_keeps_characters_is_converted_exactly(kind):
    ours, theirs = SentencePiece(model(*kind)), library(model(*kind))
    converted = convert(ours._proto)
    assert [text for text in TEXTS if converted.encode(text).ids != theirs.encode(text)] == []


def test_control_symbols_are_encoded_and_separate_texts():
    t, theirs = tokenizer(), library(model())
    assert t("Yes</s>")["input_ids"] == [*theirs.encode("Yes"), EOS]
    assert t("<turn>Hi<turn> there")["input_ids"] == [TURN, *theirs.encode("Hi"), TURN, *theirs.encode(" there")]


def test_no_bos_is_put_before_a_text():
    t = tokenizer()
    assert (t.bos_token, t.bos_token_id) == ("<s>", 1)
    row = tokenized(t, "Hi", "yes", "no")
    assert row.prompt.tolist() == library(model()).encode("Hi")


def test_special_are_control_symbols_and_those_that_frame_a_conversation():
    assert tokenizer().all_special_tokens == ["<s>", "</s>", "<pad>", "<turn>", "<extra_id_0>", "<extra_id_1>"]
    assert tokenizer().all_special_ids == [1, 2, 3, 4, 5, 6]


def test_ids_decode_to_the_text_that_their_pieces_spell():
    t = tokenizer()
    assert "".join(t.decode([id]) for id in t("on the\n")["input_ids"]) == " on the\n"
    assert t.decode(t("über 東京 <b>x\n</s>")["input_ids"]) == " über 東京 <b>x\n</s>"


# Completions


@pytest.mark.parametrize(
    ("settings", "prompt", "completion", "pieces"),
    [
        # No space is added before a completion, although a separate text would get one.
        ({}, "Q:", "on", ["on"]),
        ({}, "Q:", " on", ["▁on"]),
        ({"strips": True}, "Q:", " on", ["▁on"]),
        ({"dummy_prefix": False}, "Q:", "on", ["on"]),
        # A space at the end of the prompt is the prompt's, or, where the model strips it from there, the completion's.
        ({}, "Q: ", "on", ["on"]),
        ({"strips": True}, "Q: ", "on", ["▁on"]),
        # nmt_nfkc makes a line break a space: the same.
        ({"normalizer": "nmt_nfkc", "strips": True}, "Q\n", "on", ["▁on"]),
        ({"normalizer": "nmt_nfkc", "strips": True}, "Q\n", "\n on", ["▁on"]),
        # A new text begins after a control symbol.
        ({}, "Q:<turn>", "on", ["▁on"]),
        ({"dummy_prefix": False}, "Q:<turn>", "on", ["on"]),
        # The text continues after a user-defined symbol.
        ({}, "Q:<extra_id_1>", "on", ["on"]),
        ({"strips": True}, "Q:", " ", []),
    ],
)
def test_a_completion_is_encoded_as_a_continuation_of_its_prompt(settings, prompt, completion, pieces):
    t = tokenizer(**settings)
    ids, after = t.encode(prompt, [completion])
    assert ids == t(prompt)["input_ids"]
    assert shown(t, after) == pieces


def test_a_border_that_the_normaliser_would_join_over_stays_a_border():
    # Together, e and the accent are one letter.
    t = tokenizer(normalizer="nmt_nfkc")
    ids, after = t.encode("Qe", ["\u0301 on"])
    assert (t.decode(ids), t.decode(after)) == (" Qe", "\u0301 on")


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_has_the_ids_of_the_complete_text_without_the_prompt_unless_a_token_crosses(kind):
    ours, theirs = SentencePiece(model(*kind)), library(model(*kind))
    compared = 0
    for text in TEXTS:
        for at in range(1, min(len(text), 40), 7):
            prompt, completion = text[:at], text[at:]
            whole, before = theirs.encode(text, out_type=str), theirs.encode(prompt, out_type=str)
            # NeMo Aligner's own condition; pieces rather than ids, since a run of unknown letters is one <unk>.
            if whole[: len(before)] == before:
                compared += 1
                expected = theirs.encode(text)[len(before) :]
                assert ours.encode(prompt, [completion])[1] == expected, (prompt, completion)
    assert compared > 500


# Preferences


def tokenized(t: SentencePiece, prompt, *texts, chat_template: str | None = None):
    preference = Preference(prompt, tuple(Completion(text, i) for i, text in enumerate(texts)), "pairs.jsonl:1")
    template = make_template(t, Tokenizer(chat_template=chat_template))
    (row,) = tokenize([preference], template, pairing="best_worst", max_length=1000)
    return row


def test_a_row_of_nemo_aligner_is_read_as_rendered(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    prompt = "<extra_id_0>System\n\n<extra_id_1>User\nWhen was it signed?\n<extra_id_1>Assistant\n"
    row = {"prompt": prompt, "chosen_response": "1215\n<extra_id_1>", "rejected_response": "I refuse."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    template = make_template(tokenizer(), Tokenizer(chat_template=None))
    store = open_store(str(tmp_path / "pairs.jsonl"), DatasetFields(), template, Data(), 1000)
    (found,) = (store[i] for i in range(len(store)))
    theirs = library(model())
    before = theirs.encode(prompt)
    assert store.format == "aligner"
    assert found.prompt.tolist() == before
    # The one ends as the template ends it, the other with EOS.
    assert [completion.tolist() for completion in found.completions] == [
        theirs.encode(prompt + "1215\n<extra_id_1>")[len(before) :],
        [*theirs.encode(prompt + "I refuse.")[len(before) :], EOS],
    ]
    assert theirs.id_to_piece(int(found.completions[0][-1])) == "<extra_id_1>"


CHAT = (
    "{% for m in messages %}<turn>{{ m.role }}<extra_id_1>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant<extra_id_1>{% endif %}"
)


def test_symbols_that_a_message_only_spells_are_plain_text(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    t, theirs = tokenizer(), library(model())
    message = (Message("user", "a </s> b <extra_id_1> c"),)
    row = tokenized(t, message, "on </s>", "<extra_id_1>", chat_template=str(tmp_path / "chat.jinja"))
    assert t.decode(row.prompt.tolist()) == (
        "<turn> user<extra_id_1>a </s> b <extra_id_1> c</s><turn> assistant<extra_id_1>"
    )
    prompt = row.prompt.tolist()
    assert [prompt.count(id) for id in (EOS, TURN, theirs.piece_to_id("<extra_id_1>"))] == [1, 2, 2]
    # In one piece up to the symbol that the library would take for one, were it not for the border within it.
    spelled = [TURN, *theirs.encode("user<extra_id_1>a </s> b <")]
    assert prompt[: len(spelled)] == spelled
    assert [t.decode(c.tolist()) for c in row.completions] == ["on </s></s>", "<extra_id_1></s>"]
    assert [c.tolist().count(EOS) for c in row.completions] == [1, 1]
    assert theirs.piece_to_id("<extra_id_1>") not in row.completions[1].tolist()


def test_a_shielded_control_symbol_is_one_text_with_its_surroundings():
    # ж and < are unknown, and one <unk> where nothing parts them.
    t, theirs = tokenizer(byte_fallback=False), library(model(byte_fallback=False))
    assert t(f"ж{SHIELD}</s>{SHIELD}ж")["input_ids"] == theirs.encode("ж</s>ж")


def test_two_models_that_differ_only_in_the_prefix_have_different_states(tmp_path):
    with_prefix, without = tokenizer(), _without_prefix(tmp_path)
    assert with_prefix._ids == without._ids
    assert state_of(with_prefix) != state_of(without)


def _without_prefix(folder: Path) -> SentencePiece:
    t = tokenizer()
    t._proto.normalizer_spec.add_dummy_prefix = False
    (folder / "y.model").write_bytes(t._proto.SerializeToString())
    return SentencePiece(folder / "y.model")
