"""Judges a run by the records of metrics.jsonl.

Each verdict describes a problem, with numbers and advice, or says that no problem was found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, hypot, isfinite, sqrt

from tandem.config.losses import is_dpo, lowers_chosen, needs_scores, supports
from tandem.config.schema import Config
from tandem.report.history import LOSS_ERROR, History, is_complete, on_last_pairs, quarter_means
from tandem.terminal.printable import counted
from tandem.training.checkpoint.ranking import Record

STANDARD_ERRORS = 2.0  # an accuracy that differs from the start by this many is significant
ENOUGH_PAIRS = 100  # a verdict on the accuracy of fewer also says that they are few
MOST_PAIRS = 0.5  # share of pairs
# Change of a mean reward that is not noise, for summed log-probabilities; divided by the length for rewards per token.
NOTICEABLE_REWARD = 0.005
STRONG_CORRELATION = 0.5
FEWEST_PAIRS = 20  # with fewer, a correlation is not judged
FAR_NATS = 1.0  # per token: a policy this far from the reference is far away
FAST_GROWTH = 1.5  # ratio of the distance at the end to the distance half-way
EARLY_SHARE = 0.6  # of the steps: a best loss before this was long ago
WORSE_SHARE = 0.02  # a loss is worse if it exceeds the lowest loss by this share
LEAST_WORSE = 1e-3  # and by at least this much, for losses close to 0
FEWEST_STEPS = 20  # with fewer, the quarters of training are too short to compare, and a result says little
WARM_SHARE = 0.5  # of policy.optimizer.kwargs.lr: a schedule that never gets there has not left its warm-up
MUCH_OVERLAP = 0.1  # share of the prompts of a validation set that are also in the training set
ABSURD_MARGIN = 1000.0  # of rewards: losses that saturate do so below 100
ABSURD_NATS = 25.0  # per token of the chosen completions: guessing among 262,144 tokens costs 12.5

SMALLER_RATE = "try a smaller policy.optimizer.kwargs.lr"
TOO_FEW_PAIRS = "too few pairs to judge accuracy"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding about one training or validation set."""

    name: str
    split: str
    text: str


def judge(
    records: Sequence[Record],
    config: Config,
    overlaps: Mapping[str, float] | None = None,
    *,
    has_ended: bool = True,
) -> list[Verdict]:
    """Return verdicts on every validation set.

    If no validation set was measured during training, return verdicts on the training set. `overlaps`: for each validation set,
    the share of its prompts that are also in the training set, where it is known. `has_ended`: whether the run has no steps left;
    of a run that has, it is not reported that it trained too little.
    """
    splits: dict[str, list[Record]] = {}
    for record in filter(is_complete, records):
        splits.setdefault(record["split"], []).append(record)
    training = splits.get("train", [])
    measured = {
        split: on_last_pairs(lines)
        for split, lines in splits.items()
        if split.startswith("validation-") and lines[-1]["step"] > 0
    }
    if not measured and training:
        measured = {"train": quarter_means(training)}
    shares = overlaps or {}
    histories = [
        History(split, lines, training, config, has_ended=has_ended, overlap=shares.get(split, 0.0))
        for split, lines in measured.items()
    ]
    return [verdict for history in histories for verdict in _judge(history)]


def _judge(history: History) -> Iterator[Verdict]:
    if (text := _diverged(history)) is not None:
        # Other problems of such a run have the same cause.
        yield Verdict("diverged", history.split, text)
        return
    if (text := _untrained(history)) is not None:
        yield Verdict("hardly_trained", history.split, text)
        return
    found = [Verdict(name, history.split, text) for name, rule in RULES.items() if (text := rule(history)) is not None]
    # Other verdicts say what to change about a loss that hardly moved, except the one on too few pairs.
    only_few = all(verdict.text.startswith(TOO_FEW_PAIRS) for verdict in found)
    if history.has_ended and only_few and (text := _hardly_moved(history)):
        found.append(Verdict("hardly_trained", history.split, text))
    yield from found or [Verdict("sound", history.split, _sound(history))]


