"""Trains one run for every combination of a grid, and compares the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.errors import StoppedError
from tandem.page.comparison import best_of
from tandem.page.html import duration
from tandem.page.write import COMPARISON, write_report
from tandem.report.reporter import Reporter
from tandem.storage.ownership import remove_abandoned
from tandem.sweeping.children import Ended, Task, train_all
from tandem.sweeping.parallel import choose_environments, refuse_parallel, uses_several_gpus
from tandem.sweeping.plan import PlannedRun, Reading, SweepPlan, choose_folder, make_plan, write_plan
from tandem.sweeping.records import SweepResult, SweepRun, measured, read_runs
from tandem.terminal.arguments import in_command, option, same_call
from tandem.terminal.printable import counted
from tandem.training.run.directory import is_finished
from tandem.training.run.failure import append_failure
from tandem.training.run.lock import locked
from tandem.training.run.other_folders import SWEEP_FILE, SWEEP_LOGS
from tandem.training.run.stopping import Stopping, stopped_by_signals


def sweep(
    overrides: Sequence[str],
    *,
    config: str | None = None,
    out: str | Path | None = None,
    allow_env: Sequence[str] = (),
    allow_code: bool = False,
    from_format: str | None = None,
    parallel: int | None = None,
    dry_run: bool = False,
    reporter: Reporter | None = None,
) -> SweepResult:
    """Train one run for every combination of the values in `overrides`, such as ["run.seed=1,2", "dpo.max_num_steps=50"].

    Each run is trained by its own process, in its own directory. The same call again skips the runs that are finished, and
    resumes the others. A run that fails is recorded in the result, and the others are trained.

    `config`: a YAML file. `out`: the directory of the sweep; None: runs/sweep-N. `allow_env`: environment variables that the
    file may send to trackers or the hub. `allow_code`: whether the file may name Python code. `from_format`: the trainer that the
    file was written for; None: recognised by its keys. `parallel`: how many runs to train at a time; None: as many as fit on the
    GPUs, one on a CPU. `dry_run`: check the configurations and return the plan, but train and write nothing. `reporter`: prints
    progress; None: only warnings.

    Raise StoppedError after a signal, when the runs that were training have saved their checkpoints.
    """
    reporter = reporter or Reporter("quiet")
    plan = make_plan(overrides, config, Reading(tuple(allow_env), allow_code, from_format), reporter.progress)
    return run_plan(plan, out=out, parallel=parallel, dry_run=dry_run, reporter=reporter)


def run_plan(
    plan: SweepPlan, *, out: str | Path | None, parallel: int | None, dry_run: bool, reporter: Reporter
) -> SweepResult:
    """Train the runs of a checked sweep. The arguments and the result are those of `sweep`."""
    folder = choose_folder(plan, out)
    runs = [_record(plan, number, folder) for number in range(len(plan.runs))]
    unfinished = [one for one, run in zip(plan.runs, runs, strict=True) if run.status != "finished"]
    configs = [one.loaded.config for one in unfinished]
    refuse_parallel(configs, parallel)
    _check_data(plan, unfinished, reporter)
    if dry_run:
        if parallel is not None:
            reporter.say(f"{option('parallel', parallel)} has no effect on a dry run, which trains nothing.")
        return SweepResult(folder=folder, swept=plan.swept, runs=tuple(runs))
    environments = choose_environments(configs, 1 if any(map(uses_several_gpus, configs)) else parallel)
    with locked(folder, "out"):
        remove_abandoned(folder, SWEEP_FILE.replace(".", r"\."), COMPARISON.replace(".", r"\."), is_held=True)
        write_plan(plan, folder)
        states = {run.name: run for run in runs}
        _Training(plan, folder, states, reporter).run(environments)
        return _result(plan, folder, list(states.values()))


def _check_data(plan: SweepPlan, runs: Sequence[PlannedRun], reporter: Reporter) -> None:
    if runs:
        from tandem.sweeping.data_check import check_data  # it imports torch and transformers

        check_data(plan, runs, reporter)


def _record(plan: SweepPlan, number: int, folder: Path) -> SweepRun:
    planned = plan.runs[number]
    path = folder / planned.name
    return SweepRun(
        name=planned.name,
        path=path,
        values=planned.combination.values,
        status="finished" if is_finished(path) else "planned",
        log=folder / SWEEP_LOGS / f"{planned.name}.log",
    )


class _Training:
    """Trains the unfinished runs of a sweep, and updates their records in `states`."""

    def __init__(self, plan: SweepPlan, folder: Path, states: dict[str, SweepRun], reporter: Reporter):
        self._plan, self._folder, self._states, self._reporter = plan, folder, states, reporter

    def run(self, environments: Sequence[Mapping[str, str]]) -> None:
        total, finished = len(self._states), self._num_finished()
        again = f", of which {finished} {'is' if finished == 1 else 'are'} finished" if finished else ""
        at_a_time = f", {len(environments)} at a time" if len(environments) > 1 else ""
        self._reporter.say(f"Sweep of {counted(total, 'run')} in {self._folder}{again}{at_a_time}")
        tasks = [
            Task(
                name=one.name,
                arguments=self._plan.train_arguments(one, self._folder),
                run=self._folder / one.name,
                log=self._states[one.name].log,
                on_one_gpu=not uses_several_gpus(one.loaded.config),
            )
            for one in self._plan.runs
            if self._states[one.name].status != "finished"
        ]
        stopping = Stopping()
        with stopped_by_signals(stopping), self._reporter.progress("Runs", total, done=finished) as bar:

            def ended(task: Task, outcome: Ended) -> None:
                self._ended(task, outcome)
                bar(1)

            def following(steps: Mapping[str, tuple[int, int] | None]) -> None:
                bar(0, [f"{name} {_progress(step)}" for name, step in steps.items()])

            train_all(tasks, environments, stopping, started=self._started, ended=ended, following=following)
            self._raise_if_stopped(stopping)

    def _started(self, task: Task) -> None:
        how = "resumed" if (task.run / "checkpoints").is_dir() else "started"
        self._reporter.say(f"{task.name}: {how}")

    def _ended(self, task: Task, outcome: Ended) -> None:
        run = self._states[task.name]
        if outcome.is_stopped:
            self._states[task.name] = replace(run, status="stopped")
        elif outcome.exit_code == 0 and is_finished(run.path):
            self._states[task.name] = replace(run, status="finished")
            done = f"{self._num_finished()} of {len(self._states)}"
            self._reporter.say(f"{task.name}: finished in {duration(outcome.seconds)} ({done})")
        else:
            error = outcome.error or "it ended without an exported model"
            self._states[task.name] = replace(run, status="failed", error=error, exit_code=outcome.exit_code)
            append_failure(run.log, error)
            self._reporter.warn(f"{task.name} failed: {error}\nIts log is {run.log}. The sweep continues.")

    def _num_finished(self) -> int:
        return sum(run.status == "finished" for run in self._states.values())

    def _raise_if_stopped(self, stopping: Stopping) -> None:
        """Raise StoppedError if a signal has stopped the sweep or one of its runs, and print how to continue."""
        stopped = [run.name for run in self._states.values() if run.status == "stopped"]
        if not stopped and not stopping.is_wanted():
            return
        total, finished = len(self._states), self._num_finished()
        verb = "is" if finished == 1 else "are"
        or_this = "" if in_command() else ", or this command"
        how = f"{same_call().capitalize()} continues the sweep{or_this}:"
        self._reporter.end(f"{finished} of {total} runs {verb} finished. {how}")
        self._reporter.command(self._plan.command(self._folder))
        stopping.check()
        raise StoppedError(f"a signal to the process of {stopped[0]}")


def _progress(step: tuple[int, int] | None) -> str:
    return "starting" if step is None else f"step {step[0]}/{step[1]}"


def _result(plan: SweepPlan, folder: Path, runs: Sequence[SweepRun]) -> SweepResult:
    """Read the results of all runs, and write the page that compares them."""
    read = read_runs(runs)
    records = tuple(measured(run, read.get(run.name)) for run in runs)
    best = best_of(list(read.values()))
    page = None if not read else write_report([run.path for run in read.values()], folder / COMPARISON).page
    return SweepResult(
        folder=folder,
        swept=plan.swept,
        runs=records,
        best=None if best is None else next(run for run in records if run.name == best.run.name),
        best_is_clear=best is not None and best.is_clear,
        page=page,
    )
