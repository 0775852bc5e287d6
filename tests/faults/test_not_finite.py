"""A loss or a gradient that is not finite ends the run before the update; what was saved is from before it."""

import re

import pytest
import torch
from killing import assert_same
from running import few_pairs, metrics_of, short_run

from tandem.errors import NonFiniteError
from tandem.model.reference import LiveReference
from tandem.training import step, trainer
from tandem.training.checkpoint.checkpoints import checkpoints, step_of


def in_the_third_step(monkeypatch, spoil):
    """Something happens to the policy before the third step's forward."""
    real, calls = trainer.train_step, []

    def spoiled(policy, *rest, **options):
        calls.append(1)
        if len(calls) == 3:
            spoil(policy, monkeypatch)
        return real(policy, *rest, **options)

    monkeypatch.setattr(trainer, "train_step", spoiled)


def nan_in_a_loss(policy, monkeypatch):
    """Of the first pair of every pack."""
    real = step.pack_outcome

    def outcome(*arguments):
        found = real(*arguments)
        found.loss.pair_losses[0] = float("nan")
        return found

    monkeypatch.setattr(step, "pack_outcome", outcome)


def infinity_in_a_gradient(policy, monkeypatch):
    """Every loss is finite."""
    parameter = next(policy.parameters())
    handle = parameter.register_post_accumulate_grad_hook(
        lambda p: p.grad.view(-1)[:1].fill_(float("inf")) and handle.remove()
    )


SAID = {
    nan_in_a_loss: "loss nan, gradient norm ",
    infinity_in_a_gradient: "gradient norm inf: not finite. The update was skipped and nothing was saved. Every loss was "
    "finite. Lower the learning rate.",
}


@pytest.mark.parametrize("spoil", SAID)
def test_a_run_stopped_by_a_non_finite_step_resumes_with_identical_weights(small, whole, tmp_path, monkeypatch, spoil):
    run = tmp_path / "run"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        in_the_third_step(patch, spoil)
        with pytest.raises(NonFiniteError) as stopped:
            short_run(run, *small.overrides(run))
    assert stopped.value.exit_code == 5
    assert SAID[spoil] in str(stopped.value)
    if spoil is nan_in_a_loss:
        assert f"Pairs at: {small.folder}/train.jsonl:" in str(stopped.value)
    assert max(step_of(place) for place in checkpoints(run / "checkpoints")) == 2
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert torch.isfinite(torch.tensor([line["loss"] for line in metrics_of(run)])).all()
    assert small.run(run, tmp_path / "cache").code == 0
    assert_same(run, whole)


def test_the_command_ends_in_its_code_and_one_message(small, tmp_path):
    """Weights after the first step of this length are too large for the second step's numbers."""
    ended = small.run(tmp_path / "run", tmp_path / "cache", "policy.optimizer.kwargs.lr=1e30")
    assert ended.code == 5
    assert re.fullmatch(
        r"tandem: error: step 2: loss \S+, gradient norm nan: not finite. The update was skipped and .*\n", ended.err
    )
    assert not (tmp_path / "run/model").exists()


def test_a_live_reference_that_is_not_finite_is_named_and_not_the_learning_rate(tmp_path, monkeypatch):
    real, calls = LiveReference.token_logps, []

    def spoiled(self, pack, inputs):
        calls.append(1)
        values = real(self, pack, inputs)
        return values * float("nan") if len(calls) > 2 else values  # the audit sees two at most

    monkeypatch.setattr(LiveReference, "token_logps", spoiled)
    with pytest.raises(NonFiniteError) as stopped:
        short_run(tmp_path / "run", "reference.mode=live", few_pairs(tmp_path))
    assert re.fullmatch(
        r"step \d: the reference's log-probabilities of the pairs at .*few\.jsonl:\d+.* are not finite\. The update was "
        r"skipped and nothing was saved\. Check these rows; if other rows fail too, the reference model overflows: try "
        r"policy\.precision=float32\.",
        str(stopped.value),
    )
