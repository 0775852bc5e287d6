"""The section `logger`: trackers beside metrics.jsonl."""

from tandem.config.section import Section


class Logger(Section):
    """Trackers beside metrics.jsonl, which is always written."""
