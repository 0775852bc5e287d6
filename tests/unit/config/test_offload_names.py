"""Other trainers' names for optimizer states in host memory lead to policy.optimizer.offload; those for weights do not."""

from typing import Any

import pytest

from tandem.config.compat.records import nested
from tandem.config.compat.suggest import suggestion
from tandem.config.compat.translate import translate
from tandem.config.validation import flatten

# A trainer refuses a file without these.
REQUIRED = {
    "axolotl": {"base_model": "org/model", "learning_rate": 1e-6, "rl": "dpo"},
    "llama-factory": {"model_name_or_path": "org/model", "stage": "dpo"},
    "trl": {"model_name_or_path": "org/model"},
}
OFFLOAD = {"policy.optimizer.offload": True}
WEIGHTS = (
    "Weights and gradients stay on the GPU. policy.optimizer.offload=true keeps the moments of the optimizer in host "
    "memory."
)
MOMENTS = "only the moments; the optimizer computes on the GPU"
NOT_READ = (
    "tandem does not read DeepSpeed's file. If it has offload_optimizer, set policy.optimizer.offload=true; weights stay on the "
    "GPU."
)
ON_DISK = "The moments of the optimizer are on the GPU, or in host memory with policy.optimizer.offload=true; never on a disk."
ZERO = "deepspeed.zero_optimization"
ALL = tuple(REQUIRED)


def became(origin: str, key: str, value: Any) -> tuple[dict[str, Any], str | None]:
    """The settings that a key of another trainer is translated to, and the note."""
    tree = nested({**REQUIRED.get(origin, {}), key: value})
    (row,) = [
        one for one in translate(origin, tree, dict.fromkeys(flatten(tree), "theirs.yaml")).rows if one.key == key
    ]
    return dict(row.outcome.settings), row.outcome.note


@pytest.mark.parametrize(
    ("origin", "key", "value"),
    [
        *((origin, f"{ZERO}.offload_optimizer.device", "cpu") for origin in ALL),
        ("trl", "offload_optimizer_device", "cpu"),
    ],
)
def test_optimizer_states_in_host_memory_are_translated(origin, key, value):
    assert became(origin, key, value) == (OFFLOAD, MOMENTS)
    assert became(origin, key, "none")[0] == {}
    assert became(origin, key, "nvme") == ({}, ON_DISK)


def test_nemo_rl_offloads_the_states_and_keeps_the_weights():
    note = "optimizer states are in host memory; weights stay on the GPU"
    assert became("nemo-rl", "policy.dtensor_cfg.cpu_offload", True) == (OFFLOAD, note)


@pytest.mark.parametrize(
    ("origin", "key", "value"),
    [
        *((origin, f"{ZERO}.offload_param.device", "cpu") for origin in ALL),
        *((origin, "fsdp", "full_shard auto_wrap offload") for origin in ALL),
        *((origin, "fsdp_config.offload_params", True) for origin in ALL),
        *((origin, "fsdp_config.fsdp_offload_params", True) for origin in ALL),
        ("trl", "fsdp_config.cpu_offload", True),
        ("trl", "fsdp_offload_params", True),
        ("trl", "offload_param_device", "cpu"),
    ],
)
def test_weights_in_host_memory_are_not_translated_and_the_note_says_why(origin, key, value):
    assert became(origin, key, value) == ({}, WEIGHTS)
    off = {"cpu": "none", True: False}.get(value, "full_shard")
    assert became(origin, key, off)[1] not in (WEIGHTS, None)


@pytest.mark.parametrize("origin", ALL)
def test_a_file_of_deepspeed_is_not_read(origin):
    assert became(origin, "deepspeed", "zero3_cpuoffload.json") == ({}, NOT_READ)


NOT_SUPPORTED = (
    "Not supported: weights stay on the GPU. policy.optimizer.offload=true moves the moments of the optimizer."
)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        *(
            (
                name,
                "Did you mean policy.optimizer.offload? It keeps the moments of the optimizer in host memory; weights and "
                "gradients stay on the GPU.",
            )
            for name in ("cpu_offload", "offload")
        ),
        (
            "offload_optimizer_device",
            "Did you mean policy.optimizer.offload? policy.optimizer.offload=true keeps the moments of the optimizer in host "
            "memory.",
        ),
        *((name, "Did you mean policy.optimizer.offload?") for name in ("offload_optimizer", "optimizer_cpu_offload")),
        *(
            (name, NOT_SUPPORTED)
            for name in ("offload_param", "offload_param_device", "offload_params", "fsdp_offload_params")
        ),
        ("activation_offloading", "Not supported; policy.activation_checkpointing=full computes activations again."),
    ],
)
def test_a_bare_name_leads_to_the_key_or_says_what_is_not_supported(name, suggested):
    assert suggestion(name) == suggested
