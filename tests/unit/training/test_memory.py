"""The forecast of memory: known sizes are counted, and the rest is measured on a pack before the first step."""

import pytest
import torch
from running import short_run

from tandem.config.sections.policy import Lora, Optimizer, Packing, Policy
from tandem.errors import OutOfMemoryError
from tandem.storage.cache import GIB
from tandem.training import memory, trainer
from tandem.training.forecast import Forecast, forecast, refuse_forecast_overflow
from tandem.training.memory import suggest_less_memory, suggest_less_memory_without_training


def model():
    """100 trained numbers in float32, 50 frozen ones in bfloat16."""
    made = torch.nn.ParameterDict({"trained": torch.nn.Parameter(torch.zeros(100))})
    made["frozen"] = torch.nn.Parameter(torch.zeros(50, dtype=torch.bfloat16), requires_grad=False)
    return made


def test_trained_parameters_have_gradients_and_two_moments():
    expected = forecast(model(), peak=2000, length=512, state_bytes=8)  # type: ignore[arg-type]
    assert (expected.weights, expected.gradients, expected.states) == (500, 400, 800)
    assert expected.activations == 2000 - 500 - 400
    assert expected.total == 2000 + 800


def test_more_than_the_gpu_has_is_refused_before_the_first_step(monkeypatch):
    class Card:
        total_memory = 80 * GIB

    monkeypatch.setattr(memory.torch.cuda, "get_device_properties", lambda device: Card)
    fits = Forecast(20 * GIB, 20 * GIB, 30 * GIB, 10 * GIB, 8192)
    refuse_forecast_overflow(fits, torch.device("cuda"), Policy())
    with pytest.raises(OutOfMemoryError) as refused:
        refuse_forecast_overflow(Forecast(20 * GIB, 20 * GIB, 20 * GIB, 30 * GIB, 8192), torch.device("cuda"), Policy())
    assert str(refused.value) == (
        "the run needs 90.0 GiB and the GPU has 80.0: weights 20.0, gradients 20.0, optimizer states 20.0, activations in "
        "rows of 8,192 tokens 30.0: 90.0 GiB. To use less memory, try policy.packing.pack_length below 8192 (rows may be as "
        "short as the longest preference); then policy.activation_checkpointing=selective, policy.optimizer.state_dtype=int8, "
        "policy.weights=bfloat16_stochastic, policy.lora.enabled=true."
    )


def test_other_settings_are_suggested_first_if_shorter_rows_cannot_help():
    assert suggest_less_memory(8192, Policy(), shorter_rows_help=False) == (
        "To use less memory, try policy.optimizer.state_dtype=int8; then policy.weights=bfloat16_stochastic, "
        "policy.lora.enabled=true, "
        "more GPUs, policy.packing.pack_length below 8192 (rows may be as short as the longest preference), "
        "policy.activation_checkpointing=selective."
    )


def test_only_settings_not_yet_in_use_are_suggested():
    policy = Policy(
        activation_checkpointing="full",
        optimizer=Optimizer(state_dtype="int8"),
        lora=Lora(enabled=True),
        packing=Packing(packs_per_micro_batch=5),
    )
    assert suggest_less_memory(4096, policy, shorter_rows_help=True) == (
        "To use less memory, try policy.packing.packs_per_micro_batch=2; then policy.packing.pack_length below 4096 (rows may be "
        "as short as the longest preference)."
    )
    few = Policy(activation_checkpointing="full", optimizer=Optimizer(state_dtype="int8"), lora=Lora(enabled=True))
    only = "policy.packing.pack_length below 512 (rows may be as short as the longest preference)"
    assert suggest_less_memory(512, few, shorter_rows_help=True) == f"To use less memory, try {only}."


def test_an_evaluation_is_not_advised_to_change_what_only_training_has():
    policy = Policy(precision="float32", packing=Packing(packs_per_micro_batch=4))
    assert suggest_less_memory_without_training(4096, policy) == (
        "To use less memory, try policy.packing.packs_per_micro_batch=2; then policy.packing.pack_length below 4096 (rows may "
        "be as short as the longest preference), policy.precision=bfloat16."
    )
    padded = Policy(packing=Packing(mode="none"))
    assert suggest_less_memory_without_training(4096, padded) == (
        "To use less memory, try a lower policy.max_total_sequence_length."
    )


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\n  Tried 2 GiB."),
            "CUDA out of memory. Tried 2 GiB. To use less memory, try",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "[enforce fail] DefaultCPUAllocator: can't",
        ),
        (
            RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
            "[enforce fail] data. DefaultCPUAllocator: not",
        ),
        (RuntimeError("ours"), None),
    ],
)
def test_out_of_memory_errors_suggest_settings(error, reported, monkeypatch, tmp_path):
    """Any other error keeps its traceback."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(trainer, "build", fails)
    with pytest.raises(RuntimeError if reported is None else OutOfMemoryError) as caught:
        short_run(tmp_path / "run")
    assert str(caught.value).startswith(reported or "ours")
    assert reported is None or "policy.packing.pack_length below 256" in str(caught.value)
