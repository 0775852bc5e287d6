"""The load-balancing loss of routers (dpo.router_aux_loss_coef), over the tokens of a global batch.

With E experts it is E * sum_e f_e * P_e: f_e is the number of times that expert e is chosen, and P_e the sum of its
probabilities, both over the tokens of all layers and divided by their number, as in transformers (arXiv:2101.03961, eq. 4). A
prompt counts once, however often it is computed, and filler does not count.

The loss is a product of two means over the batch, so it is not a sum over packs. f has no gradient, so it is counted first, in
a pass over all packs without gradients. Given f, the loss is a sum over tokens, and every router adds its gradient in the
backward pass of its pack. Nothing leaves the layers, so they can be compiled and recomputed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.model.distributed.process_group import Ranks
from tandem.model.transfer import to_device
from tandem.packing.layout import FILLER, Pack

BalanceMode = Literal["off", "count", "train"]


class RouterBalance:
    """The routers of a model, and the state of their load-balancing loss."""

    def __init__(self, model: Any, router_class: type[nn.Module], *, coefficient: float, ranks: Ranks):
        config = model.config.get_text_config()
        self.top_k: int = config.num_experts_per_tok
        self.coefficient = coefficient
        self.mode: BalanceMode = "off"
        self._ranks = ranks
        self._routers: list[Any] = [module for module in model.modules() if isinstance(module, router_class)]
        balanced = type(f"Balanced{router_class.__name__}", (_Balanced, router_class), {})
        experts = next(getattr(config, name) for name in EXPERTS if getattr(config, name, None))
        for router in self._routers:
            router.__class__ = balanced
            router.balance_mode, router.balance_top_k = "off", self.top_k
            # Buffers, so that compiled layers take them as inputs.
            for name, shape in (
                ("token_weights", (0,)),
                ("balance_slopes", (experts,)),
                ("balance_sums", (2, experts)),
            ):
                router.register_buffer(name, torch.zeros(shape, device=ranks.device), persistent=False)

    def prepare(self, mode: BalanceMode, token_weights: Tensor | None = None) -> None:
        """Set what the routers do in the next pass. `token_weights`: of each position of its rows."""
        for router in self._routers:
            router.balance_mode = mode
            if mode != "off":
                router.token_weights = token_weights

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside this context, passes count how often experts are chosen, from zero."""
        for router in self._routers:
            router.balance_sums.zero_()
        self.mode = "count"
        try:
            with torch.no_grad():
                yield
        finally:
            self.mode = "off"
            self.prepare("off")

    @contextmanager
    def training(self) -> Iterator[Tensor]:
        """Inside this context, backward passes add the gradient of the loss over the tokens that were counted before.

        Yields the loss, without the coefficient. Every rank must enter the context. The host does not wait.
        """
        sums = self._ranks.sum_of_all(torch.stack([router.balance_sums for router in self._routers]).double().sum(0))
        chosen, probabilities = sums
        total = chosen.sum() / self.top_k  # tokens, once for each layer
        experts = len(chosen)
        loss = experts * (chosen * probabilities).sum() / total**2
        slopes = (self.coefficient * experts * chosen / total**2).float()
        for router in self._routers:
            router.balance_slopes.copy_(slopes)
        self.mode = "train"
        try:
            yield loss
        finally:
            self.mode = "off"
            self.prepare("off")


EXPERTS = ("num_experts", "num_local_experts")


class _Balanced(nn.Module):
    """A router that counts the experts it chooses, or adds the gradient of the load-balancing loss."""

    balance_mode: BalanceMode
    balance_top_k: int
    token_weights: Tensor  # [positions]
    balance_slopes: (
        Tensor  # [experts], the derivative of the loss with respect to the sum of each expert's probabilities
    )
    balance_sums: Tensor  # [2, experts]: how often each expert is chosen, and the sum of its probabilities

    def forward(self, hidden_states: Tensor) -> Any:
        logits, scores, indices = super().forward(hidden_states)
        if self.balance_mode == "count" and not torch.is_grad_enabled():
            probabilities = logits.float().softmax(-1)
            chosen = torch.zeros_like(probabilities)
            # The highest probabilities, as in transformers. Routers may choose by other rules too (PhiMoE).
            chosen.scatter_(-1, probabilities.topk(self.balance_top_k, dim=-1).indices, 1.0)
            self.balance_sums.add_(torch.stack([self.token_weights @ chosen, self.token_weights @ probabilities]))
        elif self.balance_mode == "train" and torch.is_grad_enabled():
            scores = _AddGradient.apply(scores, logits, self.token_weights, self.balance_slopes)
        return logits, scores, indices


class _AddGradient(torch.autograd.Function):
    """Returns the scores unchanged, and adds the gradient of sum_t weight_t sum_e slope_e p_e(t) to that of the logits."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, logits: Tensor, weights: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(logits, weights, slopes)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, weights, slopes = ctx.saved_tensors
        # d p_e / d logit_j = p_e (1[e = j] - p_j)
        probabilities = logits.float().softmax(-1)
        grad = weights[:, None] * probabilities * (slopes - (probabilities @ slopes)[:, None])
        return grads[0], grad.to(logits.dtype), None, None


def token_weights(pack: Pack, device: torch.device) -> Tensor:
    """Return how much each position of a pack counts: 1, 0 for filler, and 1/n in a prompt that is computed n times."""
    return to_device(_token_weights(pack), device)


def _token_weights(pack: Pack) -> NDArray[np.float32]:
    """Return the weights of all positions, flat.

    Example: a prompt of 2 tokens and two completions of 1 token. Shared p p a b: 1 1 1 1. Repeated p p a p p b: .5 .5 1 .5 .5 1.
    """
    real = pack.tree != FILLER
    rows = np.broadcast_to(np.arange(len(real))[:, None], real.shape)[real]
    # Trees are numbered within a pack, and joined packs have other rows. Sorted, trees are in the order of their completions.
    _, tree = np.unique(rows * (pack.tree.max(initial=0) + 1) + pack.tree[real], return_inverse=True)
    num_completions = np.zeros(tree.max(initial=-1) + 1, np.int64)
    np.maximum.at(num_completions, tree, pack.branch[real])
    owner = pack.owner[np.cumsum(num_completions) - 1]
    copies = np.bincount(owner, minlength=len(pack.preferences))
    weights = np.zeros(real.shape, np.float32)
    weights[real] = np.where(pack.branch[real] == 0, 1 / copies[owner[tree]], 1.0)
    return weights.reshape(-1)
