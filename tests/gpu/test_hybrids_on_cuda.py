"""Recurrent layers in packs on a GPU: with kernels of flash-linear-attention and without, and which kernels are correct here.

Tests of kernels are skipped where flash-linear-attention is not installed, or refuses this GPU or version of Triton. The option
-rs shows the reasons.
"""

import pytest
import torch
from hybrids import (
    HYBRIDS,
    alone,
    assert_same_training,
    computed,
    gradient_difference,
    hybrid_settings,
    logp_difference,
    packed_rows,
    tiny_hybrid,
    two_rows,
)
from models import as_policy, model_folder
from running import few_pairs, metrics_of, short_run

from tandem.model.distributed.layers import compile_layers
from tandem.model.recurrent.families import FAMILIES, StateSizes
from tandem.model.recurrent.kernels import (
    Kernels,
    _convolution,
    _failure,
    _scans,
    check_scan,
    missing_package,
    usable_kernels,
)
from tandem.model.recurrent.layers import replace_functions

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# The states of Granite 4, of Qwen3.5 and of Kimi-Linear.
STATES = {
    "mamba2": StateSizes(heads=48, key_heads=1, key_size=128, value_size=64),
    "gated_delta": StateSizes(heads=16, key_heads=16, key_size=128, value_size=128),
    "kimi_delta": StateSizes(heads=32, key_heads=32, key_size=128, value_size=128),
}
# FlexAttention and the kernels need larger heads than the tests on a CPU.
LARGER = {
    "qwen3_next": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "qwen3_5_text": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "granitemoehybrid": {"hidden_size": 64, "head_dim": 16, "mamba_d_head": 16, "mamba_d_state": 16},
    "bamba": {"hidden_size": 64, "head_dim": 16, "mamba_d_head": 16, "mamba_d_state": 16},
    "lfm2": {"hidden_size": 64, "head_dim": 16},
}


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_float32_packs_equal_each_sequence_alone(architecture):
    rows = two_rows()
    model = tiny_hybrid(architecture).to(CUDA)
    replace_functions(model)  # from here on, layers use torch operations in float32
    wanted = alone(model, rows)
    found = computed(model, as_policy(model, attention="sdpa"), packed_rows(rows))
    assert logp_difference(found, wanted) < 1e-4
    assert gradient_difference(found, wanted) < 1e-3


@pytest.mark.parametrize(
    "architecture", [name for name in ("granitemoehybrid", "qwen3_5_text", "lfm2") if name in HYBRIDS]
)
def test_compiled_layers_with_flex_attention_equal_each_sequence_alone(architecture):
    torch._dynamo.reset()
    rows = two_rows()
    model = tiny_hybrid(architecture, **LARGER[architecture]).to(CUDA)
    replace_functions(model)
    wanted = alone(model, rows)
    policy = as_policy(model, attention="flex", head_chunk=64)
    compile_layers(policy)
    found = computed(model, policy, packed_rows(rows))
    assert logp_difference(found, wanted) < 2e-3
    assert gradient_difference(found, wanted) < 1e-2


@pytest.mark.parametrize("scan", STATES)
def test_a_kernel_computes_the_same_as_torch_with_all_gradients(scan):
    """Every kernel that flash-linear-attention has, at the sizes of real models.

    A kernel that refuses this GPU is not used, which is not a failure. One that runs and is wrong is a failure, although it is
    not used either: tandem may call it wrongly. Skipped if all refuse.
    """
    if reason := missing_package():
        pytest.skip(reason)
    outcomes = {}
    for kernel in _scans(scan):
        outcomes[kernel.__name__] = _failure(
            lambda kernel=kernel: check_scan(kernel, scan, STATES[scan], CUDA, torch.bfloat16)
        )
    print(scan, outcomes)
    wrong = {name: reason for name, reason in outcomes.items() if "is off by" in reason}
    chosen = usable_kernels(scan, STATES[scan], CUDA, torch.bfloat16)
    assert (chosen.scan is None) == all(outcomes.values())
    assert not wrong
    if chosen.scan is None:
        pytest.skip(chosen.reason)
    assert outcomes[chosen.scan.__name__] == ""


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "bamba", "qwen3_5_text", "qwen3_next"])
def test_kernels_equal_torch_operations_in_bfloat16_packs(architecture):
    """Log-probabilities and gradients of all weights, with kernels and with torch operations, from the same bfloat16 weights."""
    rows = two_rows()
    model = tiny_hybrid(architecture, **LARGER[architecture]).to(CUDA, torch.bfloat16)
    policy = as_policy(model, attention="sdpa")
    assert policy.recurrent is not None
    kernels = usable_kernels(FAMILIES[architecture], policy.recurrent.sizes, CUDA, torch.bfloat16)
    if kernels.scan is None:
        pytest.skip(kernels.reason)
    policy.recurrent.kernels = Kernels(None, None)
    wanted = computed(model, policy, packed_rows(rows))
    policy.recurrent.kernels = kernels
    found = computed(model, policy, packed_rows(rows))
    assert logp_difference(found, wanted) / float(wanted[0].abs().mean()) < 0.1
    whole = [torch.cat([one.float().flatten() for one in both[1].values()]) for both in (found, wanted)]
    assert float((whole[0] - whole[1]).norm() / whole[1].norm()) < 0.1


def test_the_convolution_kernel_computes_the_same_as_torch():
    if reason := missing_package():
        pytest.skip(reason)
    kernels = usable_kernels("convolution", None, CUDA, torch.bfloat16)
    assert kernels.convolution is _convolution()


@pytest.mark.parametrize("architecture", ["granitemoehybrid", "qwen3_5_text"])
def test_a_packed_run_has_the_losses_of_the_unpacked_run(architecture, tmp_path):
    settings = {**hybrid_settings(architecture), **LARGER[architecture]}
    model = model_folder(tmp_path / "model", architecture, **settings)
    given = [few_pairs(tmp_path), f"policy.model_name={model}", "policy.max_total_sequence_length=512"]
    # At this rate the losses of three steps move by far more than bfloat16 rounds.
    given += ["policy.precision=bfloat16", "dpo.max_num_steps=3", "policy.optimizer.kwargs.lr=1e-2"]
    packed = short_run(tmp_path / "packed", *given)
    unpacked = short_run(tmp_path / "unpacked", *given, "policy.packing.mode=none", "policy.compile=false")
    lines = [metrics_of(run) for run in (packed, unpacked)]
    assert_same_training(*lines)
