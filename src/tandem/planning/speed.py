"""Estimates how long training takes on a GPU, from speeds that were measured on an H200.

The measurements are in benchmarks/results; `tests/unit/planning/test_speed.py` compares the estimate with them.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.config.schema import Config
from tandem.model.architecture import NUMBERS_OF_EXPERTS, architecture_of, decoder_layers, has_layer_list
from tandem.planning.cards import Card, find_card

MEASURED_CARD = find_card("h200-141gb")
# Useful operations per second as a share of the card's peak, by number of weights, with rows that keep the GPU busy.
MEASURED_SHARES = ((0.135e9, 0.345), (0.5e9, 0.45), (1.5e9, 0.54), (8e9, 0.62))
# The host starts the kernels of a row, layer by layer, and updates the weights. Where rows are short, that takes longer than the
# kernels. The second number is from a training run of SmolLM2-135M, whose steps have one row each.
HOST_SECONDS_PER_LAYER, HOST_SECONDS_PER_UPDATE = 2.17e-3, 0.04
HOST_OVERLAP = 8  # the norm in which both times add up: 1 would be their sum, infinity the longer one
# Speed with a setting, compared with the speed without it.
RECOMPUTED_SPEED = {"none": 1.0, "selective": 0.91, "full": 0.82}
INT8_STATES_SPEED = 0.98
LORA_SPEED = 1.28  # 1.23 at 1.5 billion weights, 1.33 at 8 billion
DETERMINISTIC_SPEED = 0.96
# Time of a layer with a recurrent scan beyond that of another layer of its size, as a share of the latter. From one run, of
# Granite 4's 1B, 36 of whose 40 layers have scans (benchmarks/results/hybrids.jsonl).
SCAN_TIME = 1.0
FORWARD_SPEED = 3.0  # a pass without gradients, compared with training
# The range of times, as factors of the estimate: on the measured card, and on cards whose speed is computed from their peak.
MEASURED_RANGE, COMPUTED_RANGE = (0.85, 1.25), (0.75, 1.7)
SMALLEST_MEASURED = 0.4e9  # weights; smaller models are less predictable
# Seconds from the command to the first step, with a constant part and a part per billion weights: warm and empty caches.
START_SECONDS = ((20.0, 2.0), (55.0, 10.0))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that determine its speed."""

    num_weights: int
    num_trunk: (
        float  # weights of the decoder layers that a token is multiplied with; of experts, only those it is sent to
    )
    hidden: int
    vocabulary: int
    scans: float = 0.0  # share of the layers that have a recurrent scan
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed in a pass over some preferences."""

    tokens: float  # prompts counted once where they are shared; without filler
    scored: float  # tokens of completions
    attention: float = 1.0  # cost of a token with attention, divided by its cost in the linear layers
    fill: float = 1.0  # tokens divided by positions

    def __add__(self, other: "Work") -> "Work":
        tokens = self.tokens + other.tokens
        if not tokens:
            return self
        return Work(
            tokens=tokens,
            scored=self.scored + other.scored,
            attention=(self.tokens * self.attention + other.tokens * other.attention) / tokens,
            fill=tokens / (self.tokens / self.fill + other.tokens / other.fill),
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.tokens * times, self.scored * times, self.attention, self.fill)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of times in seconds."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)


def useful_flops(size: ModelSize, work: Work) -> float:
    """Return the floating-point operations of training on `work`: forward and backward, without filler and attention."""
    return 6 * size.num_trunk * work.tokens + 6 * size.hidden * size.vocabulary * work.scored


def size_of(model: Any) -> ModelSize:
    """Return the sizes of a model. `model`: built without weights (`empty_model`)."""
    text = model.config.get_text_config()
    layers = decoder_layers(model) if has_layer_list(model) else [model]
    chosen, experts = getattr(text, "num_experts_per_tok", None), _num_experts(text)
    used = chosen / experts if chosen and experts else 1.0
    num_trunk = sum(
        parameter.numel() * (used if ".experts." in f".{name}" else 1.0)
        for layer in layers
        for name, parameter in layer.named_parameters()
    )
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    architecture = architecture_of(model.config, type(model))
    recurrent = sum(one in ("recurrent", "both") for one in architecture.layers or ()) if architecture.scan else 0
    return ModelSize(
        num_weights, num_trunk, text.hidden_size, text.vocab_size, recurrent / len(layers), num_layers=len(layers)
    )


def training_seconds(
    size: ModelSize, work: Work, row_tokens: int, config: Config, card: Card, *, num_updates: int = 0
) -> float:
    """Return the expected seconds of training on `work`. `row_tokens`: tokens of a micro-batch. `num_updates`: of the weights."""
    policy = config.policy
    share = _busy_share(size.num_weights)
    speed = RECOMPUTED_SPEED[policy.activation_checkpointing]
    speed *= INT8_STATES_SPEED if policy.optimizer.state_dtype == "int8" else 1.0
    speed *= LORA_SPEED if policy.lora.enabled else 1.0
    speed *= DETERMINISTIC_SPEED if config.run.deterministic else 1.0
    assert card.tflops is not None
    operations = useful_flops(size, work) * (work.attention + SCAN_TIME * size.scans) / work.fill
    computed = operations / (share * speed * card.tflops * 1e12)
    rows = work.tokens / work.fill / row_tokens
    started = rows * size.num_layers * HOST_SECONDS_PER_LAYER + num_updates * HOST_SECONDS_PER_UPDATE
    return (computed**HOST_OVERLAP + started**HOST_OVERLAP) ** (1 / HOST_OVERLAP)


def time_range(seconds: float, size: ModelSize, card: Card, *, is_several: bool = False) -> Range:
    """Return the range of a time. `is_several`: on several GPUs, which were not measured."""
    is_measured = card.is_measured and size.num_weights >= SMALLEST_MEASURED and not is_several
    low, high = MEASURED_RANGE if is_measured else COMPUTED_RANGE
    return Range(seconds * low, seconds * high)


def start_range(size: ModelSize) -> Range:
    """Return the seconds from the command to the first step: torch is imported, weights are loaded, layers are compiled."""
    billions = size.num_weights / 1e9
    low, high = (constant + each * billions for constant, each in START_SECONDS)
    return Range(low, high)


def _busy_share(num_weights: float) -> float:
    """Interpolate MEASURED_SHARES over the logarithm of the number of weights. Larger models than measured get the last one."""
    logs = [(math.log(num), share) for num, share in MEASURED_SHARES]
    x = math.log(num_weights)
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(logs) if x < pair[1][0]), logs[-2:])
    return max(0.1, min(logs[-1][1], y0 + (y1 - y0) * (x - x0) / (x1 - x0)))


def _num_experts(text: Any) -> int | None:
    return next((found for name in NUMBERS_OF_EXPERTS if (found := getattr(text, name, None))), None)
