"""Collects the values of every pair from PackOutcomes into a PairTable on the host, and computes metrics from the table.

The values of a step or a set stay on the device until all of them are copied to the host in one transfer. Metrics are computed
on the host in float64, over all pairs at once, so they do not depend on how the pairs were packed.
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
from tandem.terminal.arguments import same_call
from tandem.terminal.printable import counted
from tandem.training.terms import PackOutcome

FloatArray = NDArray[np.float64]

# The difference of summed log-probabilities, in nats, that rounding alone can cause when the same batch is packed differently.
# Within this band a pair is a tie and counts one half. For rewards the band is scaled as the loss scales them
# (PairTable.rounding).
TIE_BAND = {"float32": 1e-3, "bfloat16": 0.1}
MARGIN_PERCENTILES = (10, 50, 90)


def pair_columns(outcome: PackOutcome) -> dict[str, Tensor]:
    """Return the values that metrics are computed from, as a dict from name to tensor [pairs]. Add new columns here."""
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
        # How much the reward changes per nat of the completion's log-probability.
        **_of_both("slope", loss.reward_slopes),
    }


def _of_both(name: str, values: ChosenRejected) -> dict[str, Tensor]:
    return {f"{name}_chosen": values.chosen, f"{name}_rejected": values.rejected}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTable:
    """The values of every pair of a step or of a set, in host memory."""

    sft: FloatArray  # [preferences]
    preference: IntArray  # [pairs] index of the pair's preference in its set
    winner: IntArray  # [pairs] which completion of the preference is chosen
    loser: IntArray  # [pairs] which completion of the preference is rejected
    columns: Mapping[str, FloatArray]  # [pairs] each, named as in `pair_columns`

    def __len__(self) -> int:
        return len(self.preference)

    def __getitem__(self, name: str) -> FloatArray:
        return self.columns[name]

    @property
    def margin(self) -> FloatArray:
        return self["reward_chosen"] - self["reward_rejected"]

    def rounding(self, band: float) -> FloatArray:
        """Return how much rounding can change each margin.

        `band`: how much rounding can change a difference of two summed log-probabilities. Half of it is for the chosen
        completion, half for the rejected one. Examples with beta 0.1: for summed log-probabilities, the result is 0.1 * band; for
        log-probabilities per token and lengths 10 and 40, it is 0.1 * (band / 20 + band / 80).
        """
        return band * (self["slope_chosen"] + self["slope_rejected"]) / 2

    @property
    def length_difference(self) -> FloatArray:
        return self["tokens_chosen"] - self["tokens_rejected"]


class PairLedger:
    """Collects the values of every pair on the device, and copies them to the host in one transfer."""

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
        """Return whether all losses are finite, as a tensor on the device."""
        row = self._names.index("loss")
        return torch.isfinite(torch.cat([*(numbers[row] for numbers in self._numbers), *self._sft])).all()

    def send(self, *also: Tensor) -> None:
        """Start copying all values, and the scalars in `also`, to the host. Does not wait for the copy.

        Call this before the next step is launched, so that the values can be read while the next step runs.
        """
        numbers, sft = torch.cat(self._numbers, dim=1), torch.cat(self._sft)
        flat = torch.cat([numbers.flatten(), sft, *(number.double().reshape(1) for number in also)])
        self._sent = _Sent(to_host(flat), numbers.shape, len(sft))

    def read(self, ranks: Ranks) -> tuple[PairTable, list[float]]:
        """Wait for the copy. Return the pairs of all ranks, and the scalars that this rank passed to `send`."""
        if self._sent is None:
            raise RuntimeError("PairLedger.read was called before PairLedger.send")
        numbers, sft, also = self._sent.parts()
        places = [np.concatenate(parts) for parts in zip(*(places_of_pairs(pack) for pack in self._packs), strict=True)]
        preference, winner, loser = places
        columns = dict(zip(self._names, numbers, strict=True))
        own = PairTable(sft=sft, preference=preference, winner=winner, loser=loser, columns=columns)
        return _joined(ranks.gather_parts(own)), also.tolist()


@dataclass(frozen=True, slots=True)
class _Sent:
    """Values whose copy to the host has started."""

    flat: PendingHostCopy
    shape: torch.Size  # [columns, pairs]
    num_sft: int

    def parts(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        numbers, sft, also = np.split(self.flat.read(), np.cumsum([self.shape.numel(), self.num_sft]))
        return numbers.reshape(self.shape), sft, also


def places_of_pairs(pack: Pack) -> tuple[IntArray, IntArray, IntArray]:
    """Return three arrays with one entry per pair: preference, chosen completion, rejected completion.

    The preference is an index in the set. The completions are indices in the preference.
    """
    owner = pack.owner[pack.winners]
    first = np.searchsorted(pack.owner, owner)  # the first completion of the preference
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
    """Raise DefectError unless the ranks together computed every pair of these preferences exactly once.

    If a preference is in the batch twice, because its set has weight 2, each of its pairs must be computed twice.
    """
    wanted = np.bincount(preferences, minlength=len(store))  # how often each pair of a preference must be computed
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
        f"of the {counted(num_wanted, 'pair')} of this batch, {missing} were not computed, and {excess} were computed too often "
        f"or are not in the batch.{first} This is a bug in tandem, not an error in the data or the configuration. Nothing was "
        f"saved. Please report it with the run's config.yaml. {same_call().capitalize()} resumes from the newest checkpoint."
    )


def summarise(table: PairTable, dpo: Dpo, precision: str, store: Preferences) -> dict[str, float]:
    """Return all metrics of a step or a set. Metrics that are undefined for these pairs are left out."""
    band = TIE_BAND[precision]
    rounding = table.rounding(band)
    accuracy = above(table.margin, rounding)
    preference, sft = table["loss"].mean(), table.sft.mean()
    metrics = {
        "loss": dpo.preference_loss_weight * preference + dpo.sft_loss_weight * sft,
        "preference_loss": preference,
        "sft_loss": sft,
        "accuracy": accuracy.mean(),
        "accuracy_strict": (table.margin > 0).mean(),
        "logps_accuracy": above(table["logp_chosen"] - table["logp_rejected"], band).mean(),
        "rewards_chosen_mean": table["reward_chosen"].mean(),
        "rewards_rejected_mean": table["reward_rejected"].mean(),
        "rewards_margin_mean": table.margin.mean(),
        **_percentiles(table.margin),
        "logps_chosen_mean": table["logp_chosen"].mean(),
        "logps_rejected_mean": table["logp_rejected"].mean(),
        "tokens_chosen_mean": table["tokens_chosen"].mean(),
        "tokens_rejected_mean": table["tokens_rejected"].mean(),
        **_length_metrics(table, accuracy, rounding),
        **(_reference_metrics(table, band) if needs_reference(dpo.preference_loss) else {}),
        **_score_metrics(table, rounding),
        **_means_where("accuracy/{}", accuracy, by_source(store, table.preference)),
    }
    return {name: float(value) for name, value in metrics.items()}


def above(difference: FloatArray, band: FloatArray | float) -> FloatArray:
    """Return 1 where the difference is above `band`, 0 where it is below -`band`, and 0.5 where it is in between."""
    return np.where(np.abs(difference) <= band, 0.5, (difference > 0).astype(np.float64))


def _percentiles(margin: FloatArray) -> dict[str, float]:
    values = np.percentile(margin, MARGIN_PERCENTILES)
    return {f"rewards_margin_p{p}": value for p, value in zip(MARGIN_PERCENTILES, values, strict=True)}


def _length_metrics(table: PairTable, accuracy: FloatArray, rounding: FloatArray) -> dict[str, float]:
    """Return metrics that show whether the policy prefers longer or shorter completions.

    The correlation of margin and length is left out if all margins are equal up to rounding, or all length differences are equal.
    """
    longer = table.length_difference
    metrics = _means_where("accuracy_chosen_{}", accuracy, {"longer": longer > 0, "shorter": longer < 0})
    # Two margins differ by more than rounding if their bands, each centred on its margin, do not overlap.
    differ = (table.margin - rounding / 2).max() > (table.margin + rounding / 2).min()
    if np.ptp(longer) > 0 and differ:
        metrics["margin_length_correlation"] = np.corrcoef(table.margin, longer)[0, 1]
    return metrics


def _reference_metrics(table: PairTable, band: float) -> dict[str, float]:
    """Return the distance between policy and reference, and metrics of the log-ratios, summed over the tokens of a completion.

    Also return the share of chosen completions that are less likely under the policy than under the reference.
    """
    chosen, rejected = (table[f"logp_{which}"] - table[f"reference_{which}"] for which in ("chosen", "rejected"))
    drift, tokens = table["drift_chosen"] + table["drift_rejected"], table["tokens_chosen"] + table["tokens_rejected"]
    return {
        "kl_per_token": drift.sum() / tokens.sum(),
        "chosen_below_reference": (chosen < -band).mean(),
        "logratios_chosen_mean": chosen.mean(),
        "logratios_rejected_mean": rejected.mean(),
        "logratios_accuracy": (chosen > rejected).mean(),
    }


def _score_metrics(table: PairTable, rounding: FloatArray) -> dict[str, float]:
    """Return the mean scores, and the share of pairs in which the same completion has the higher reward and the higher score.

    A pair is left out if one of its completions has no score.
    """
    given = np.isfinite(table["score_chosen"]) & np.isfinite(table["score_rejected"])
    difference = np.sign(table["score_chosen"] - table["score_rejected"])
    agreement = above(table.margin * difference, rounding)
    return {
        **_means_where("scores_{}_mean", table["score_chosen"], {"chosen": given}),
        **_means_where("scores_{}_mean", table["score_rejected"], {"rejected": given}),
        **_means_where("scores_{}", agreement, {"agreement": given & (difference != 0)}),
    }


def _means_where(name: str, values: FloatArray, groups: dict[str, NDArray[np.bool_]]) -> dict[str, float]:
    """Return the mean of `values` in each group, as a dict from metric name to mean. Empty groups are left out.

    `name`: the pattern of the metric names, such as "accuracy/{}". `groups`: a dict from group name to a mask of `values`.
    """
    return {name.format(group): values[members].mean() for group, members in groups.items() if members.any()}
