"""Token ids that a model sampled, as `tandem generate` writes them in `completion_ids`: trained on instead of the text's own."""

from typing import Any

import numpy as np

from tandem.data.formats.preference import Completion
from tandem.data.read.sources import RowError
from tandem.data.text.word_cache import IntArray


def sampled_ids(completion: Completion, tokenizer: Any, place: str) -> IntArray | None:
    """Return the sampled ids of a completion; None if the data has none.

    Raise a RowError if they are not the text of the completion in this tokenizer. The last one may be the token that ended it.
    """
    ids = completion.sampled
    if ids is None:
        return None
    if completion.answer not in (_text(tokenizer, ids), _text(tokenizer, ids[:-1])):
        raise RowError(
            place,
            "other tokens",
            "completion_ids are not the tokens of the completion in this tokenizer. Use the tokenizer of the model that "
            "sampled them, or remove completion_ids if the text was edited.",
        )
    return np.asarray(ids, np.int32)


def _text(tokenizer: Any, ids: tuple[int, ...]) -> str | None:
    try:
        return tokenizer.decode(list(ids))
    except (IndexError, OverflowError, TypeError, ValueError):  # ids that the tokenizer does not have
        return None
