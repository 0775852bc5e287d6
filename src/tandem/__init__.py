"""tandem: trains language models on preference pairs, in packed rows where all completions of a prompt share its tokens.

From Python (docs/python.md):

    import tandem
    result = tandem.train({"dpo.max_num_steps": 10}, rows=[{"prompt": ..., "chosen": ..., "rejected": ...}, ...])

The names below are imported when they are first used, so that `import tandem` and `tandem --help` do not load torch.
"""

# Nothing is imported here: `python -m tandem` runs this file while Python still imports from the working directory.
TYPE_CHECKING = False  # which type checkers take for true

__version__ = "0.2.0"

if TYPE_CHECKING:
    from typing import Any

    from tandem import formats, losses
    from tandem.api.commands import evaluate, export, generate
    from tandem.api.result import TrainResult
    from tandem.api.runs import list_runs, open_run, sweep, write_report
    from tandem.api.training import train
    from tandem.config.load import LoadedConfig, load_config
    from tandem.errors import (
        AuditError,
        CallbackError,
        CheckpointError,
        ConfigError,
        DataError,
        DiskError,
        NonFiniteError,
        OutOfMemoryError,
        StoppedError,
        TandemError,
    )
    from tandem.evaluation.records import Evaluation
    from tandem.exporting.checkpoint import Exported
    from tandem.generation.generate import Generation
    from tandem.generation.records import EngineSettings
    from tandem.page.write import Report
    from tandem.runs import Run
    from tandem.sweeping.records import SweepResult
    from tandem.training.run.callbacks import Callback

_HOMES = {
    "load_config": "tandem.config.load",
    "LoadedConfig": "tandem.config.load",
    "train": "tandem.api.training",
    "TrainResult": "tandem.api.result",
    "Callback": "tandem.training.run.callbacks",
    "evaluate": "tandem.api.commands",
    "Evaluation": "tandem.evaluation.records",
    "generate": "tandem.api.commands",
    "Generation": "tandem.generation.generate",
    "export": "tandem.api.commands",
    "Exported": "tandem.exporting.checkpoint",
    "EngineSettings": "tandem.generation.records",
    **dict.fromkeys(("sweep", "open_run", "list_runs", "write_report"), "tandem.api.runs"),
    "SweepResult": "tandem.sweeping.records",
    "Run": "tandem.runs",
    "Report": "tandem.page.write",
    **dict.fromkeys(
        (
            *("TandemError", "ConfigError", "DataError", "CheckpointError", "AuditError", "NonFiniteError"),
            *("OutOfMemoryError", "DiskError", "StoppedError", "CallbackError"),
        ),
        "tandem.errors",
    ),
}
_MODULES = ("formats", "losses")

__all__ = [  # noqa: RUF022 - in the order of a reader
    "load_config",
    "train",
    "evaluate",
    "generate",
    "export",
    "sweep",
    "open_run",
    "list_runs",
    "write_report",
    "losses",
    "formats",
    "Callback",
    "LoadedConfig",
    "TrainResult",
    "Evaluation",
    "Generation",
    "Exported",
    "EngineSettings",
    "SweepResult",
    "Run",
    "Report",
    "TandemError",
    "ConfigError",
    "DataError",
    "CheckpointError",
    "AuditError",
    "NonFiniteError",
    "OutOfMemoryError",
    "DiskError",
    "StoppedError",
    "CallbackError",
]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        return import_module(f"tandem.{name}")
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
