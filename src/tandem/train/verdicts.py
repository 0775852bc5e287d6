"""The lines of metrics.jsonl in; verdicts out: what a reader of the curves would say, with the numbers and a way out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from tandem.config.losses import LOSS_FACTS, PreferenceLoss, reads_shared, weights_of
from tandem.train.ranking import measured_on

Record = dict[str, Any]

PARTS = 4  # training is judged by the means of its quarters: a single step's pairs are too few
STANDARD_ERRORS = 2.0  # by which an accuracy must stand out from guessing
MOSTLY = 0.5  # share of pairs
NOTICEABLE = 0.005  # of a mean reward; less is noise
STRONG_CORRELATION = 0.5
FEWEST_PAIRS = 20  # for a correlation
FAR = 1.0  # nats a token from the reference
FAST = 1.5  # times as far as half-way
LONG_AGO = 0.6  # of the steps
WORSE = 1.02  # times the lowest loss


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding about one set."""

    name: str
    split: str
    text: str


def judge(records: Sequence[Record], loss: PreferenceLoss) -> list[Verdict]:
    """Verdicts on every validation set, or on the training set where none was measured after training began."""
    splits: dict[str, list[Record]] = {}
    for record in records:
        splits.setdefault(record["split"], []).append(record)
    training = splits.get("train", [])
    courses = {
        split: _of_last_pairs(course)
        for split, course in splits.items()
        if split.startswith("validation-") and course[-1]["step"] > 0
    }
    if not courses and training:
        courses = {"train": _parts(training)}
    return [verdict for split, course in courses.items() for verdict in _judge(split, course, loss)]


def _of_last_pairs(course: Sequence[Record]) -> list[Record]:
    """What was measured on the pairs that were measured last: a set may have become another when the run went on."""
    return [record for record in course if measured_on(record) == measured_on(course[-1])]


def _judge(split: str, course: Sequence[Record], loss: PreferenceLoss) -> Iterator[Verdict]:
    found = [Verdict(name, split, text) for name, rule in RULES.items() if (text := rule(course, loss)) is not None]
    yield from found or [Verdict("sound", split, _sound(course))]


def _parts(records: Sequence[Record]) -> list[Record]:
    """The means over each quarter of the steps, every pair weighing the same."""
    size = -(-len(records) // PARTS)
    return [_mean(records[start : start + size]) for start in range(0, len(records), size)]


def _mean(records: Sequence[Record]) -> Record:
    """What all records have, averaged."""
    pairs = sum(record["num_pairs"] for record in records)
    shared = [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)]
    means = {name: sum(r[name] * r["num_pairs"] for r in records) / pairs for name in shared}
    return {**means, "step": records[-1]["step"], "num_pairs": pairs}


def _guess_and_error(course: Sequence[Record]) -> tuple[float, float] | None:
    """The accuracy of having learnt nothing, and by how much another must differ to stand out from it."""
    # With a reference, policy and reference agree at first and every pair is a tie.
    guess = 0.5 if "kl_per_token" in course[-1] else course[0]["accuracy"]
    if len(course) == 1 and guess != 0.5:
        return None
    # a hair less, so that rounding does not call 0.6 - 0.5 less than 0.1
    return guess, STANDARD_ERRORS * sqrt(0.25 / course[-1]["num_pairs"]) - 1e-9


