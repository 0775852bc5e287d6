"""Checks the data of every run of a sweep before the first one starts, as `tandem train` does before weights load."""

from collections.abc import Callable, Sequence

import torch

from tandem.config.schema import Config
from tandem.errors import TandemError
from tandem.exporting.cached import export_named_checkpoints
from tandem.report.reporter import Reporter
from tandem.sweeping import parallel
from tandem.sweeping.plan import PlannedRun, SweepPlan, of_run
from tandem.training.start.setup import check_model, open_inputs, set_up


def check_data(plan: SweepPlan, runs: Sequence[PlannedRun], reporter: Reporter) -> None:
    """Raise the error with which one of `runs` would end before its weights load, such as fewer pairs than one batch.

    The runs find the tokens in the cache. An error names its run, unless the last run ends with the same one.
    """
    check = _check_of_a_run(reporter)
    for one in runs:
        try:
            check(one.loaded.config)
        except TandemError as error:
            if one is runs[0] and _ends_alike(error, lambda: check(runs[-1].loaded.config)):
                raise
            number = plan.runs.index(one) + 1
            raise of_run(error, number, len(plan.runs), one.combination) from None


def _check_of_a_run(reporter: Reporter) -> Callable[[Config], None]:
    gpus = parallel.visible_gpus()
    device, memory = (torch.device("cpu"), None) if gpus is None else (torch.device("cuda", 0), gpus.memory)

    def check(config: Config) -> None:
        export_named_checkpoints(config, reporter.say)
        if parallel.uses_several_gpus(config):  # only its ranks know how they divide the model
            open_inputs(config, check_model(config, needs_weights=False), reporter.progress, needs_weights=False)
        else:
            set_up(config, device, reporter.progress, memory=memory, needs_weights=False)

    return check


def _ends_alike(error: TandemError, check: Callable[[], None]) -> bool:
    try:
        check()
    except TandemError as other:
        return str(other) == str(error)
    return False
