"""Prints what became of the keys of another trainer's configuration."""

from tandem.config.compat.records import Translation
from tandem.config.compat.show import full_table, short_lines, summary
from tandem.report.reporter import Reporter


def say_translation(
    translation: Translation, file: str | None, reporter: Reporter, *, all_keys: bool, rest: str = ""
) -> None:
    """Print every key, or only those that were translated or got another default. `rest`: where every key is shown."""
    if all_keys:
        lines = full_table(translation, file).splitlines()
    else:
        lines = [f"{summary(translation, file)} {rest}".rstrip(), *short_lines(translation)]
    for line in lines:  # one by one, because a long message is shortened
        reporter.say(line, hang=4)