def _diverged(history: History) -> str | None:
    last, dpo = history.last, history.config.dpo
    # The first step is measured before its update.
    before = history.start or (history.training[0] if history.training else history.first)
    nats = _chosen_nats(last)
    margin = last.get("rewards_margin_p50", last["rewards_margin_mean"])
    # Exponential rewards, and targets from scores in the data, can have any size.
    bounded = dpo.f_divergence in ("reverse_kl", "js") and not needs_scores(dpo.preference_loss)
    signs = []
    if not isfinite(last["loss"]):
        signs.append(f"the loss is {last['loss']}")
    if bounded and abs(margin) > ABSURD_MARGIN:
        signs.append(f"half of the margins are {'above' if margin > 0 else 'below'} {margin:.3g}")
    if nats > max(ABSURD_NATS, 2 * _chosen_nats(before)):
        signs.append(f"the chosen completions cost {nats:.3g} nats per token, while guessing costs less than 13")
    step = history.training[-1] if history.training else {}
    if step.get("grad_norm") == 0 and step["accuracy"] < 1:
        signs.append(f"the gradient of the last step is 0, although its accuracy is only {step['accuracy']:.3f}")
    if not signs:
        return None
    rate = history.config.policy.optimizer.kwargs.lr
    return f"training diverged: {'; '.join(signs)}. The model at step {last['step']} is unusable: {SMALLER_RATE} (now {rate:g})."


def _chosen_nats(record: Record) -> float:
    """Return the mean negative log-probability per token of the chosen completions."""
    return -record["logps_chosen_mean"] / record["tokens_chosen_mean"]


def _start_and_threshold(history: History) -> tuple[float, float] | None:
    """Return the accuracy before training, and the smallest significant difference from it.

    Return None if the accuracy before training is unknown.
    """
    if not history.starts_at_reference and len(history.records) == 1:
        return None
    guess = 0.5 if history.starts_at_reference else history.first["accuracy"]
    # with a tolerance, so that rounding does not make 0.6 - 0.5 less than 0.1
    return guess, STANDARD_ERRORS * sqrt(0.25 / history.last["num_pairs"]) - 1e-9


def _accuracy_flat(history: History) -> str | None:
    last = history.last
    if (known := _start_and_threshold(history)) is None or _accuracy_changed(history):
        return None
    guess, num_pairs = known[0], last["num_pairs"]
    enough = sum(known)
    flat = f"{last['accuracy']:.3f} on {counted(num_pairs, 'pair')} is not significantly different from {guess:.3f}"
    if enough > 1:
        return f"{TOO_FEW_PAIRS}: {flat}. Validate on more pairs."
    far = last.get("kl_per_token", 0.0) if history.starts_at_reference else 0.0
    if far > FAR_NATS:
        advice = f"The policy still moved {far:.2f} nats per token away from the reference: {SMALLER_RATE}."
    else:
        lowest = min(history.records, key=lambda record: record["loss"])
        longer = "Train longer or with a larger policy.optimizer.kwargs.lr"
        what = f"The loss has risen: {SMALLER_RATE}" if _has_risen(history, lowest) else longer
        advice = f"{what}; if that does not help, read the pairs that {history.writes_pairs} lists first."
    needed = f"{enough:.3f}"
    if num_pairs < ENOUGH_PAIRS:  # their share of all pairs has few values
        needed = f"{ceil(enough * num_pairs)} of {num_pairs}"
        advice = f"With so few pairs, only large changes can be told from chance: validate on {ENOUGH_PAIRS} or more. {advice}"
    return f"accuracy is flat: {flat} ({needed} would be). {advice}"


def _accuracy_reversed(history: History) -> str | None:
    last = history.last
    if (known := _start_and_threshold(history)) is None or last["accuracy"] > known[0] - known[1]:
        return None
    guess = known[0]
    other_loss = "" if is_dpo(history.config.dpo.preference_loss) else " or dpo.preference_loss=dpo"
    return (
        f"accuracy is worse than at the start: {last['accuracy']:.3f} on {counted(last['num_pairs'], 'pair')}, compared with "
        f"{guess:.3f} before training. {_label_hint(history, guess)}{SMALLER_RATE}{other_loss}."
    )


def _label_hint(history: History, guess: float) -> str:
    """Return text that says whether swapped labels may be the cause of low accuracy. Advice on other causes follows the text."""
    if history.split == "train":
        return "These are the training pairs, so swapped labels are not the cause: "
    trained = quarter_means(history.training)[-1]["accuracy"] if history.training else None
    if trained is not None and trained <= guess:
        return f"On the training pairs it is {trained:.3f}, so swapped labels are not the cause: "
    return (
        "Check that chosen and rejected are not swapped (lower ranks and higher scores are better), and that the validation "
        "set ranks like the training set. Otherwise "
    )


