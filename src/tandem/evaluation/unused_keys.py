"""Refuses keys of the configuration that have no effect on an evaluation, or whose values its arguments give."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.config.load import Given
from tandem.config.source.overrides import changes_in
from tandem.data.store.opening import is_prepared
from tandem.errors import ConfigError
from tandem.terminal.arguments import option
from tandem.terminal.commands import key_of

GIVEN_BY_ARGUMENTS = (
    "policy.model_name",
    "policy.lora",
    "reference",
    "data.train",
    "data.validation",
    "data.val_data_paths",
    "data.default.data_path",
)
TRAINING_ONLY = (
    *("policy.optimizer", "policy.scheduler", "policy.train_global_batch_size", "policy.max_grad_norm"),
    *("policy.activation_checkpointing", "policy.weights", "policy.parallel"),
    *("cluster", "checkpointing", "export", "logger", "run"),
    *("dpo.max_num_epochs", "dpo.max_num_steps", "dpo.early_stopping_patience", "dpo.val_period", "dpo.val_batches"),
    *("dpo.val_global_batch_size", "dpo.val_at_start", "dpo.val_at_end", "dpo.router_aux_loss_coef"),
    *("data.validation_share", "data.shuffle", "data.drop_last", "data.default.weight"),
)
BETA_KEY = "dpo.reference_policy_kl_penalty"


def refuse_keys_of_training(overrides: Given) -> None:
    """Raise ConfigError for a key that never has an effect on an evaluation."""
    names = ", ".join(map(option, ("model", "data", "reference")))
    for key, text in keys_and_texts(overrides):
        if _is_below(key, GIVEN_BY_ARGUMENTS):
            hint = " Say how to read the data with data.default.KEY=VALUE." if key.startswith("data.") else ""
            raise ConfigError(f"{text}: {names} and {option('against')} give the models and the data.{hint}")
        if _is_below(key, TRAINING_ONLY):
            raise ConfigError(f"{text}: this key has no effect on an evaluation. Leave it out.")


def refuse_unused_keys(
    overrides: Given, paths: Sequence[str], *, beta: float | None, has_run: bool, are_of_run: bool
) -> None:
    """Raise ConfigError for a key that has no effect on these models and sets, or on this beta.

    `paths`: those of the sets. `has_run`: whether one of the models is a run, whose loss is measured. `are_of_run`: whether the
    sets are the validation sets of the run.
    """
    has_prepared = any(is_prepared(Path(path)) for path in paths)
    for key, text in keys_and_texts(overrides):
        if _is_below(key, ("dpo",)) and not has_run:
            hint = f"To scale the rewards, use {option('beta', metavar='X')}" if key == BETA_KEY else "Leave it out"
            raise ConfigError(
                f"{text}: keys of dpo have an effect on the loss of a run, and no run is evaluated. {hint}."
            )
        if key == BETA_KEY and beta is not None:
            raise ConfigError(f"{text}: {option('beta', beta)} gives this value too. Leave out one of them.")
        if _is_below(key, ("data.default",)) and are_of_run:
            raise ConfigError(
                f"{text}: this key has no effect on the validation sets of the run, which are read as in training. Give "
                f"{option('data')}, or leave it out."
            )
        if key == "data.duplicates" and not has_prepared:
            raise ConfigError(
                f"{text}: this key has no effect on an evaluation, except of prepared data. Leave it out."
            )


def keys_and_texts(overrides: Given) -> Iterator[tuple[str, str]]:
    """Yield the key of each override, and the override for a message."""
    for one in overrides:
        if isinstance(one, str):
            yield key_of(one), one
        else:
            yield from ((change.key, change.key) for change in changes_in(one))


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
