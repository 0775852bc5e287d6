"""`tandem.train`: trains from Python, on files or on rows in memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.api.arguments import with_checked_arguments
from tandem.api.process import own_process
from tandem.api.result import TrainResult, read_result
from tandem.api.rows import Rows, places_of, store_rows
from tandem.config.load import EMBEDDED_DEFAULT, LoadedConfig, Overrides, load_config, require_training_set
from tandem.errors import AlreadyReportedError, ConfigError, StoppedError
from tandem.launch.choose import check_python_call
from tandem.launch.srun import adopt_srun_variables
from tandem.model.files.read_ahead import reading_ahead
from tandem.paths import check_run
from tandem.report.reporter import Reporter, Verbosity
from tandem.training.run.callbacks import Callback, Callbacks, check_callbacks
from tandem.training.run.stopping import CALLBACK
from tandem.user_code import name_function

if TYPE_CHECKING:
    from torch import Tensor

    UserLoss = Callable[..., Tensor]  # (pairs: Pairs, *, beta: float, ...) -> [pairs]

Settings = LoadedConfig | Overrides | str | Path  # what `load_config` returned, or takes


@with_checked_arguments
def train(
    config: Settings | None = None,
    *,
    rows: Rows | None = None,
    validation_rows: Rows | Mapping[str, Rows] | None = None,
    loss: "Callable[..., Tensor] | str | None" = None,
    callbacks: Sequence[Callback | Any] = (),
    fresh: bool = False,
    per_pair: str | Path | None = None,
    verbosity: Verbosity = "quiet",
    allow_env: Collection[str] = (),
    allow_code: bool = False,
) -> TrainResult:
    """Train a model on preferences, or resume an unfinished run of the same settings. Without arguments, train a tiny model.

    config: settings as from `load_config`, a dict ({"dpo": {"max_num_steps": 10}} or {"dpo.max_num_steps": 10}), a list of texts
    ("dpo.max_num_steps=10"), or the path of a YAML file.
    rows: the training set as dicts in any format that files may have: a list, a datasets.Dataset or an iterator.
    validation_rows: the same for validation, or a dict of names to such sets.
    loss: the name of a loss, or a function (pairs, *, beta, ...) -> [pairs] at the top level of a module or notebook.
    callbacks: objects with any of the methods of `tandem.Callback`.
    fresh: start a new run instead of resuming an unfinished one.
    per_pair: a file to write the metrics of every pair to.
    verbosity: silent, quiet (warnings and where the results are), normal (as `tandem train`) or verbose.
    allow_env, allow_code: what a YAML file may do, as the options of `tandem train`.

    Uses one GPU if there is one, or the CPU; started by torchrun or srun, all ranks. Errors are subclasses of
    `tandem.TandemError`.
    """
    check_callbacks(callbacks)
    loaded, files = _load(config, rows, validation_rows, loss, allow_env, allow_code=allow_code)
    file = None if per_pair is None else Path(per_pair)
    with own_process("tandem.train", loaded), places_of(files):
        adopt_srun_variables()
        check_python_call(loaded.config.cluster)
        require_training_set(loaded.config)
        check_run(loaded, fresh=fresh, per_pair=file)
        with reading_ahead(loaded.config):
            return _train(loaded, Callbacks(callbacks), verbosity, fresh=fresh, per_pair=file)


def _train(
    loaded: LoadedConfig, callbacks: Callbacks, verbosity: Verbosity, *, fresh: bool, per_pair: Path | None
) -> TrainResult:
    from tandem.training.trainer import train as run_training

    run, stopped_by = callbacks.run, None
    try:
        run = run_training(loaded, Reporter(verbosity), fresh=fresh, per_pair=per_pair, callbacks=callbacks)
    except (StoppedError, AlreadyReportedError) as error:
        callbacks.raise_failure()
        is_asked = error.exit_code == CALLBACK[1]  # by a callback, of this rank or of the first
        if not is_asked or callbacks.run is None:
            raise
        run, stopped_by = callbacks.run, CALLBACK[0]
    callbacks.raise_failure()
    result = _on_all_ranks(lambda: read_result(run, loaded.config, stopped_by))
    callbacks.end(result)
    return result


def _on_all_ranks(read: Callable[[], TrainResult]) -> TrainResult:
    """Read the result on the first rank, and return it on all of them."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    found = [read() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    assert found[0] is not None
    return found[0]


def _load(
    config: Settings | None,
    rows: Rows | None,
    validation_rows: Rows | Mapping[str, Rows] | None,
    loss: Any,
    allow_env: Collection[str],
    *,
    allow_code: bool,
) -> tuple[LoadedConfig, dict[str, Path]]:
    """Return the configuration with the arguments of `train` in it, and the files that hold rows, by argument."""
    is_loaded = isinstance(config, LoadedConfig)
    loaded = config if is_loaded else load_config(config, (), allow_env, allow_code=allow_code)
    extra: dict[str, Any] = {}
    files: dict[str, Path] = {}
    if rows is not None:
        _refuse_both("rows", "data.train", [one.data_path for one in loaded.config.data.training_sets], loaded)
        files["rows"] = store_rows("rows", rows)
        extra["data.train.data_path"] = str(files["rows"])
    if validation_rows is not None:
        is_named = isinstance(validation_rows, Mapping)
        named: dict[str, Any] = dict(validation_rows) if is_named else {"default": validation_rows}  # type: ignore[arg-type]
        for name, one in named.items():
            key = "data.validation" if name == "default" else f"data.val_data_paths.{name}"
            given = loaded.config.data.validation if name == "default" else loaded.config.data.val_data_paths.get(name)
            _refuse_both("validation_rows", key, [given.data_path] if given else [], loaded)
            argument = f"validation_rows[{name!r}]" if is_named else "validation_rows"
            files[argument] = store_rows(argument, one)
            extra[f"{key}.data_path"] = str(files[argument])
    if loss is not None:
        if "dpo.preference_loss" in loaded.origins:
            raise ConfigError("loss and dpo.preference_loss both name the loss. Leave out one of them.")
        extra["dpo.preference_loss"] = loss if isinstance(loss, str) else name_function("loss", loss)
    if extra:
        loaded = load_config(
            loaded.file,
            [*loaded.given, extra],
            loaded.sent_variables,
            allow_code=loaded.allows_code or allow_code,
            from_format=loaded.from_format,
        )
    return loaded, files


def _refuse_both(argument: str, key: str, paths: list[str | None], loaded: LoadedConfig) -> None:
    """Raise ConfigError if both the argument and the configuration give a set."""
    named = [origin for one, origin in loaded.origins.items() if one in (key, f"{key}.data_path")]
    is_set = any(origin != EMBEDDED_DEFAULT for origin in named)
    if is_set and any(path is not None for path in paths):
        raise ConfigError(f"{argument} and {key} = {paths[0]} both give the data. Leave out one of them.")
