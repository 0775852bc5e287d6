"""Prints a RunEstimate."""

from tandem.planning.gpus import GB
from tandem.planning.records import MemoryNeed, Rows, RunEstimate, SeveralGpus, TimeNeed
from tandem.planning.speed import Range
from tandem.planning.traffic import OVERLAPPED
from tandem.report.reporter import Reporter
from tandem.storage.cache import GIB
from tandem.terminal.printable import counted

VERDICTS = {
    "fits": "fits",
    "tight": "may not fit: 15 % should stay free for what is not estimated",
    "does not fit": "does not fit",
}
MINUTE, HOUR, DAY = 60, 3600, 86400
FULL_ENOUGH = 0.75  # the share of positions that are not filler, below which fewer GPUs are suggested


def show(found: RunEstimate, reporter: Reporter) -> None:
    """Print an estimate, and what to change if the run does not fit."""
    fits = found.memory.verdict != "does not fit"
    times = [*_exchange(found), *_time(found)] if fits else []
    rows = [*_what(found), *_memory(found), *times, *_disk(found)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        reporter.say(f"{name:<{width}}  {value}", hang=width + 2)
    if found.memory.verdict == "fits":
        return
    if not found.suggestions:
        more = "" if found.several is None else ", and no number of GPUs,"
        reporter.say(f"\nNo setting and no known card{more} was found with which the run fits.")
        return
    reporter.say("\nWith each of these changes it fits:")
    for one in found.suggestions:
        time = "" if one.time is None else f", {duration(one.time.total)}"
        cost = "" if one.cost is None else f", cost {_money(one.cost)}"
        reporter.say(f"- {one.change}: {gib(one.memory.total)} of {gib(one.memory.available)} GiB{time}{cost}", hang=2)
        reporter.command(one.command)


def _what(found: RunEstimate) -> list[tuple[str, str]]:
    trained = "all trained" if found.num_trained == found.num_weights else f"{_count(found.num_trained)} trained"
    where = "the CPU of this machine" if found.card is None else found.card.name
    several = found.several
    is_measured = found.card is None or (found.card.is_measured and several is None)
    computed = "" if is_measured else " (computed, not measured)"
    planned = (
        f"{where}, {gib(found.memory.available)} GiB{computed}" if several is None else _ranks(found, where, computed)
    )
    return [
        ("model", "; ".join([f"{found.model}: {_count(found.num_weights)} weights, {trained}", *found.notes])),
        ("planned for", planned),
        *([] if several is None else [("mesh", f"{several.mesh.num_ranks} ranks: {several.mesh}")]),
        (
            "steps",
            f"{found.num_steps:,}, with {found.num_pairs:,} pairs and {_count(found.num_tokens)} tokens (all tokenised)",
        ),
        ("rows", f"{found.rows.description}{_shorter(found.rows)}; {found.rows.fill:.1%} full"),
    ]


def _shorter(rows: Rows) -> str:
    """Say how long the longest row is, if no pack needs the length that rows may have."""
    return f"; the packs need rows of at most {rows.length:,} tokens" if rows.length < rows.limit else ""


def _ranks(found: RunEstimate, where: str, computed: str) -> str:
    """Return "2 machines with 8 x h100-80gb each, 79.1 GiB per GPU (computed, not measured)"."""
    assert found.several is not None
    gpus, memory = found.several.gpus, gib(found.memory.available)
    machines = f"{gpus.machines} machines with " if gpus.machines > 1 else ""
    each = " each" if gpus.machines > 1 else ""
    if found.card is None:
        cpus = "their CPUs" if gpus.machines > 1 else where
        ranks = counted(gpus.per_machine, "rank")
        return f"{machines}{ranks}{each} on {cpus}, {memory} GiB per rank; to plan for GPUs, name a card with --gpu"
    return f"{machines}{gpus.per_machine} x {where}{each}, {memory} GiB per GPU{computed}"


def _memory(found: RunEstimate) -> list[tuple[str, str]]:
    need, rows = found.memory, found.rows
    longest = "none" if rows.longest_that_fits is None else f"{rows.longest_that_fits:,} tokens"
    each = "" if found.several is None else " per GPU" if found.card is not None else " per rank"
    copied = "" if found.time is None else f"; {found.time.copying:.2g} s of copies per step (computed)"
    host = [] if found.host is None else [("host memory", f"{found.host} per machine for optimizer states{copied}")]
    return [
        ("memory", f"{gib(need.total)} of {gib(need.available)} GiB{each}: {VERDICTS[need.verdict]}"),
        ("", _parts(need, rows.length, rows.together)),
        *host,
        ("longest row", f"{longest} with these settings"),
    ]


def _parts(need: MemoryNeed, length: int, together: int) -> str:
    several = f"{together} " if together > 1 else ""
    parts = {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer states": need.optimizer_states,
        "bfloat16 copy": need.bfloat16_copy,
        "reference": need.reference,
        f"activations in {several}rows of {length:,} tokens": need.activations,
        "logits and head gradient": need.head,
        "gathered weights": need.gathered,
    }
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)


