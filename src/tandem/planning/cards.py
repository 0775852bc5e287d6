"""The graphics cards that a run can be planned for: memory, peak speed and price. Does not import torch."""

import math
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.storage.cache import GIB


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card. `memory_bytes`: as torch reports it, which is less than the size in the name."""

    name: str
    memory_bytes: int
    tflops: float | None  # bfloat16 matrix products without sparsity, by the data sheet; None: unknown
    is_measured: bool = False  # whether training on this card was measured

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB


# name: (GiB that torch reports, bfloat16 TFLOPS of NVIDIA's data sheet without sparsity, words in the name that the driver
# reports). Sizes of memory differ by a few hundred MiB between drivers. Sorted by memory.
TABLE: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "a10g-24gb": (22.0, 70, ("A10G",)),
    "l4-24gb": (22.0, 121, ("L4",)),
    "rtx-3090-24gb": (23.6, 71, ("RTX", "3090")),
    "rtx-4090-24gb": (23.6, 165, ("RTX", "4090")),
    "rtx-5090-32gb": (31.4, 209, ("RTX", "5090")),
    "a100-40gb": (39.4, 312, ("A100", "40GB")),
    "l40s-48gb": (44.4, 362, ("L40S",)),
    "a6000-48gb": (47.5, 155, ("RTX", "A6000")),
    "rtx-6000-ada-48gb": (47.5, 364, ("RTX", "6000", "Ada")),
    "h100-80gb": (79.1, 989, ("H100", "80GB", "HBM3")),
    "h100-pcie-80gb": (79.1, 756, ("H100", "PCIe")),
    "a100-80gb": (79.1, 312, ("A100", "80GB")),
    "h100-nvl-94gb": (93.1, 835, ("H100", "NVL")),
    "h200-141gb": (139.8, 989, ("H200",)),
    "b200-180gb": (178.3, 2250, ("B200",)),
}
MEASURED = ("h200-141gb",)
# GB/s each way between the GPUs of a machine, by data sheet: of NVLink, otherwise of PCI Express with 16 lanes. Bridges that
# connect pairs of cards are not counted.
NVLINK = {"a100-40gb": 300.0, "a100-80gb": 300.0, "h100-80gb": 450.0, "h200-141gb": 450.0, "b200-180gb": 900.0}
PCIE_5, PCIE_4 = 64.0, 32.0
WITH_PCIE_5 = ("rtx-5090-32gb", "h100-pcie-80gb", "h100-80gb", "h100-nvl-94gb", "h200-141gb", "b200-180gb")


def card_names() -> str:
    """Return the names of all cards for messages: "a10g-24gb, l4-24gb, ..."."""
    return ", ".join(TABLE)


def find_card(name: str) -> Card:
    """Return the card with this name. Raise ConfigError for an unknown name."""
    known = TABLE.get(name.strip().lower())
    if known is None:
        similar = [one for one in TABLE if one.startswith(name.strip().lower())]
        others = f"Did you mean {' or '.join(similar)}?" if similar else f"Known cards: {card_names()}."
        raise ConfigError(f"--gpu {name}: unknown card. {others}")
    memory_gib, tflops, _ = known
    name = name.strip().lower()
    return Card(name, int(memory_gib * GIB), tflops, is_measured=name in MEASURED)


def card_of_device(reported: str, memory_bytes: int) -> Card:
    """Return the card of this machine. `reported`: the name that the driver reports, such as NVIDIA A100-SXM4-80GB.

    The speed of an unknown card is unknown.
    """
    name = _name_of(reported)
    return Card(reported, memory_bytes, TABLE[name][1] if name else None, is_measured=name in MEASURED)


def data_sheet_link(card: Card | None) -> tuple[float, bool]:
    """Return the GB/s, each way, between the GPUs of a machine by the data sheet, and whether they have NVLink."""
    name = None if card is None else _name_of(card.name)
    return (NVLINK[name], True) if name in NVLINK else (data_sheet_pcie(card), False)


def data_sheet_pcie(card: Card | None) -> float:
    """Return the GB/s, each way, between a GPU and its host by the data sheet."""
    return PCIE_5 if card is not None and _name_of(card.name) in WITH_PCIE_5 else PCIE_4


def _name_of(reported: str) -> str | None:
    """Return the name of a card in the table. `reported`: this name, or what the driver reports."""
    if reported in TABLE:
        return reported
    words = reported.replace("-", " ").split()
    return next((name for name, (*_, wanted) in TABLE.items() if all(word in words for word in wanted)), None)


def larger_cards(memory_bytes: int) -> list[Card]:
    """Return the cards with more memory than this, the smallest first."""
    return [card for card in map(find_card, TABLE) if card.memory_bytes > memory_bytes]


def check_price(price_per_hour: float | None) -> None:
    """Raise ConfigError for a price that is negative or not a number."""
    if price_per_hour is not None and not (price_per_hour >= 0 and math.isfinite(price_per_hour)):
        raise ConfigError(
            f"--price-per-hour {price_per_hour:g}: not a price. Give a number that is not negative, such as 2.50."
        )
