"""Special tokens that a message only spells, marked so that they are encoded as plain text."""

# Stands around a special token that is only spelled. It is one of Unicode's noncharacters: a text with it is refused.
SHIELD = "\ufdd0"


def pieces(rendered: str) -> list[tuple[str, bool]]:
    """A rendered text in pieces, and whether special tokens in each are meant: "a\ufdd0</s>\ufdd0b" -> a, </s> (no), b."""
    return [(part, i % 2 == 0) for i, part in enumerate(rendered.split(SHIELD)) if part]