def _time(found: RunEstimate) -> list[tuple[str, str]]:
    if found.time is None:
        return [("time", found.no_time)]
    time = found.time
    rows = [("time", f"{duration(time.total)}: {_time_parts(time)}")]
    several = found.several
    rows.append(("speed", f"about {time.pairs_per_second:,.3g} pairs per second in training{_compared(time, several)}"))
    if several is not None and found.rows.fill < FULL_ENOUGH:
        rows.append(("", f"batches are too small for {several.gpus.total} GPUs: use fewer, or larger batches"))
    if found.cost is not None:
        price = f"{found.price_per_hour:g} per hour"
        each = "" if several is None else f" for each of {several.gpus.total} GPUs"
        rows.append(("cost", f"{_money(found.cost)}, at {price}{each}"))
    return rows


def _compared(time: TimeNeed, several: SeveralGpus | None) -> str:
    """Compare the speed of several GPUs with that of one, or, if the run does not fit on one, with computation alone."""
    if several is None or several.efficiency is None:
        return ""
    if several.one_gpu_speed is not None:
        return f", {time.pairs_per_second / several.one_gpu_speed:.2g} times one GPU (computed)"
    return f"; {several.efficiency * (1 - several.waiting):.0%} of the time is computation (computed)"


def _exchange(found: RunEstimate) -> list[tuple[str, str]]:
    """What the ranks of several GPUs exchange and wait for. The assumptions are part of it."""
    several = found.several
    if several is None:
        return []
    sent = several.sent
    collectives = {
        "all-gather of weights": sent.gathered,
        "reduce-scatter of gradients": sent.scattered,
        "all-reduce between replicas": sent.replicated,
        "all-to-all of attention": sent.exchanged,
    }
    each = ", ".join(f"{name} {size / GB:,.3g} GB" for name, size in collectives.items() if size)
    rows = [("exchange", f"{each}, per step and rank (computed)")]
    if several.compute_seconds is not None:
        links = f"{several.links.inside / GB:,.4g} GB/s per GPU inside a machine"
        links += (
            f", {several.links.between / GB:,.4g} GB/s per machine between machines"
            if several.gpus.machines > 1
            else ""
        )
        step = f"{several.exchange_seconds:.2g} s per step, with {several.compute_seconds:.2g} s of computation"
        rows.append(("", f"{step}; assumed: {links}, and {OVERLAPPED:.0%} of the exchange overlaps with computation"))
    rows.append(
        ("waiting", f"{several.waiting:.1%} of the computation, for the rank whose packs have the most attention")
    )
    return rows


def _time_parts(time: TimeNeed) -> str:
    parts = {"start": time.start, "reference": time.reference, "training": time.training, "validation": time.validation}
    return ", ".join(f"{name} {duration(part)}" for name, part in parts.items() if part.high)


def _disk(found: RunEstimate) -> list[tuple[str, str]]:
    disk = found.disk
    kept = f"{counted(disk.num_checkpoints, 'checkpoint')} of {gib(disk.checkpoint)}"
    text = f"{gib(disk.total)} GiB in {disk.folder}: {kept}, export {gib(disk.export)}"
    if disk.free is None:
        return [("disk", text)]
    enough = "" if disk.free >= disk.total else ": not enough. Free some space, or set run.dir to another disk"
    return [("disk", f"{text}; {gib(disk.free)} GiB are free{enough}")]


def _money(cost: Range) -> str:
    return f"{cost.low:,.2f} to {cost.high:,.2f}"


def duration(range: Range) -> str:
    """Format a range of seconds with the unit of its upper end: "20 to 155 s", "15 to 21 h"."""
    for unit, size in (("d", DAY), ("h", HOUR), ("min", MINUTE)):
        if range.high >= 3 * size:
            return f"{range.low / size:.2g} to {range.high / size:.2g} {unit}"
    return f"{range.low:.0f} to {range.high:.0f} s" if range.high >= 1 else "under 1 s"


def gib(size: float) -> str:
    """Format bytes as a number of GiB with one decimal; small sizes as "<0.1"."""
    value = size / GIB
    return f"{value:,.1f}" if value >= 0.1 or not value else "<0.1"


def _count(number: float) -> str:
    for name, unit in (("billion", 1e9), ("million", 1e6)):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"
