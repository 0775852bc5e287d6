"""PackOutcomes in; a PairTable out, the numbers of every pair on the host; and what the pairs say together.

The numbers stay on the device until they are sent, all of a step or of a set in one transfer. Metrics are
computed here, on the host, in float64 and over all pairs at once: no division into packs can change one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.completions import ChosenRejected
from tandem.config.losses import needs_reference
from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Preferences, by_source
from tandem.errors import DefectError
from tandem.model.distributed.process_group import Ranks
from tandem.model.transfer import PendingHostCopy, to_host
from tandem.packing.layout import IntArray, Pack
from tandem.train.terms import PackOutcome

FloatArray = NDArray[np.float64]

# Differences of summed log-probabilities that rounding alone makes between two cuts of the same batch: a tie counts one
# half. Rewards are compared within the same band, scaled as the loss scales them (PairTable.rounding).
TIE_BAND = {"float32": 1e-3, "bfloat16": 0.1}
MARGIN_PERCENTILES = (10, 50, 90)


def pair_columns(outcome: PackOutcome) -> dict[str, Tensor]:
    """The numbers of each pair that are kept for metrics, by name: [pairs] each. A new column is added here."""
    loss, completions = outcome.loss, outcome.completions
    both = completions.both
    return {
        "loss": loss.pair_losses,
        **_of_both("reward", loss.rewards),
        **_of_both("logp", both(completions.policy)),
        **_of_both("reference", both(completions.reference)),  # the reference's log-probability
        **_of_both("drift", both(completions.drift)),
        **_of_both("tokens", both(completions.num_tokens)),
        **_of_both("score", both(completions.columns["score"])),  # NaN where the data gives none
        **_of_both(
            "slope", loss.reward_slopes
        ),  # how much the reward changes per nat of the completion's log-probability
    }


def _of_both(name: str, values: ChosenRejected) -> dict[str, Tensor]:
    return {f"{name}_chosen": values.chosen, f"{name}_rejected": values.rejected}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTable:
    """Every pair of a step or a set, on the host."""

    sft: FloatArray  # [preferences]
    preference: IntArray  # [pairs] index of the pair's preference in its set
    winner: IntArray  # [pairs] which completion of the preference is chosen
    loser: IntArray  # [pairs]
    columns: Mapping[str, FloatArray]  # [pairs] each: those of `pair_columns`

    def __len__(self) -> int:
        return len(self.preference)

    def __getitem__(self, name: str) -> FloatArray:
        return self.columns[name]

    @property
    def margin(self) -> FloatArray:
        return self["reward_chosen"] - self["reward_rejected"]

    def rounding(self, band: float) -> FloatArray:
        """How far rounding may move each margin, where it moves a difference of summed log-probabilities by `band` nats.

        Half of the band is of the chosen completion and half of the rejected one. With beta 0.1 and sums: 0.1 * band. Per token,
        for lengths 10 and 40: 0.1 * (band / 20 + band / 80).
        """
        return band * (self["slope_chosen"] + self["slope_rejected"]) / 2

    @property
    def length_difference(self) -> FloatArray:
        return self["tokens_chosen"] - self["tokens_rejected"]


class PairLedger:
    """Collects the numbers of every pair, on the device."""

    def __init__(self) -> None:
        self._packs: list[Pack] = []
        self._names: tuple[str, ...] = ()
        self._numbers: list[Tensor] = []  # [columns, pairs] each
        self._sft: list[Tensor] = []
        self._sent: _Sent | None = None

    def add(self, outcome: PackOutcome) -> None:
        columns = pair_columns(outcome)
        self._packs.append(outcome.pack)
        self._names = tuple(columns)
        self._numbers.append(torch.stack([column.detach().double() for column in columns.values()]))
        self._sft.append(outcome.loss.sft.detach().double())

    def is_finite(self) -> Tensor:
        """Whether every loss is, as a number on the device."""
        row = self._names.index("loss")
        return torch.isfinite(torch.cat([*(numbers[row] for numbers in self._numbers), *self._sft])).all()

    def send(self, *also: Tensor) -> None:
        """Start the one transfer to the host, of every number and of further ones. Does not wait.

        What is sent before the next step is given to the device can be read while that step runs.
        """
        numbers, sft = torch.cat(self._numbers, dim=1), torch.cat(self._sft)
        flat = torch.cat([numbers.flatten(), sft, *(number.double().reshape(1) for number in also)])
        self._sent = _Sent(to_host(flat), numbers.shape, len(sft))

    def read(self, ranks: Ranks) -> tuple[PairTable, list[float]]:
        """The pairs of all ranks, and the further numbers that were sent. Waits for the transfer."""
        if self._sent is None:
            raise RuntimeError("nothing was sent")
        numbers, sft, also = self._sent.parts()
        places = [np.concatenate(parts) for parts in zip(*(places_of_pairs(pack) for pack in self._packs), strict=True)]
        preference, winner, loser = places
        columns = dict(zip(self._names, numbers, strict=True))
        own = PairTable(sft=sft, preference=preference, winner=winner, loser=loser, columns=columns)
        return _joined(ranks.gather_parts(own)), also.tolist()


@dataclass(frozen=True, slots=True)
class _Sent:
    """Numbers that are being copied to the host."""

    flat: PendingHostCopy
    shape: torch.Size  # [columns, pairs]
    num_sft: int

    def parts(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        numbers, sft, also = np.split(self.flat.read(), np.cumsum([self.shape.numel(), self.num_sft]))
        return numbers.reshape(self.shape), sft, also


def places_of_pairs(pack: Pack) -> tuple[IntArray, IntArray, IntArray]:
    """Of every pair: the index of its preference in the set, and which of its completions are compared."""
    owner = pack.owner[pack.winners]
    first = np.searchsorted(pack.owner, owner)  # of the preference's completions
    return pack.preferences[owner], pack.winners - first, pack.losers - first


def _joined(tables: Sequence[PairTable]) -> PairTable:
    if len(tables) == 1:
        return tables[0]
    return PairTable(
        sft=np.concatenate([table.sft for table in tables]),
        preference=np.concatenate([table.preference for table in tables]),
        winner=np.concatenate([table.winner for table in tables]),
        loser=np.concatenate([table.loser for table in tables]),
        columns={name: np.concatenate([table[name] for table in tables]) for name in tables[0].columns},
    )


def check_pairs(table: PairTable, preferences: IntArray, store: Preferences) -> None:
    """DefectError unless the pairs that all ranks computed are those of these preferences, each exactly once.

    A preference that is in a batch twice (a set of weight 2) has each of its pairs twice.
    """
    wanted = np.bincount(preferences, minlength=len(store))  # how often each pair of each preference
    pairs, times = np.unique(np.stack([table.preference, table.winner, table.loser]), axis=1, return_counts=True)
    owner = pairs[0]
    excess = int(np.maximum(times - wanted[owner], 0).sum())
    num_wanted = int((wanted * store.num_pairs).sum())
    missing = num_wanted - (len(table) - excess)
    if excess == missing == 0 and len(table.sft) == len(preferences):
        return
    covered = np.bincount(owner, np.minimum(times, wanted[owner]), len(store))
    wrong = [*np.flatnonzero(covered < wanted * store.num_pairs), *owner[times > wanted[owner]]]
    first = f" The first is at {store.place(int(wrong[0]))}." if wrong else ""
    raise DefectError(
        f"of the {num_wanted} pairs of this batch {missing} were not computed, and {excess} were computed too often or do not "
        f"belong to it.{first} This is a defect of tandem, not of the data or the configuration; nothing of it was saved. Please "
        "report it with the run's config.yaml; the same command resumes from the newest checkpoint."
    )


def summarise(table: PairTable, dpo: Dpo, precision: str, store: Preferences) -> dict[str, float]:
    """All metrics of a step or a set. One that has no meaning for these pairs is left out."""
    band = TIE_BAND[precision]
    rounding = table.rounding(band)
    accuracy = _above(table.margin, rounding)
    preference, sft = table["loss"].mean(), table.sft.mean()
    metrics = {
        "loss": dpo.preference_loss_weight * preference + dpo.sft_loss_weight * sft,
        "preference_loss": preference,
        "sft_loss": sft,
        "accuracy": accuracy.mean(),
        "logps_accuracy": _above(table["logp_chosen"] - table["logp_rejected"], band).mean(),
        "rewards_chosen_mean": table["reward_chosen"].mean(),
        "rewards_rejected_mean": table["reward_rejected"].mean(),
        "rewards_margin_mean": table.margin.mean(),
        **_percentiles(table.margin),
        "logps_chosen_mean": table["logp_chosen"].mean(),
        "logps_rejected_mean": table["logp_rejected"].mean(),
        "tokens_chosen_mean": table["tokens_chosen"].mean(),
        "tokens_rejected_mean": table["tokens_rejected"].mean(),
        **_by_length(table, accuracy, rounding),
        **(_from_reference(table, band) if needs_reference(dpo.preference_loss) else {}),
        **_by_scores(table, rounding),
        **_means_where("accuracy/{}", accuracy, by_source(store, table.preference)),
    }
    return {name: float(value) for name, value in metrics.items()}


def _above(difference: FloatArray, band: FloatArray | float) -> FloatArray:
    """1 above zero, 0 below, one half within the band, which may be each pair's own."""
    return np.where(np.abs(difference) <= band, 0.5, (difference > 0).astype(np.float64))


