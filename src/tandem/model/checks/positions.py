"""Finds sequences that are longer than a model's table of positions, or longer than the model was trained with."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from tandem.data.store.selection import Preferences
from tandem.errors import ConfigError
from tandem.model.architecture import architecture_of
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model


class Splits(Protocol):
    """Sets by name, such as those of a run."""

    def by_split(self) -> dict[str, Preferences]: ...


def position_limit(config: Any) -> int | None:
    """Return the length in tokens of the longest sequence that a model was trained for; None if its configuration does not say.

    Usually this is `max_position_embeddings`. With YaRN, factor * `original_max_position_embeddings` is returned if it is larger:
    some configurations store the length before the extension in `max_position_embeddings`.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # some models: one per type of layer
    extended = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or limit))
        for kind in kinds
        if kind.get("rope_type") == "yarn" and kind.get("factor")  # without one, the limit is the extended number
    ]
    return max([limit, *extended])


def check_positions(sets: Splits, *models: ModelSource | None) -> None:
    """Raise ConfigError if a sequence is longer than a model's table of positions, because the forward pass would fail on it."""
    for source, limit, found in _longer(sets, models):
        if _has_table(source):
            raise ConfigError(
                f"{found}, and the model has no positions beyond {limit:,}. Set policy.max_total_sequence_length={limit}."
            )


def long_sequence_warnings(sets: Splits, *models: ModelSource | None) -> list[str]:
    """Return a warning for each set that has sequences longer than a model was trained for."""
    return [
        f"{found}, and the model was trained for {limit:,} (max_position_embeddings): beyond that its log-probabilities are "
        f"unreliable. With policy.max_total_sequence_length={limit}, data.overlong decides what happens to such preferences."
        for _, limit, found in _longer(sets, models)
    ]


def _longer(sets: Splits, models: Iterable[ModelSource | None]) -> Iterator[tuple[ModelSource, int, str]]:
    """Yield (model, its position limit, start of a message) for each model and each set with sequences longer than the limit."""
    for source in models:
        if source is None or (limit := position_limit(source.config)) is None:
            continue
        for name, store in sets.by_split().items():
            if count := int((store.longest > limit).sum()):
                yield (
                    source,
                    limit,
                    f"{source.place}: {count:,} of {len(store):,} preferences in {name} are too long for it: the "
                    f"longest has {int(store.longest.max()):,} tokens",
                )


def _has_table(source: ModelSource) -> bool:
    """Whether a model looks positions up in a table instead of computing them."""
    if architecture_of(source.config).hides_positions:
        return True
    model = empty_model(source)
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    # GPT-J and CodeGen keep the sines and cosines of each position; XGLM's table is called weights and grows.
    buffers = [name for name, buffer in model.named_buffers() if buffer.dim() > 1]
    last = [name.rpartition(".")[2] for name in (*embeddings, *buffers)]
    return any("pos" in name or name == "wpe" for name in last)
