"""The rules that tables refer to by name. A rule says what becomes of a key whose translation needs computing."""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.config.compat.records import Given, Outcome
from tandem.config.compat.rules import axolotl, llama_factory, nemo_aligner, nemo_rl, trl

Rule = Callable[[str, Any, Given], Outcome]

RULES: Mapping[str, Rule] = {
    **nemo_rl.RULES,
    **nemo_aligner.RULES,
    **trl.RULES,
    **llama_factory.RULES,
    **axolotl.RULES,
}
