"""The lines of metrics.jsonl in; verdicts out: what a reader of the curves would say, with the numbers and a way out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from tandem.config.losses import is_dpo, lowers_chosen, needs_scores, supports
from tandem.config.schema import Config
from tandem.train.checkpoint.ranking import Record, measured_on

PARTS = 4  # training is judged by the means of its quarters: a single step's pairs are too few
STANDARD_ERRORS = 2.0  # by which an accuracy must stand out from guessing
MOSTLY = 0.5  # share of pairs
NOTICEABLE = 0.005  # of a mean reward of sums, and divided by the length of one per token; less is noise
STRONG_CORRELATION = 0.5
FEWEST_PAIRS = 20  # for a correlation
FAR = 1.0  # nats a token from the reference
FAST = 1.5  # times as far as half-way
LONG_AGO = 0.6  # of the steps
WORSE = 0.02  # of the lowest loss, by which a loss is above it
LEAST_WORSE = 1e-3  # of a loss close to 0
ABSURD_MARGIN = 1000.0  # reward: every loss that saturates does so below 100
ABSURD_NATS = 25.0  # a token of the chosen completions: guessing among 262,144 tokens costs 12.5

# What verdicts read of every line.
JUDGED = (
    *("num_pairs", "loss", "accuracy", "rewards_margin_mean", "rewards_chosen_mean"),
    *("logps_chosen_mean", "tokens_chosen_mean"),
)
SMALLER_RATE = "try a smaller policy.optimizer.kwargs.lr"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding about one set."""

    name: str
    split: str
    text: str


@dataclass(frozen=True, slots=True)
class Course:
    """What was measured on one set in the course of a run, and what the verdicts on it depend on."""

    split: str
    records: Sequence[Record]  # of the same pairs, in order
    training: Sequence[Record]  # the training steps, one by one
    config: Config

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def last(self) -> Record:
        return self.records[-1]

    @property
    def start(self) -> Record | None:
        """Before the first step, if that was measured."""
        return self.first if self.first["step"] == 0 and len(self.records) > 1 else None

    @property
    def starts_at_reference(self) -> bool:
        """Whether policy and reference agree before the first step, so that every pair is a tie."""
        return "kl_per_token" in self.last and self.config.reference.model is None


def judge(records: Sequence[Record], config: Config) -> list[Verdict]:
    """Verdicts on every validation set, or on the training set where none was measured after training began."""
    splits: dict[str, list[Record]] = {}
    for record in filter(_is_complete, records):
        splits.setdefault(record["split"], []).append(record)
    training = splits.get("train", [])
    measured = {
        split: _of_last_pairs(lines)
        for split, lines in splits.items()
        if split.startswith("validation-") and lines[-1]["step"] > 0
    }
    if not measured and training:
        measured = {"train": _parts(training)}
    courses = [Course(split, lines, training, config) for split, lines in measured.items()]
    return [verdict for course in courses for verdict in _judge(course)]


def _is_complete(record: Record) -> bool:
    """Whether a line has what every verdict reads. One that was damaged since it was written may not."""
    has_all = all(isinstance(record.get(name), int | float) for name in JUDGED)
    is_trained = record["split"] != "train" or record["step"] > 0
    return has_all and is_trained and record["num_pairs"] > 0 and record["tokens_chosen_mean"] > 0


def _of_last_pairs(lines: Sequence[Record]) -> list[Record]:
    """What was measured on the pairs that were measured last: a set may have become another when the run was resumed."""
    return [record for record in lines if measured_on(record) == measured_on(lines[-1])]


def _judge(course: Course) -> Iterator[Verdict]:
    if (text := _diverged(course)) is not None:
        # What else the curves of such a run show has this one cause.
        yield Verdict("diverged", course.split, text)
        return
    found = [Verdict(name, course.split, text) for name, rule in RULES.items() if (text := rule(course)) is not None]
    yield from found or [Verdict("sound", course.split, _sound(course))]


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


