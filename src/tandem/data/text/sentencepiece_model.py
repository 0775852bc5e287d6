"""A SentencePiece model file in; a tokenizer with exactly the ids of the sentencepiece library out."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.data.text.chat import pieces

SPACE = "▁"  # how SentencePiece writes a space
# User-defined symbols that frame a conversation (NeMo's template; T5's sentinels, special in transformers too). Nothing
# in a model file tells them from other user-defined symbols, such as runs of spaces or HTML tags.
FRAMING = re.compile(r"<extra_id_\d+>")
SAVED_AS = "sentencepiece_model"  # tells an exported folder from others with a tokenizer.model in them
# Kinds of pieces and of models, as the file counts them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2


class SentencePiece:
    """A SentencePiece model, behind as much of the hub's tokenizer interface as is used here.

    A text without control symbols gets the ids that `SentencePieceProcessor.encode` gives it. Control symbols (EOS among
    them), which that function takes for plain text, count where the text means them, and what stands between two of them
    is a text of its own. No BOS is put before a text: neither the library nor NeMo Aligner does.

    A completion is no text of its own: SentencePiece would put a space before it, and may have dropped the line break
    that the prompt ends with. It gets the ids of prompt and completion together, less the prompt's, as NeMo Aligner has
    it; but no token straddles the border. "Q:" then "Yes" gives Yes, not ▁Yes. "Q: " then "Yes" gives ▁Yes if the model
    strips spaces from the end of texts (then the prompt's ids lack this one), else Yes.
    """

    added_tokens_decoder: dict[int, Any] = {}  # every symbol is in the model itself

    def __init__(self, file: Path) -> None:
        # By name, since the package is optional and has no types.
        processor: Any = import_module("sentencepiece").SentencePieceProcessor
        self.model = file.read_bytes()
        self._proto: Any = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(self.model)
        self._raw = processor(model_proto=self.model)
        self._normalized = processor(model_proto=_without_normalizer(self._proto))
        self._ids = {piece.piece: id for id, piece in enumerate(self._proto.pieces)}
        control = self._pieces(CONTROL)
        self._framing = [piece for piece in self._pieces(USER_DEFINED) if FRAMING.fullmatch(piece)]
        # Split by one group, a text keeps the symbols; (?!) matches nowhere.
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

        self.bos_token = self._named(self._raw.bos_id())
        self.eos_token = self._named(self._raw.eos_id())
        self.unk_token = self._named(self._raw.unk_id())
        self.pad_token = self._named(self._raw.pad_id())
        self.bos_token_id = self._raw.bos_id()
        self.all_special_tokens = [*control, *self._framing]
        self.all_special_ids = [self._ids[token] for token in self.all_special_tokens]
        self._hub = self._make_hub(file)  # renders chat templates, and is what an export holds

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
        """Ids of a rendered prompt, then of each completion as it follows the prompt."""
        ids, followed = self.encode_turns(prompt, [[completion] for completion in completions])
        return [ids, *(parts[0] for parts in followed)]

    def encode_turns(
        self, prompt: str, completions: Sequence[Sequence[str]]
    ) -> tuple[list[int], list[list[list[int]]]]:
        """The same for completions in parts, each of which follows the one before it."""
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
        """The text that the pieces spell, spaces at its beginning included."""
        spelled = b""
        for id in ids:
            piece = self._raw.id_to_piece(id)
            # <0x0A> -> b"\n"
            byte = self._raw.is_byte(id)
            spelled += bytes([int(piece[3:5], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return spelled.decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Write what `AutoTokenizer` loads, and the model itself beside it."""
        self._hub.save_pretrained(folder)
        (Path(folder) / "tokenizer.model").write_bytes(self.model)

    def _encode(self, text: str, before: str) -> tuple[list[int], str]:
        """Ids of a text behind plain text, and the plain text that what follows stands behind."""
        ids: list[int] = []
        for run in self._runs(text):
            if isinstance(run, int):
                ids.append(run)
                before = ""
            else:
                ids += self._behind(before, run) if before else self._raw.encode(run)
                before += run
        return ids, before

    def _runs(self, text: str) -> Iterator[str | int]:
        """Plain text and ids of control symbols, in turn: "Yes</s>" -> "Yes", 2."""
        plain = ""
        for part, meant in pieces(text):
            if not meant and part in self._framing:
                # The library would take it for the symbol, but not in two halves.
                yield plain + part[0]
                plain = part[1:]
            elif not meant:
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

    def _behind(self, before: str, text: str) -> list[int]:
        """Ids of a text that goes on from another: both are normalised together, and the first part is taken away."""
        whole, first = self._raw.normalize(before + text), self._raw.normalize(before)
        if whole.startswith(first):
            return self._normalized.encode(whole[len(first) :])
        # The normaliser joins both at the border ("e", then a combining accent): the text by itself, without its space.
        alone = self._raw.normalize(text)
        prefix = SPACE if self._proto.normalizer_spec.add_dummy_prefix else ""
        return self._normalized.encode(alone.removeprefix(prefix))

    def _make_hub(self, file: Path) -> Any:
        """The same tokenizer as transformers has it: converted where that is exact, else around the same library.

        The latter writes byte pieces as <0x0A> when it decodes, and some model types cannot have it (`check_export`).
        """
        from transformers import PreTrainedTokenizerFast, SentencePieceBackend

        named = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        others = [token for token in self._pieces(CONTROL) if token not in named.values()]
        # SAVED_AS stays in the folder's configuration.
        options = {**named, "extra_special_tokens": others, SAVED_AS: "tokenizer.model"}
        if _converts(self._proto):
            return PreTrainedTokenizerFast(tokenizer_object=convert(self._proto), **options)
        return SentencePieceBackend(vocab_file=str(file), **options)

    def _pieces(self, kind: int) -> list[str]:
        return [piece.piece for piece in self._proto.pieces if piece.type == kind]

    def _named(self, id: int) -> str | None:
        return self._raw.id_to_piece(id) if id >= 0 else None


def _without_normalizer(proto: Any) -> bytes:
    """The same model for texts that are normalised already."""
    # Of the parts that encoding needs: a file's samples of texts and pieces, which some releases of the library check when
    # they load it, hold for its own normaliser only.
    bare = type(proto)(pieces=proto.pieces, trainer_spec=proto.trainer_spec, normalizer_spec=proto.normalizer_spec)
    spec = bare.normalizer_spec
    spec.precompiled_charsmap = b""
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return bare.SerializeToString()


def _converts(proto: Any) -> bool:
    """Whether `convert` gives exactly the same ids: byte-pair models that leave characters as they are.

    The tokenizers library sums a unigram model's scores in another precision, and applies character rules to whole
    graphemes only ("ｶﾞ" stays two characters), so that some texts come out differently.
    """
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    plain = not spec.precompiled_charsmap and spec.escape_whitespaces and not trainer.treat_whitespace_as_suffix
    return trainer.model_type == BPE and plain and all(piece.type != UNUSED for piece in proto.pieces)


def convert(proto: Any) -> Any:
    """A byte-pair model as a `tokenizers.Tokenizer`, which `AutoTokenizer` reads the same for nearly every model type."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    tokenizer = Tokenizer(
        models.BPE(
            {piece.piece: id for id, piece in enumerate(proto.pieces)},
            _merges(proto),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
            ignore_merges=True,  # a user-defined symbol is one token, though nothing merges into it
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
    """Pairs that make a piece, best score first: SentencePiece keeps scores of pieces, not merges."""
    score = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    halves = ((whole[:at], whole[at:]) for whole in score for at in range(1, len(whole)))
    merges = [pair for pair in halves if pair[0] in score and pair[1] in score]
    return sorted(merges, key=lambda pair: -score["".join(pair)])
