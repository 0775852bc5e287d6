"""Scores completions with a sequence-classification model of one label, such as a trained reward model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.data.store.sets import ProgressBar
from tandem.data.store.token_store import TokenStore
from tandem.errors import ConfigError
from tandem.evaluation.sets import EvaluationSet
from tandem.model.checks.trial import is_out_of_memory
from tandem.model.files.build_limits import within_limits
from tandem.model.files.source import ModelSource, describe
from tandem.training.metrics import PairTable

CLASSIFIER = "ForSequenceClassification"
TOKENS_PER_BATCH = {"cuda": 32_768, "cpu": 4096}  # padding included


def is_classifier(source: ModelSource) -> bool:
    """Whether config.json says that the model gives scores to sequences. Refuse one that does not give a single score."""
    if not any(str(name).endswith(CLASSIFIER) for name in getattr(source.config, "architectures", None) or ()):
        return False
    if source.config.num_labels != 1:
        raise ConfigError(
            f"{source.place}: a sequence-classification model with {source.config.num_labels} labels. A reward model gives "
            "one score, so it has one label (num_labels = 1)."
        )
    return True


def measure_scores(
    source: ModelSource, sets: tuple[EvaluationSet, ...], device: torch.device, precision: str, bar: ProgressBar
) -> list[PairTable]:
    """Score every completion of every set, and return the pairs. Nothing is packed: sequences of similar length share a batch."""
    model = _load(source, device, getattr(torch, precision))
    tables = []
    for one in sets:
        with bar(f"Scoring {one.name.rpartition('/')[2]}", int(one.store.num_completions.sum())) as done:
            tables.append(_pairs(one.store, _scores(model, one.store, device, done)))
    return tables


def _load(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        with within_limits(source):
            model, found = AutoModelForSequenceClassification.from_pretrained(
                str(source.folder),
                output_loading_info=True,
                config=source.config,
                dtype=dtype,
                device_map=device,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except ConfigError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{source.place}: transformers cannot load it ({describe(error)}).") from error
    if missing := sorted({name for name, _ in model.named_parameters()}.intersection(found["missing_keys"])):
        raise ConfigError(
            f"{source.place}: {len(missing)} of its weights, such as {missing[0]}, are in none of its files and would be "
            "random. Is it a reward model, saved completely?"
        )
    model.config.get_text_config().use_cache = False  # an argument of decoders only
    return model.eval()


@torch.no_grad()
def _scores(model: Any, store: TokenStore, device: torch.device, done: Any) -> list[NDArray[np.float64]]:
    """The score of each completion of each preference."""
    sequences = [
        (index, number, np.concatenate([preference.prompt, completion]))
        for index, preference in enumerate(store)
        for number, completion in enumerate(preference.completions)
    ]
    sequences.sort(
        key=lambda one: len(one[2]), reverse=True
    )  # the longest first, so that too little memory shows at once
    scores = [np.zeros(count) for count in store.num_completions]
    # Without a padding token, transformers pools one sequence at a time.
    padding = model.config.get_text_config().pad_token_id
    padding = getattr(model.config, "pad_token_id", None) if padding is None else padding
    for batch in _batches(sequences, TOKENS_PER_BATCH[device.type], one_by_one=padding is None):
        width = len(batch[0][2])
        ids = np.full((len(batch), width), padding or 0)
        real = np.zeros((len(batch), width), np.int64)
        for row, (_, _, tokens) in enumerate(batch):
            ids[row, : len(tokens)], real[row, : len(tokens)] = tokens, 1
        out = model(input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(real).to(device))
        for (index, number, _), score in zip(batch, out.logits[:, 0].double().tolist(), strict=True):
            scores[index][number] = score
        done(len(batch))
    return scores


def _batches(sequences: list[Any], most_tokens: int, *, one_by_one: bool) -> Iterator[list[Any]]:
    """Sequences of falling length in batches of at most `most_tokens`, padded to the longest of the batch."""
    start = 0
    while start < len(sequences):
        size = 1 if one_by_one else max(1, most_tokens // len(sequences[start][2]))
        yield sequences[start : start + size]
        start += size


def _pairs(store: TokenStore, scores: list[NDArray[np.float64]]) -> PairTable:
    """The pairs of a set. Columns of log-probabilities are NaN; a score is exact, so only equal ones are ties."""
    rows = [(index, *pair) for index, preference in enumerate(store) for pair in preference.pairs]
    preference, winner, loser = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    given = {index: store[index] for index in range(len(store))}
    unknown, zero = np.full(len(rows), np.nan), np.zeros(len(rows))

    def of_both(values: Any) -> dict[str, Any]:
        return {
            side: np.array([values(index, number) for index, number in zip(preference, which, strict=True)], np.float64)
            for side, which in (("chosen", winner), ("rejected", loser))
        }

    columns: dict[str, Any] = {"loss": unknown}
    for name, both in {
        "reward": of_both(lambda index, number: scores[index][number]),
        "tokens": of_both(lambda index, number: len(given[index].scored(number))),
        "score": of_both(lambda index, number: given[index].scores[number]),
    }.items():
        columns |= {f"{name}_{side}": values for side, values in both.items()}
    for name, values in {"logp": unknown, "reference": unknown, "drift": zero, "slope": zero}.items():
        columns |= {f"{name}_chosen": values, f"{name}_rejected": values}
    return PairTable(sft=np.zeros(len(store)), preference=preference, winner=winner, loser=loser, columns=columns)