def _chosen_falling(history: History) -> str | None:
    first, last, dpo = history.first, history.last, history.config.dpo
    if lowers_chosen(dpo.preference_loss):
        return None
    if "chosen_below_reference" in last:
        noticeable = NOTICEABLE_REWARD / (last["tokens_chosen_mean"] if dpo.per_token else 1.0)
        before = 0.0 if history.start is None or history.starts_at_reference else history.start["rewards_chosen_mean"]
        if last["chosen_below_reference"] <= MOST_PAIRS or last["rewards_chosen_mean"] >= before - noticeable:
            return None
        fall = (
            f"{last['chosen_below_reference']:.0%} of them are less likely than under the reference "
            f"(mean reward {last['rewards_chosen_mean']:.3g})"
        )
        ways = ", lower the learning rate, or raise dpo.reference_policy_kl_penalty"
    elif first["step"] > 0 or last["logps_chosen_mean"] >= first["logps_chosen_mean"]:
        return None
    else:
        fall = f"their mean log-probability was {first['logps_chosen_mean']:.1f} and is {last['logps_chosen_mean']:.1f}"
        ways = ", or lower the learning rate"
    weight = dpo.sft_loss_weight
    sft = f"raise dpo.sft_loss_weight above {weight:g}" if weight else "set dpo.sft_loss_weight"
    return (
        f"the chosen completions become less likely: {fall}. Probability moves to text outside the pairs. To prevent this, "
        f"{sft}{ways}."
    )


def _length_learnt(history: History) -> str | None:
    last, dpo = history.last, history.config.dpo
    correlation = last.get("margin_length_correlation", 0.0)
    if abs(correlation) < STRONG_CORRELATION or last["num_pairs"] < FEWEST_PAIRS:
        return None
    longer, shorter = (last.get(f"accuracy_chosen_{which}") for which in ("longer", "shorter"))
    accuracies = (
        f"; accuracy is {longer:.2f} if the chosen completion is the longer one, {shorter:.2f} if it is the shorter one"
        if longer is not None and shorter is not None
        else ""
    )
    ways = []
    if supports(dpo.preference_loss, "ld_alpha") and dpo.ld_alpha != 0:
        ways.append("dpo.ld_alpha" if dpo.ld_alpha is None else f"a dpo.ld_alpha below {dpo.ld_alpha:g}")
    if not dpo.per_token:
        if supports(dpo.preference_loss, "preference_average_log_probs"):
            ways.append("dpo.preference_average_log_probs=true")
        ways.append("a per-token loss (sigmoid_norm, simpo)")
    return (
        f"the margin follows length: its correlation with chosen minus rejected tokens is {correlation:.2f}{accuracies}. "
        f"To reduce this, use {', or '.join([*ways, 'pairs of more similar lengths'])}."
    )


def _kl_running_away(history: History) -> str | None:
    half = next(record for record in history.records if record["step"] >= history.last["step"] / 2)
    now, then = history.last.get("kl_per_token", 0.0), half.get("kl_per_token", 0.0)
    if now <= FAR_NATS or now < FAST_GROWTH * then:
        return None
    return (
        f"the policy is moving away from the reference fast: {now:.2f} nats per token now, {then:.2f} at step {half['step']}. "
        "To keep it closer, lower the learning rate, train for fewer steps, or raise dpo.reference_policy_kl_penalty."
    )


def _is_above(loss: float, lowest: float) -> bool:
    """Return whether `loss` is above `lowest` by more than noise. Both may be 0 or negative."""
    return loss - lowest >= max(WORSE_SHARE * abs(lowest), LEAST_WORSE)


def _has_risen(history: History, lowest: Record) -> bool:
    """Return whether the last loss is above the loss of an earlier record by more than noise.

    A validation set is measured on the same pairs each time. The parts of training have different pairs, so there the rise must
    also exceed two standard errors, and a run of fewer than FEWEST_STEPS steps is not judged.
    """
    last = history.last
    if not _is_above(last["loss"], lowest["loss"]):
        return False
    if LOSS_ERROR not in last:
        return True
    error = hypot(last[LOSS_ERROR], lowest[LOSS_ERROR])
    return history.num_steps >= FEWEST_STEPS and last["loss"] - lowest["loss"] >= STANDARD_ERRORS * error


def _best(history: History) -> Record:
    """Return the record with the lowest loss, except the record from before the first step."""
    return min((record for record in history.records if record["step"] > 0), key=lambda record: record["loss"])


def _only_hurt(history: History) -> str | None:
    start, last, best = history.start, history.last, _best(history)
    if start is None or best["loss"] < start["loss"] or not _is_above(last["loss"], start["loss"]):
        return None
    between = "" if best is last else f", at best {best['loss']:.4f} after that (step {best['step']}),"
    return (
        f"training made the loss worse: it was {start['loss']:.4f} before the first step{between} and is {last['loss']:.4f} at "
        f"step {last['step']}. {SMALLER_RATE.capitalize()}; if that does not help, check that this set ranks like the "
        "training set."
    )


def _best_long_ago(history: History) -> str | None:
    start, last, best = history.start, history.last, _best(history)
    if start is not None and start["loss"] <= best["loss"]:
        return None  # training never improved the loss, so no improvement was lost
    if best["step"] > EARLY_SHARE * last["step"] or not _has_risen(history, best):
        return None
    return (
        f"the loss has been rising: it was lowest at step {best['step']} ({best['loss']:.4f}) and is {last['loss']:.4f} at step "
        f"{last['step']}. Train for fewer steps."
    )


