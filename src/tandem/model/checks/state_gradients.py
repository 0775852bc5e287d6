"""Checks the gradients of recurrent layers in packs.

A completion starts from a copy of its prompt's state. If a copy were cut from the computation graph, log-probabilities would be
correct and gradients wrong, so the audit compares gradients too. The other side of the comparison is computed unpacked, by the
functions of transformers: an error in a function that computes packs would otherwise be on both sides.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import AuditError
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import Policy, perturb
from tandem.model.recurrent.layers import recomputed_rows
from tandem.packing.layout import Pack, lay_out
from tandem.packing.packer import in_blocks

# Relative difference, as a norm, that ordinary rounding explains; and the most that is ever tolerated, if a model rounds more. A
# state without gradients changes them by a third or more in the models that were tested.
MIN_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
MAX_TOLERANCE = {"float32": 0.02, "bfloat16": 0.2}
ROUNDING_FACTOR = 4


def check_state_gradients(
    policy: Policy, preference: TokenizedPreference, ranks: Ranks, *, precision: str, model: str
) -> float:
    """Compare the gradients of a preference's prompt in a pack with those of each of its sequences alone, unpacked.

    The gradients are those of the sum of all log-probabilities with respect to the embeddings of the prompt. Return their
    relative difference. Raise AuditError if rounding does not explain it.
    """
    length = len(preference.prompt) + sum(len(completion) for completion in preference.completions)
    shared = lay_out([0], [preference], length=in_blocks(length))
    alone = lay_out([0], [preference], length=in_blocks(length), arrangement="separate")
    size = len(preference.prompt)
    with _unpacked(policy):
        wanted = _prompt_gradient(policy, alone, size, ranks.device)
    difference = _relative(_prompt_gradient(policy, shared, size, ranks.device), wanted)
    tolerance = MIN_TOLERANCE[precision]
    if ranks.highest(not difference <= tolerance):  # all ranks run the extra forward pass, or none does
        with _unpacked(policy):
            perturbed = _prompt_gradient(policy, alone, size, ranks.device, perturbed=True)
        rounding = ROUNDING_FACTOR * _relative(perturbed, wanted)
        tolerance = min(max(tolerance, rounding), MAX_TOLERANCE[precision])
    if not difference <= tolerance:
        raise AuditError(
            f"audit: {model}: {preference.place}: in a pack the gradients of its prompt differ by {difference:.1%} from those "
            f"of each sequence alone (rounding explains {tolerance:.1%}), so its recurrent layers would be trained wrongly. "
            "Nothing was trained. Train this model with policy.packing.mode=none, and report it."
        )
    return difference


@contextmanager
def _unpacked(policy: Policy) -> Iterator[None]:
    """Inside this context, a policy computes rows as transformers does, each of which holds one sequence."""
    own = policy.model.config._attn_implementation
    policy.packed = False
    policy.model.set_attn_implementation(policy.architecture.plain_attention)
    try:
        with recomputed_rows():
            yield
    finally:
        policy.packed = True
        policy.model.set_attn_implementation(own)


@torch.compiler.set_stance("force_eager")
def _prompt_gradient(policy: Policy, pack: Pack, size: int, device: torch.device, *, perturbed: bool = False) -> Tensor:
    """Return the gradient with respect to the embeddings of the first `size` tokens, summed over rows: [size, hidden]."""
    outputs: list[Tensor] = []

    def keep(module: object, given: object, output: Tensor) -> Tensor:
        outputs.append((perturb(output) if perturbed else output).detach().requires_grad_())
        return outputs[0].clone()  # the next layer may add to it in place

    hook = policy.model.get_input_embeddings().register_forward_hook(keep)
    # Attention with a dense mask, because FlexAttention would be compiled for this length.
    attention, policy.attention = policy.attention, "sdpa"
    try:
        inputs = policy.inputs(pack, device)
        with torch.enable_grad():
            total = policy(inputs)[: inputs.num_scored].sum()
            (gradient,) = torch.autograd.grad(total, outputs)
    finally:
        policy.attention = attention
        hook.remove()
    return gradient[:, :size].float().sum(0)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
