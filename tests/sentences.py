"""Tiny SentencePiece models, trained once per session on the bundled pairs."""

import io
import json
import os
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tandem.embedded.files import TRAIN

KINDS = list(product(("unigram", "bpe"), (False, True), (False, True), ("identity", "nmt_nfkc"), (False, True)))
SYMBOLS = ("<extra_id_0>", "<extra_id_1>", "<b>")


def sentences() -> list[str]:
    rows = [json.loads(line) for line in TRAIN.read_text(encoding="utf-8").splitlines()[:150]]
    words = [row[key] for row in rows for key in ("prompt", "chosen")]
    return [*words, *["über naïve café, ガギグ カキク 東京"] * 5, *["a  b   c    d"] * 5]


@cache
def model(
    kind: str = "bpe",
    byte_fallback: bool = True,
    dummy_prefix: bool = True,
    normalizer: str = "identity",
    strips: bool = False,
    **options: Any,
) -> Path:
    """A model with <unk>, <s>, </s>, <pad>, the control symbol <turn> and the user-defined SYMBOLS.

    The defaults are those of Llama 2. `dummy_prefix`: a space before each text; `strips`: extra spaces are removed.
    """
    import sentencepiece

    file = Path(tempfile.mkdtemp(prefix="tandem-spm-", dir=os.environ["TANDEM_CACHE"])) / "x.model"
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=written,
        model_type=kind,
        vocab_size=600 if byte_fallback else 340,
        byte_fallback=byte_fallback,
        add_dummy_prefix=dummy_prefix,
        normalization_rule_name=normalizer,
        remove_extra_whitespaces=strips,
        user_defined_symbols=list(SYMBOLS),
        control_symbols=["<turn>"],
        character_coverage=0.99,
        num_threads=1,
        minloglevel=2,
        **{"pad_id": 3, **options},
    )
    file.write_bytes(written.getvalue())
    return file


def library(file: Path) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(file))
