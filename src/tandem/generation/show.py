"""Shows completions on the terminal: one after another, or those of two models side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.generation.generate import Generation
from tandem.generation.output import Record
from tandem.generation.records import Prompt
from tandem.terminal.printable import counted, escaped
from tandem.terminal.text import wrap

SIDE_BY_SIDE_CELLS = 80  # narrower terminals show the models one below the other
QUESTION_CHARACTERS = 300
STOPPED = "stopped"  # by Ctrl-C; other ends of an answer are those of engines


def show_records(generation: Generation, prompts: Sequence[Prompt], console: Console) -> None:
    """Print each prompt with its completions by every model."""
    by_prompt: dict[int, dict[str, Record]] = {}
    for record in generation.records:
        by_prompt.setdefault(record["id"], {})[record["generated_by"]["model"]] = record
    for prompt in prompts:
        place = f"{prompt.place}: " if len(prompts) > 1 else ""
        _print(console, f"{place}{_question(prompt)}", "bold")
        records = [by_prompt[prompt.index][model] for model in generation.models]
        texts = {
            model: [shown_completion(one["completion"], one["finish"]) for one in record["completions"]]
            for model, record in zip(generation.models, records, strict=True)
        }
        show_answers(texts, console)
        console.print()


def show_answers(texts: Mapping[str, Sequence[str]], console: Console) -> None:
    """Print the completions of one model, or of two: in columns if the console is at least 80 cells wide."""
    if len(texts) == 1:
        [completions] = texts.values()
        for number, text in enumerate(completions, 1):
            _print(console, f"{number}: {text}" if len(completions) > 1 else text)
        return
    if console.width < SIDE_BY_SIDE_CELLS:
        for model, completions in texts.items():
            _print(console, f"{model}:", "bold")
            for text in completions:
                _print(console, text)
        return
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in texts:
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*(Text(escaped(model), "bold") for model in texts))
    for row in zip(*texts.values(), strict=True):
        table.add_row(*(Text(escaped(text)) for text in row))
    console.print(table, soft_wrap=False)


def summary(generation: Generation, num_samples: int) -> str:
    """One sentence on what was written, and one on speed."""
    g = generation
    by = f" by {' and '.join(g.models)}"
    completions = counted(num_samples, "completion")
    prompts = counted(g.num_prompts, "prompt")
    num_lines = g.num_prompts * len(g.models)
    if g.num_resumed == num_lines:
        return f"{g.out} was complete already, so nothing was generated: {prompts} with {completions} each{by}."
    num_new = num_lines - g.num_resumed
    resumed = ""
    if g.num_resumed:
        was, are = "was" if g.num_resumed == 1 else "were", "is" if num_new == 1 else "are"
        resumed = f" {g.num_resumed:,} of its {num_lines:,} lines {was} there already, {num_new:,} {are} new."
    lines = [f"Wrote {g.out}: {prompts} with {completions} each{by}.{resumed}"]
    if g.finishes:
        ended = ", ".join(f"{count:,} {_ending(reason)}" for reason, count in sorted(g.finishes.items(), reverse=True))
        new = "New c" if g.num_resumed else "C"
        rate = f" {counted(g.num_tokens, 'token')} in {g.seconds:.1f} s ({g.num_tokens / max(g.seconds, 1e-9):,.0f} tokens/s)."
        lines.append(f"{rate.strip() if g.num_tokens else f'{g.seconds:.1f} s.'} {new}ompletions: {ended}.")
    return "\n".join(lines)


def as_json(generation: Generation) -> dict[str, Any]:
    """The summary for a program."""
    g = generation
    return {
        "out": None if g.out is None else str(g.out),
        "models": list(g.models),
        "num_prompts": g.num_prompts,
        "num_skipped": g.num_skipped,
        "num_resumed": g.num_resumed,
        "num_new": g.num_prompts * len(g.models) - g.num_resumed,
        "num_tokens": g.num_tokens,
        "seconds": round(g.seconds, 3),
        "finishes": g.finishes,
    }


def _ending(reason: str) -> str:
    return {"stop": "ended by the model", "length": "cut at the limit"}.get(reason, reason)


def shown_completion(text: str, finish: str) -> str:
    """A completion as it is shown: without white space around it, and with a mark if the model did not end it."""
    return text.strip() + streamed_end(text, finish)


def streamed_end(text: str, finish: str) -> str:
    """What is shown after a completion that was printed while it was generated: a mark if it shows nothing, or was cut."""
    blank = "" if text.strip() else "(white space)" if text else "(empty)"
    return blank + ending_mark(finish)


def ending_mark(finish: str) -> str:
    return {"length": " [cut at the limit]", STOPPED: " [stopped]"}.get(finish, "")


def _question(prompt: Prompt) -> str:
    """The prompt, or its last turn, on one line."""
    text = prompt.prompt if isinstance(prompt.prompt, str) else prompt.prompt[-1].content
    line = " ".join(text.split())
    return line if len(line) <= QUESTION_CHARACTERS else line[: QUESTION_CHARACTERS - 1] + "…"


def _print(console: Console, text: str, style: str = "") -> None:
    # Escaped here, because rich silently drops some control characters.
    shown = escaped(text)
    console.print(Text(wrap(shown, console.width, 0) if console.is_terminal else shown, style), soft_wrap=True)
