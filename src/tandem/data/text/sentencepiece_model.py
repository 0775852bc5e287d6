"""Loads a SentencePiece model file as a tokenizer that gives exactly the ids of the sentencepiece library."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.data.text.chat import split_shielded

SPACE = "▁"  # how SentencePiece writes a space
# User-defined symbols that frame a conversation (NeMo's template; T5's sentinels, special in transformers too). A model
# file does not distinguish them from other user-defined symbols, such as runs of spaces or HTML tags.
FRAMING_SYMBOL = re.compile(r"<extra_id_\d+>")
EXPORT_MARKER = "sentencepiece_model"  # key in tokenizer_config.json of folders that tandem exported
# Types of pieces and models, as numbered in the file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2


class SentencePiece:
    """A SentencePiece model with the part of the Hugging Face tokenizer interface that tandem uses.

    A text without control symbols gets the ids of `SentencePieceProcessor.encode`. A control symbol, such as EOS, gets
    its own id; the sentencepiece library would encode it as plain text. The text between two control symbols is encoded
    separately. No BOS is added, as in the library and in NeMo Aligner.

    A completion is encoded as a continuation of its prompt: both are normalised together, and the text after the
    prompt is encoded. NeMo Aligner encodes both together and removes the ids of the prompt; here no token crosses the
    boundary. If a completion were encoded separately, a space would be added before it, and a line break at the end of
    the prompt might be dropped.

    Examples: after the prompt "Q:", the completion "Yes" gives the piece Yes, not ▁Yes. After the prompt "Q: ", the result
    depends on the model. If the model strips spaces at the end of a text, the ids of the prompt do not include the space,
    and "Yes" gives the piece ▁Yes. Otherwise "Yes" gives the piece Yes.
    """

    added_tokens_decoder: dict[int, Any] = {}  # all symbols are in the model

    def __init__(self, file: Path) -> None:
        # Imported by name: the package is optional and has no types.
        processor: Any = import_module("sentencepiece").SentencePieceProcessor
        self.model = file.read_bytes()
        self._proto: Any = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(self.model)
        self._raw = processor(model_proto=self.model)
        self._normalized = processor(model_proto=_without_normalizer(self._proto))
        self._ids = {piece.piece: id for id, piece in enumerate(self._proto.pieces)}
        control = self._pieces(CONTROL)
        self._framing = [piece for piece in self._pieces(USER_DEFINED) if FRAMING_SYMBOL.fullmatch(piece)]
        # Splitting by a group keeps the symbols; (?!) matches nothing.
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

        self.bos_token = self._named(self._raw.bos_id())
        self.eos_token = self._named(self._raw.eos_id())
        self.unk_token = self._named(self._raw.unk_id())
        self.pad_token = self._named(self._raw.pad_id())
        self.bos_token_id = self._raw.bos_id()
        self.all_special_tokens = [*control, *self._framing]
        self.all_special_ids = [self._ids[token] for token in self.all_special_tokens]
        self._hub = self._make_hub(file)  # renders chat templates, and is exported

    @property
    def chat_template(self) -> Any:
        return self._hub.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self._hub.chat_template = template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return self._hub.special_tokens_map

    def apply_chat_template(self, *conversation: Any, **options: Any) -> Any:
        return self._hub.apply_chat_template(*conversation, **options)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)[0]}

    def encode(self, prompt: str, completions: Sequence[str] = ()) -> list[list[int]]:
        """Return the ids of a rendered prompt, followed by the ids of each completion.

        Each completion is encoded as a continuation of the prompt.
        """
        ids, followed = self.encode_turns(prompt, [[completion] for completion in completions])
        return [ids, *(parts[0] for parts in followed)]

    def encode_turns(
        self, prompt: str, completions: Sequence[Sequence[str]]
    ) -> tuple[list[int], list[list[list[int]]]]:
        """Return the ids of a prompt, and the ids of every part of each completion.

        Each part is encoded as a continuation of the text before it: the prompt, or the previous part of the same
        completion.
        """
        ids, before_all = self._encode(prompt, "")
        encoded = []
        for parts in completions:
            before, lists = before_all, []
            for part in parts:
                part_ids, before = self._encode(part, before)
                lists.append(part_ids)
            encoded.append(lists)
        return ids, encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the pieces, including leading spaces."""
        spelled = b""
        for id in ids:
            piece = self._raw.id_to_piece(id)
            # <0x0A> -> b"\n"
            byte = self._raw.is_byte(id)
            spelled += bytes([int(piece[3:5], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return spelled.decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Write the files that `AutoTokenizer` loads, and the SentencePiece model."""
        self._hub.save_pretrained(folder)
        (Path(folder) / "tokenizer.model").write_bytes(self.model)

    def _encode(self, text: str, before: str) -> tuple[list[int], str]:
        """Encode a text that continues the plain text `before`.

        Return the ids, and the plain text that the next part will continue: everything since the last control symbol.
        """
        ids: list[int] = []
        for run in self._runs(text):
            if isinstance(run, int):
                ids.append(run)
                before = ""
            else:
                ids += self._encode_continuation(before, run) if before else self._raw.encode(run)
                before += run
        return ids, before

    def _runs(self, text: str) -> Iterator[str | int]:
        """Split a text into plain text and ids of control symbols: "Yes</s>" gives "Yes" and 2."""
        plain = ""
        for part, parse_special in split_shielded(text):
            if not parse_special and part in self._framing:
                # The library would encode it as the symbol, so it is split in two.
                yield plain + part[0]
                plain = part[1:]
            elif not parse_special:
                plain += part
            else:
                plain_and_symbols = self._control.split(part)
                for i, item in enumerate(plain_and_symbols):
                    if i % 2 == 0:
                        plain += item
                        continue
                    if plain:
                        yield plain
                    yield self._ids[item]
                    plain = ""
        if plain:
            yield plain

    def _encode_continuation(self, before: str, text: str) -> list[int]:
        """Encode `text` as a continuation of `before`: normalise both together, then remove the normalised `before`."""
        both, first = self._raw.normalize(before + text), self._raw.normalize(before)
        if both.startswith(first):
            return self._normalized.encode(both[len(first) :])
        # The normaliser merged characters across the boundary ("e" and a combining accent), so the text is encoded
        # separately, without the space that this adds.
        normalized = self._raw.normalize(text)
        prefix = SPACE if self._proto.normalizer_spec.add_dummy_prefix else ""
        return self._normalized.encode(normalized.removeprefix(prefix))

    def _make_hub(self, file: Path) -> Any:
        """Make a transformers tokenizer that gives the same ids.

        The model is converted if that keeps all ids. Otherwise the tokenizer is a wrapper of the sentencepiece library.
        The wrapper decodes byte pieces as text such as <0x0A>. Some model types do not support the wrapper (see
        `check_export`).
        """
        from transformers import PreTrainedTokenizerFast, SentencePieceBackend

        named = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        others = [token for token in self._pieces(CONTROL) if token not in named.values()]
        # transformers writes EXPORT_MARKER to tokenizer_config.json.
        options = {**named, "extra_special_tokens": others, EXPORT_MARKER: "tokenizer.model"}
        if _converts_exactly(self._proto):
            return PreTrainedTokenizerFast(tokenizer_object=convert(self._proto), **options)
        return SentencePieceBackend(vocab_file=str(file), **options)

    def _pieces(self, kind: int) -> list[str]:
        return [piece.piece for piece in self._proto.pieces if piece.type == kind]

    def _named(self, id: int) -> str | None:
        return self._raw.id_to_piece(id) if id >= 0 else None


def _without_normalizer(proto: Any) -> bytes:
    """Return a copy of the model without a normaliser, for texts that are already normalised."""
    # Copies only the fields that encoding needs. Some releases of the library check the self-test samples of a file when
    # they load it, and those samples need the original normaliser.
    bare = type(proto)(pieces=proto.pieces, trainer_spec=proto.trainer_spec, normalizer_spec=proto.normalizer_spec)
    spec = bare.normalizer_spec
    spec.precompiled_charsmap = b""
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return bare.SerializeToString()


def _converts_exactly(proto: Any) -> bool:
    """Whether the tokenizer made by `convert` gives the same ids as the model for every text.

    This is true for BPE models whose normaliser does not change characters. For other models, some texts would get other
    ids: the tokenizers library sums the scores of a unigram model in another precision, and applies character rules only
    to complete graphemes ("ｶﾞ" stays two characters).
    """
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    plain = not spec.precompiled_charsmap and spec.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    return trainer.model_type == BPE and plain and all(piece.type != UNUSED for piece in proto.pieces)


def convert(proto: Any) -> Any:
    """Convert a BPE model to a `tokenizers.Tokenizer`, which `AutoTokenizer` loads for nearly every model type."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    tokenizer = Tokenizer(
        models.BPE(
            {piece.piece: id for id, piece in enumerate(proto.pieces)},
            _merges(proto),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
            ignore_merges=True,  # a user-defined symbol is one token without merges
        )
    )
    steps: list[Any] = []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{SPACE}+\\z"), ""))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    user_defined = sorted((p.piece for p in proto.pieces if p.type == USER_DEFINED), key=len, reverse=True)
    if user_defined:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, user_defined))), "isolated")
    spelling = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        spelling.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(spelling)
    control = [piece.piece for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return the merges of a BPE model, best score first. SentencePiece stores only pieces, so merges are computed from them."""
    score = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    halves = ((whole[:at], whole[at:]) for whole in score for at in range(1, len(whole)))
    merges = [pair for pair in halves if pair[0] in score and pair[1] in score]
    return sorted(merges, key=lambda pair: -score["".join(pair)])
