"""The forecast of memory: what is known is counted, the rest is what a rehearsed pack took beside it."""

import pytest
import torch

from tandem.errors import OutOfMemoryError
from tandem.train import memory
from tandem.train.memory import GIB, forecast, refuse_what_cannot_fit


def model():
    """100 trained numbers in float32, 50 frozen ones in bfloat16."""
    made = torch.nn.ParameterDict({"trained": torch.nn.Parameter(torch.zeros(100))})
    made["frozen"] = torch.nn.Parameter(torch.zeros(50, dtype=torch.bfloat16), requires_grad=False)
    return made


def test_what_is_trained_has_gradients_and_two_moments():
    expected = forecast(model(), peak=2000, length=512, state_bytes=4)  # type: ignore[arg-type]
    assert (expected.weights, expected.gradients, expected.states) == (500, 400, 800)
    assert expected.activations == 2000 - 500 - 400
    assert expected.total == 2000 + 800


def test_more_than_the_gpu_has_is_refused_before_the_first_step(monkeypatch):
    class Card:
        total_memory = 80 * GIB

    monkeypatch.setattr(memory.torch.cuda, "get_device_properties", lambda device: Card)
    fits = memory.Forecast(20 * GIB, 20 * GIB, 30 * GIB, 10 * GIB, 8192)
    refuse_what_cannot_fit(fits, torch.device("cuda"))
    with pytest.raises(OutOfMemoryError) as refused:
        refuse_what_cannot_fit(memory.Forecast(20 * GIB, 20 * GIB, 40 * GIB, 10 * GIB, 8192), torch.device("cuda"))
    assert str(refused.value) == (
        "the run needs 90.0 GiB of a GPU that has 80.0: weights 20.0, gradients 20.0, optimizer states 40.0, activations in "
        "rows of 8,192 tokens 10.0: 90.0 GiB. Lower policy.packing.pack_length, policy.packing.packs_per_micro_batch or "
        "policy.head_chunk_tokens, or set policy.activation_checkpointing=selective (or full)."
    )