def _accuracy_flat(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    last = course[-1]
    if (known := _guess_and_error(course)) is None or abs(last["accuracy"] - known[0]) >= known[1]:
        return None
    guess, error = known
    if guess + error > 1:
        pairs = f"{last['num_pairs']:,} pair{'s' if last['num_pairs'] > 1 else ''}"
        return f"accuracy cannot be told from {guess:.3f} by {pairs}: it is {last['accuracy']:.3f}. Validate on more of them."
    far = last.get("kl_per_token", 0.0)
    way_out = (
        f"The policy moved all the same, {far:.2f} nats a token from the reference: try a smaller policy.optimizer.kwargs.lr."
        if far > FAR
        else "Train longer or with a greater policy.optimizer.kwargs.lr; if it stays, read the pairs that --per-pair FILE writes."
    )
    return (
        f"accuracy is flat: {last['accuracy']:.3f} over {last['num_pairs']:,} pairs, where {guess + error:.3f} would stand out "
        f"from {guess:.3f}. {way_out}"
    )


def _accuracy_reversed(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    last = course[-1]
    if (known := _guess_and_error(course)) is None or last["accuracy"] > known[0] - known[1]:
        return None
    return (
        f"accuracy is worse than at the start: {last['accuracy']:.3f} over {last['num_pairs']:,} pairs, where knowing nothing "
        f"gives {known[0]:.3f}. Are chosen and rejected exchanged (of ranks the lower is better, of scores the higher)? Does "
        "validation rank as training does? If so, try a smaller policy.optimizer.kwargs.lr or dpo.preference_loss=dpo."
    )


def _chosen_falling(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    first, last = course[0], course[-1]
    if any(LOSS_FACTS[name].lowers_chosen for name in weights_of(loss)):
        return None
    if "chosen_below_reference" in last:
        if last["chosen_below_reference"] <= MOSTLY or last["rewards_chosen_mean"] >= -NOTICEABLE:
            return None
        fall = (
            f"{last['chosen_below_reference']:.0%} of them are less likely than under the reference "
            f"(mean reward {last['rewards_chosen_mean']:.3g})"
        )
        held = "a smaller learning rate or a greater dpo.reference_policy_kl_penalty hold them"
    elif first["step"] > 0 or last["logps_chosen_mean"] >= first["logps_chosen_mean"]:
        return None
    else:
        fall = f"mean log-probability {first['logps_chosen_mean']:.1f} at first, {last['logps_chosen_mean']:.1f} now"
        held = "or a smaller learning rate hold them"
    return (
        f"the chosen completions are falling: {fall}. The probability goes to text that is in no pair. "
        f"dpo.sft_loss_weight, {held}."
    )


def _length_learnt(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    last = course[-1]
    correlation = last.get("margin_length_correlation", 0.0)
    if abs(correlation) < STRONG_CORRELATION or last["num_pairs"] < FEWEST_PAIRS:
        return None
    longer, shorter = (last.get(f"accuracy_chosen_{which}") for which in ("longer", "shorter"))
    accuracies = (
        f"; accuracy is {longer:.2f} where the chosen completion is the longer one, {shorter:.2f} where it is the shorter"
        if longer is not None and shorter is not None
        else ""
    )
    ways = [
        *(["dpo.ld_alpha"] if reads_shared(loss, "ld_alpha") else []),
        *(["dpo.preference_average_log_probs=true"] if reads_shared(loss, "preference_average_log_probs") else []),
        "a loss per token (sigmoid_norm, simpo)",
    ]
    return (
        f"the margin goes by length: its correlation with chosen minus rejected tokens is {correlation:.2f}{accuracies}. "
        f"To weigh length less: {', or '.join(ways)}; or pairs of more equal lengths."
    )


def _kl_running_away(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    half = next(record for record in course if record["step"] >= course[-1]["step"] / 2)
    now, then = course[-1].get("kl_per_token", 0.0), half.get("kl_per_token", 0.0)
    if now <= FAR or now < FAST * then:
        return None
    return (
        f"the policy is running away from the reference: {now:.2f} nats a token now, {then:.2f} at step {half['step']}. "
        "A smaller learning rate, fewer steps or a greater dpo.reference_policy_kl_penalty keep it closer."
    )


def _best_long_ago(course: Sequence[Record], loss: PreferenceLoss) -> str | None:
    last, later = course[-1], [record for record in course if record["step"] > 0]
    best = min(later, key=lambda record: record["loss"])
    if best["step"] > LONG_AGO * last["step"] or last["loss"] < WORSE * best["loss"]:
        return None
    return (
        f"the best was long ago: the loss was {best['loss']:.4f} at step {best['step']} and is {last['loss']:.4f} at step "
        f"{last['step']}. Fewer steps would have done."
    )


def _sound(course: Sequence[Record]) -> str:
    first, last = course[0], course[-1]
    if first is last:
        return f"nothing stands out: accuracy {last['accuracy']:.2f}, margin {last['rewards_margin_mean']:.3f}."
    return (
        f"nothing stands out: accuracy {first['accuracy']:.2f} -> {last['accuracy']:.2f}, margin "
        f"{first['rewards_margin_mean']:.3f} -> {last['rewards_margin_mean']:.3f}."
    )


RULES: dict[str, Callable[[Sequence[Record], PreferenceLoss], str | None]] = {
    "accuracy_flat": _accuracy_flat,
    "accuracy_reversed": _accuracy_reversed,
    "chosen_falling": _chosen_falling,
    "length_learnt": _length_learnt,
    "kl_running_away": _kl_running_away,
    "best_long_ago": _best_long_ago,
}