def _rates(history: History) -> list[float]:
    """Return the learning rate of every step of which it is known."""
    return [record["lr"] for record in history.training if isinstance(record.get("lr"), int | float)]


def _untrained(history: History) -> str | None:
    if max(_rates(history), default=1.0) > 0 or not history.has_ended:
        return None
    return (
        f"nothing was trained: the learning rate was 0 in all of {_steps(history)}. Train for more steps (a schedule with "
        "warm-up starts at 0), or change policy.scheduler."
    )


def _hardly_trained(history: History) -> str | None:
    if not history.has_ended:
        return None
    if (warm_up := _warm_up(history)) and not _accuracy_changed(history):
        return f"hardly anything was trained: {warm_up}"
    if history.split == "train" and history.num_steps == 1:
        return (
            "the trained model was not measured: the only step is measured before its update. Train for more steps, and set "
            "data.validation_share."
        )
    return None


def _warm_up_only(history: History) -> str | None:
    if not history.has_ended or (warm_up := _warm_up(history)) is None or not _accuracy_changed(history):
        return None
    before, last = 0.5 if history.starts_at_reference else history.first["accuracy"], history.last
    return (
        f"accuracy {before:.2f} -> {last['accuracy']:.2f}, margin {last['rewards_margin_mean']:.3f}, although {warm_up}"
    )


def _accuracy_changed(history: History) -> bool:
    """Return whether the accuracy is known to differ significantly from that before training."""
    known = _start_and_threshold(history)
    return known is not None and abs(history.last["accuracy"] - known[0]) >= known[1]


def _warm_up(history: History) -> str | None:
    rate, rates = history.config.policy.optimizer.kwargs.lr, _rates(history)
    if not rates or max(rates) >= WARM_SHARE * rate:
        return None
    return (
        f"in {_steps(history)} the learning rate never left its warm-up ({max(rates):.3g} at most, of {rate:g}). Train for "
        "more steps (dpo.max_num_epochs, or a smaller batch), or shorten the warm-up (policy.scheduler)."
    )


def _steps(history: History) -> str:
    return counted(history.num_steps, "step")


def _hardly_moved(history: History) -> str | None:
    """Return text that says that the loss is about the same as before training, or None."""
    before = history.start or (history.training[0] if history.starts_at_reference and history.training else None)
    last = history.last
    # without the SFT loss, which differs from batch to batch
    name = "preference_loss" if before and "preference_loss" in before and "preference_loss" in last else "loss"
    if before is None or abs(last[name] - before[name]) >= max(WORSE_SHARE * abs(before[name]), LEAST_WORSE):
        return None
    return (
        f"hardly anything was trained: in {_steps(history)} the loss went from {before[name]:.4f} to {last[name]:.4f}, and the "
        f"margin from {before['rewards_margin_mean']:.3f} to {last['rewards_margin_mean']:.3f}. Train for more steps, or with a "
        f"larger policy.optimizer.kwargs.lr (now {history.config.policy.optimizer.kwargs.lr:g})."
    )


def _validation_overlap(history: History) -> str | None:
    if history.overlap < MUCH_OVERLAP:
        return None
    return (
        f"the result is not on new data: {history.overlap:.0%} of the prompts of this set are in the training set too. Remove "
        "them from one of the two, or hold out pairs with data.validation_share."
    )


def _sound(history: History) -> str:
    first, last = history.first, history.last
    few = ""
    if history.training and history.has_ended and history.num_steps < FEWEST_STEPS:
        few = f" It is the result of only {_steps(history)}: train for {FEWEST_STEPS} or more before you rely on it."
    if first is last:
        return f"no problems found: accuracy {last['accuracy']:.2f}, margin {last['rewards_margin_mean']:.3f}.{few}"
    return (
        f"no problems found: accuracy {first['accuracy']:.2f} -> {last['accuracy']:.2f}, margin "
        f"{first['rewards_margin_mean']:.3f} -> {last['rewards_margin_mean']:.3f}.{few}"
    )


RULES: dict[str, Callable[[History], str | None]] = {
    "hardly_trained": _hardly_trained,
    "warm_up_only": _warm_up_only,
    "validation_overlap": _validation_overlap,
    "accuracy_flat": _accuracy_flat,
    "accuracy_reversed": _accuracy_reversed,
    "chosen_falling": _chosen_falling,
    "length_learnt": _length_learnt,
    "kl_running_away": _kl_running_away,
    "only_hurt": _only_hurt,
    "best_long_ago": _best_long_ago,
}