def _diverged(course: Course) -> str | None:
    last, dpo = course.last, course.config.dpo
    # The first step is measured before its update.
    before = course.start or (course.training[0] if course.training else course.first)
    nats = _chosen_nats(last)
    margin = last.get("rewards_margin_p50", last["rewards_margin_mean"])
    # Exponential rewards, and targets given in the data, may be of any size.
    bounded = dpo.f_divergence in ("reverse_kl", "js") and not needs_scores(dpo.preference_loss)
    signs = []
    if not isfinite(last["loss"]):
        signs.append(f"the loss is {last['loss']}")
    if bounded and abs(margin) > ABSURD_MARGIN:
        signs.append(f"half of the margins are {'above' if margin > 0 else 'below'} {margin:.3g}")
    if nats > max(ABSURD_NATS, 2 * _chosen_nats(before)):
        signs.append(f"the chosen completions cost {nats:.3g} nats a token, where guessing costs less than 13")
    step = course.training[-1] if course.training else {}
    if step.get("grad_norm") == 0 and step["accuracy"] < 1:
        signs.append(f"the gradient of the last step is 0, with an accuracy of {step['accuracy']:.3f} on its pairs")
    if not signs:
        return None
    rate = course.config.policy.optimizer.kwargs.lr
    return f"training diverged: {'; '.join(signs)}. The model of step {last['step']} is unusable: {SMALLER_RATE} (now {rate:g})."


def _chosen_nats(record: Record) -> float:
    """Of a token of the chosen completions."""
    return -record["logps_chosen_mean"] / record["tokens_chosen_mean"]


def _guess_and_error(course: Course) -> tuple[float, float] | None:
    """The accuracy of having learnt nothing, and by how much another must differ to stand out from it."""
    if not course.starts_at_reference and len(course.records) == 1:
        return None
    guess = 0.5 if course.starts_at_reference else course.first["accuracy"]
    # a hair less, so that rounding does not call 0.6 - 0.5 less than 0.1
    return guess, STANDARD_ERRORS * sqrt(0.25 / course.last["num_pairs"]) - 1e-9


def _accuracy_flat(course: Course) -> str | None:
    last = course.last
    if (known := _guess_and_error(course)) is None or abs(last["accuracy"] - known[0]) >= known[1]:
        return None
    guess, error = known
    if guess + error > 1:
        pairs = f"{last['num_pairs']:,} pair{'s' if last['num_pairs'] > 1 else ''}"
        return f"accuracy cannot be told from {guess:.3f} by {pairs}: it is {last['accuracy']:.3f}. Validate on more of them."
    far = last.get("kl_per_token", 0.0) if course.starts_at_reference else 0.0
    if far > FAR:
        way_out = f"The policy moved all the same, {far:.2f} nats a token from the reference: {SMALLER_RATE}."
    else:
        has_risen = _is_above(last["loss"], min(record["loss"] for record in course.records))
        longer = "Train longer or with a greater policy.optimizer.kwargs.lr"
        what = f"The loss has risen: {SMALLER_RATE}" if has_risen else longer
        way_out = f"{what}; if it stays, read the pairs that --per-pair FILE writes."
    return (
        f"accuracy is flat: {last['accuracy']:.3f} over {last['num_pairs']:,} pairs, where {guess + error:.3f} would stand out "
        f"from {guess:.3f}. {way_out}"
    )


def _accuracy_reversed(course: Course) -> str | None:
    last = course.last
    if (known := _guess_and_error(course)) is None or last["accuracy"] > known[0] - known[1]:
        return None
    guess = known[0]
    nothing = f"knowing nothing gives {guess:.3f}" if course.starts_at_reference else f"it began at {guess:.3f}"
    other_loss = "" if is_dpo(course.config.dpo.preference_loss) else " or dpo.preference_loss=dpo"
    return (
        f"accuracy is worse than at the start: {last['accuracy']:.3f} over {last['num_pairs']:,} pairs, where {nothing}. "
        f"{_of_labels(course, guess)}{SMALLER_RATE}{other_loss}."
    )


def _of_labels(course: Course, guess: float) -> str:
    """Whether the labels of the set may be exchanged: not where the pairs it was trained on are ordered no better."""
    if course.split == "train":
        return "These are the pairs it was trained on, so exchanged labels are not the cause: "
    trained = _parts(course.training)[-1]["accuracy"] if course.training else None
    if trained is not None and trained <= guess:
        return f"On the training pairs it is {trained:.3f}, so exchanged labels are not the cause: "
    return (
        "Are chosen and rejected exchanged (of ranks the lower is better, of scores the higher)? Does validation rank as "
        "training does? If so, "
    )


def _chosen_falling(course: Course) -> str | None:
    first, last, dpo = course.first, course.last, course.config.dpo
    if lowers_chosen(dpo.preference_loss):
        return None
    if "chosen_below_reference" in last:
        noticeable = NOTICEABLE / (last["tokens_chosen_mean"] if dpo.per_token else 1.0)
        before = 0.0 if course.start is None or course.starts_at_reference else course.start["rewards_chosen_mean"]
        if last["chosen_below_reference"] <= MOSTLY or last["rewards_chosen_mean"] >= before - noticeable:
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
    weight = dpo.sft_loss_weight
    sft = f"A dpo.sft_loss_weight above {weight:g}" if weight else "dpo.sft_loss_weight"
    return (
        f"the chosen completions are falling: {fall}. The probability goes to text that is in no pair. {sft}, {held}."
    )


