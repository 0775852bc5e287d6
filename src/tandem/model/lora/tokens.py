"""Decides whose embeddings are trained next to the adapters (policy.lora.trainable_token_indices), before any weights load."""

import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.data.text.tokenizer import load_tokenizer
from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource, find_tokenizer
from tandem.model.lora.files import CONFIG_FILE, TrainedAdapter, name_of_rows
from tandem.model.lora.saved import SavedModules
from tandem.model.lora.targets import ends_with
from tandem.terminal.printable import listed

KEY = "policy.lora.trainable_token_indices"


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The tokens whose embeddings are trained: rows of the model's embeddings, and of its head if they are one weight."""

    ids: tuple[int, ...] = ()  # ascending
    is_tied: bool = False


def ids_of_tokens(policy: PolicyConfig, source: ModelSource) -> tuple[int, ...]:
    """Return the ids of the tokens that a configuration names, in ascending order. Raise ConfigError for unknown tokens.

    The tokenizer is loaded only if a token is named by its text.
    """
    given = policy.lora.trainable_token_indices
    vocabulary: dict[str, int] = {}
    if any(isinstance(one, str) for one in given):
        folder = find_tokenizer(policy, source)
        vocabulary = load_tokenizer(folder).get_vocab()
    named: dict[int, int | str] = {}
    for one in given:
        if isinstance(one, str) and one not in vocabulary:
            raise ConfigError(
                f"{KEY}: {json.dumps(one, ensure_ascii=False)} is not one token of the tokenizer of {source.name}. Give a token "
                "as its vocabulary has it, or an id."
            )
        number = vocabulary[one] if isinstance(one, str) else one
        if number in named:
            both = " and ".join(json.dumps(two, ensure_ascii=False) for two in (named[number], one))
            raise ConfigError(f"{KEY} names token {number} twice ({both}). Leave one of them out.")
        named[number] = one
    return tuple(sorted(named))


def select_tokens(
    model: Any, source: ModelSource, given: tuple[int, ...], start: TrainedAdapter | None, saved: SavedModules
) -> TrainedTokens:
    """Return the tokens that a configuration, or the adapter that training starts from, trains.

    `model`: the model without weights and without adapters. `given`: the ids that the configuration names. Raise ConfigError for
    tokens whose embeddings cannot be trained.
    """
    ids, key = given, KEY
    if start is not None:
        key = f"policy.lora.adapter = {start.name}"
        ids = start.token_ids
        if given and given != ids:
            own = listed([str(one) for one in ids]) if ids else "none"
            raise ConfigError(
                f"{key}: its trainable_token_indices are {own}, but {KEY} selects others. Leave out {KEY}."
            )
    if not ids:
        return TrainedTokens()
    embeddings = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    name = names[embeddings]
    _check_embeddings(embeddings, ids, key, source)
    if saved.holds(name):
        raise ConfigError(
            f"{key}: policy.lora.modules_to_save trains {name} in full, with the embeddings of all tokens. Leave out {KEY}."
        )
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    if start is not None:
        _check_start(start, name, names[head] if is_tied else None, embeddings, source)
    return TrainedTokens(ids=ids, is_tied=is_tied)


def _check_embeddings(embeddings: Any, ids: tuple[int, ...], key: str, source: ModelSource) -> None:
    is_plain = isinstance(embeddings, nn.Embedding) and (
        type(embeddings).forward is nn.Embedding.forward or hasattr(embeddings, "embed_scale")
    )
    if not is_plain or embeddings.max_norm is not None:
        raise ConfigError(
            f"{key}: the embeddings of {source.name} are a {type(embeddings).__name__}, whose rows cannot be trained "
            "alone. Train them in full with policy.lora.modules_to_save."
        )
    size = embeddings.num_embeddings
    if outside := [one for one in ids if not 0 <= one < size]:
        raise ConfigError(
            f"{key}: token {outside[0]} is not in the vocabulary of {source.name}, whose ids are 0 to {size - 1}. Leave it out."
        )
    if embeddings.padding_idx in ids:
        raise ConfigError(
            f"{key}: token {embeddings.padding_idx} is the padding token of {source.name}, whose embedding gets no gradient. "
            "Leave it out."
        )


def _check_start(start: TrainedAdapter, name: str, head: str | None, embeddings: Any, source: ModelSource) -> None:
    """Raise ConfigError unless the adapter holds the rows of the model's embeddings.

    `name`: of the embeddings. `head`: the name of the head if both are one weight.
    """
    key, own = f"policy.lora.adapter = {start.name}", name_of_rows(name)
    for layer in start.token_layers:
        if not any(ends_with(one, layer) for one in (name, head) if one is not None):
            raise ConfigError(
                f"{key}: trainable_token_indices in its {CONFIG_FILE} name {layer}, but only rows of {name} can be trained. "
                "Merge the adapter with peft, and start from the result."
            )
    if own not in start.token_rows:
        raise ConfigError(f"{key}: holds no {own}, which its trainable_token_indices need. Download it again.")
    expected = (len(start.token_ids), embeddings.embedding_dim)
    for one, shape in start.token_rows.items():
        if one != own or shape != expected:
            raise ConfigError(
                f"{key}: made for a different model: the shape of {one} is {list(shape)}, but {source.name} needs {own} with "
                f"{list(expected)}. Set policy.model_name to the adapter's base model."
            )
