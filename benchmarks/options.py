"""The argument parser of the benchmarks: `--help` prints the module docstring unchanged, and the default of every option."""

import argparse


class _WithDefaults(argparse.RawDescriptionHelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        nothing = (None, "", [], argparse.SUPPRESS)
        if action.default not in nothing and not isinstance(action.default, bool):
            default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
            action.help = f"{action.help} (default: {default})" if action.help else f"default: {default}"
        super().add_argument(action)


def options_of(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=_WithDefaults)