def _length_learnt(course: Course) -> str | None:
    last, dpo = course.last, course.config.dpo
    correlation = last.get("margin_length_correlation", 0.0)
    if abs(correlation) < STRONG_CORRELATION or last["num_pairs"] < FEWEST_PAIRS:
        return None
    longer, shorter = (last.get(f"accuracy_chosen_{which}") for which in ("longer", "shorter"))
    accuracies = (
        f"; accuracy is {longer:.2f} where the chosen completion is the longer one, {shorter:.2f} where it is the shorter"
        if longer is not None and shorter is not None
        else ""
    )
    ways = []
    if supports(dpo.preference_loss, "ld_alpha") and dpo.ld_alpha != 0:
        ways.append("dpo.ld_alpha" if dpo.ld_alpha is None else f"a dpo.ld_alpha below {dpo.ld_alpha:g}")
    if not dpo.per_token:
        if supports(dpo.preference_loss, "preference_average_log_probs"):
            ways.append("dpo.preference_average_log_probs=true")
        ways.append("a loss per token (sigmoid_norm, simpo)")
    return (
        f"the margin goes by length: its correlation with chosen minus rejected tokens is {correlation:.2f}{accuracies}. "
        f"To weigh length less: {', or '.join(ways)}{'; or ' if ways else ''}pairs of more equal lengths."
    )


def _kl_running_away(course: Course) -> str | None:
    half = next(record for record in course.records if record["step"] >= course.last["step"] / 2)
    now, then = course.last.get("kl_per_token", 0.0), half.get("kl_per_token", 0.0)
    if now <= FAR or now < FAST * then:
        return None
    return (
        f"the policy is running away from the reference: {now:.2f} nats a token now, {then:.2f} at step {half['step']}. "
        "A smaller learning rate, fewer steps or a greater dpo.reference_policy_kl_penalty keep it closer."
    )


def _is_above(loss: float, lowest: float) -> bool:
    """By more than noise; a loss may be 0, or below it."""
    return loss - lowest >= max(WORSE * abs(lowest), LEAST_WORSE)


def _best(course: Course) -> Record:
    """The lowest loss of weights that were trained."""
    return min((record for record in course.records if record["step"] > 0), key=lambda record: record["loss"])


def _only_hurt(course: Course) -> str | None:
    start, last, best = course.start, course.last, _best(course)
    if start is None or best["loss"] < start["loss"] or not _is_above(last["loss"], start["loss"]):
        return None
    between = "" if best is last else f", {best['loss']:.4f} at best since (step {best['step']}),"
    return (
        f"training only hurt: the loss was {start['loss']:.4f} before the first step{between} and is {last['loss']:.4f} at step "
        f"{last['step']}. {SMALLER_RATE.capitalize()}; if it stays, does this set rank as the training set does?"
    )


def _best_long_ago(course: Course) -> str | None:
    start, last, best = course.start, course.last, _best(course)
    if start is not None and start["loss"] <= best["loss"]:
        return None  # nothing that was learnt was lost
    if best["step"] > LONG_AGO * last["step"] or not _is_above(last["loss"], best["loss"]):
        return None
    return (
        f"the best was long ago: the loss was {best['loss']:.4f} at step {best['step']} and is {last['loss']:.4f} at step "
        f"{last['step']}. Fewer steps would have done."
    )


def _sound(course: Course) -> str:
    first, last = course.first, course.last
    if first is last:
        return f"nothing stands out: accuracy {last['accuracy']:.2f}, margin {last['rewards_margin_mean']:.3f}."
    return (
        f"nothing stands out: accuracy {first['accuracy']:.2f} -> {last['accuracy']:.2f}, margin "
        f"{first['rewards_margin_mean']:.3f} -> {last['rewards_margin_mean']:.3f}."
    )


RULES: dict[str, Callable[[Course], str | None]] = {
    "accuracy_flat": _accuracy_flat,
    "accuracy_reversed": _accuracy_reversed,
    "chosen_falling": _chosen_falling,
    "length_learnt": _length_learnt,
    "kl_running_away": _kl_running_away,
    "only_hurt": _only_hurt,
    "best_long_ago": _best_long_ago,
}
