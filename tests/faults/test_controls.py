"""The comparison can fail: leave out any one part of the state that a run resumes from, and its final weights differ."""

from dataclasses import replace

import pytest
import torch
from running import killed_after, metrics_of, short_run, weights_of

from tandem.training import trainer
from tandem.training.checkpoint import checkpoints as checkpoint
from tandem.training.start import build

MORE = [
    "checkpointing.keep_top_k=9",
    "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 4}}",
]


@pytest.fixture
def random_steps(monkeypatch):
    """Training that draws random numbers, as dropout does."""
    real = trainer.train_step

    def drawing(policy, side, packs, batch, optimizer, max_grad_norm):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1 + 0.01 * torch.rand(()))
        return real(policy, side, packs, batch, optimizer, max_grad_norm)

    monkeypatch.setattr(trainer, "train_step", drawing)


def trained(small, run, *more):
    return short_run(run, *small.overrides(run, *MORE, *more))


def cut_and_resumed(small, run, monkeypatch, *, without=None):
    """A run that is killed after its third step was reported, and resumes from step 2 or 3 with something left out."""
    with killed_after(3):
        trained(small, run)
    with monkeypatch.context() as patch:
        if without is not None:
            without(patch)
        return trained(small, run)


def ends(run):
    """What a run's end is compared by."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(run).items()}
    return weights, [metrics_of(run, split) for split in ("train", "validation-default", "exported-default")]


def no_first_moment(patch):
    """One parameter's exp_avg is zeros."""
    real = build.load_checkpoint

    def loaded(place, policy, optimizer, *rest):
        progress = real(place, policy, optimizer, *rest)
        next(iter(optimizer.state.values()))["exp_avg"].zero_()
        return progress

    patch.setattr(build, "load_checkpoint", loaded)


def no_place_in_the_epoch(patch):
    """One batch off."""
    real = build.load_checkpoint

    def loaded(*given):
        progress = real(*given)
        return replace(progress, batch=progress.batch - 1)

    patch.setattr(build, "load_checkpoint", loaded)


def no_random_state(patch):
    patch.setattr(checkpoint, "_set_random_states", lambda *_: None)


def no_place_in_the_schedule(patch):
    """The scheduler starts from the beginning."""
    real = build.load_checkpoint

    class Still:
        def step(self):
            pass

    patch.setattr(build, "load_checkpoint", lambda a, b, c, scheduler, *rest: real(a, b, c, Still(), *rest))


def no_weight(patch):
    """One parameter is as it started."""
    real = checkpoint.state_tensors

    def loaded(policy, *rest):
        tensors = real(policy, *rest)
        name = next(name for name in tensors if name.startswith("policy."))
        return {**tensors, name: tensors[name].clone()}

    patch.setattr(checkpoint, "state_tensors", loaded)


def no_cut_of_the_metrics(patch):
    """Lines of steps that are repeated stay."""
    real = build.MetricsFile
    patch.setattr(build, "MetricsFile", lambda path, keep: real(path, None))


@pytest.fixture(scope="module")
def uninterrupted(small):
    """By whether steps draw random numbers."""
    return {}


def whole_of(small, uninterrupted, drawing):
    if drawing not in uninterrupted:
        uninterrupted[drawing] = ends(trained(small, small.folder / f"controls-{drawing}"))
    return uninterrupted[drawing]


def test_a_complete_restore_ends_with_identical_weights(small, uninterrupted, tmp_path, monkeypatch, random_steps):
    cut = cut_and_resumed(small, tmp_path / "run", monkeypatch)
    assert ends(cut) == whole_of(small, uninterrupted, True)


def test_leaving_out_the_random_state_changes_the_weights(small, uninterrupted, tmp_path, monkeypatch, random_steps):
    cut = cut_and_resumed(small, tmp_path / "run", monkeypatch, without=no_random_state)
    weights, metrics = ends(cut)
    whole_weights, whole_metrics = whole_of(small, uninterrupted, True)
    assert weights != whole_weights
    assert metrics != whole_metrics


@pytest.mark.parametrize(
    "without",
    [
        no_first_moment,
        no_place_in_the_epoch,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (no_place_in_the_schedule, no_weight)),
    ],
)
def test_leaving_out_any_part_of_the_state_changes_the_weights(small, uninterrupted, tmp_path, monkeypatch, without):
    cut = cut_and_resumed(small, tmp_path / "run", monkeypatch, without=without)
    weights, metrics = ends(cut)
    whole_weights, whole_metrics = whole_of(small, uninterrupted, False)
    assert weights != whole_weights
    assert metrics != whole_metrics


def test_metrics_that_are_not_cut_back_have_lines_twice(small, uninterrupted, tmp_path, monkeypatch):
    cut = cut_and_resumed(small, tmp_path / "run", monkeypatch, without=no_cut_of_the_metrics)
    weights, metrics = ends(cut)
    whole_weights, whole_metrics = whole_of(small, uninterrupted, False)
    assert weights == whole_weights
    assert metrics != whole_metrics