def _percentiles(margin: FloatArray) -> dict[str, float]:
    values = np.percentile(margin, MARGIN_PERCENTILES)
    return {f"rewards_margin_p{p}": value for p, value in zip(MARGIN_PERCENTILES, values, strict=True)}


def _by_length(table: PairTable, accuracy: FloatArray, rounding: FloatArray) -> dict[str, float]:
    """Whether it is length that is learnt; nothing correlates while margins are rounding alone."""
    longer = table.length_difference
    metrics = _means_where("accuracy_chosen_{}", accuracy, {"longer": longer > 0, "shorter": longer < 0})
    # Two margins differ by more than rounding when their bands, half of them on either side, do not meet.
    differ = (table.margin - rounding / 2).max() > (table.margin + rounding / 2).min()
    if np.ptp(longer) > 0 and differ:
        metrics["margin_length_correlation"] = np.corrcoef(table.margin, longer)[0, 1]
    return metrics


def _from_reference(table: PairTable, band: float) -> dict[str, float]:
    """How far the policy has gone, and whether the chosen completions became less likely on the way."""
    drift, tokens = table["drift_chosen"] + table["drift_rejected"], table["tokens_chosen"] + table["tokens_rejected"]
    return {
        "kl_per_token": drift.sum() / tokens.sum(),
        "chosen_below_reference": (table["logp_chosen"] - table["reference_chosen"] < -band).mean(),
    }


def _by_scores(table: PairTable, rounding: FloatArray) -> dict[str, float]:
    """Whether the implicit reward orders pairs as the scores in the data do; pairs without two scores are left out."""
    given = np.isfinite(table["score_chosen"]) & np.isfinite(table["score_rejected"])
    difference = np.sign(table["score_chosen"] - table["score_rejected"])
    agreement = _above(table.margin * difference, rounding)
    return {
        **_means_where("scores_{}_mean", table["score_chosen"], {"chosen": given}),
        **_means_where("scores_{}_mean", table["score_rejected"], {"rejected": given}),
        **_means_where("scores_{}", agreement, {"agreement": given & (difference != 0)}),
    }


def _means_where(name: str, values: FloatArray, groups: dict[str, NDArray[np.bool_]]) -> dict[str, float]:
    """The mean of each group that has any pair."""
    return {name.format(group): values[members].mean() for group, members in groups.items() if members.any()}
