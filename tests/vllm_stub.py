"""An interpreter with a stub of the package vllm: it answers with the prompt's ids in reverse, then the first stop token."""

import sys
from pathlib import Path

STUB = """
__version__ = "0.stub"
print("a line that vLLM prints to standard output")

class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)

class Output:
    def __init__(self, ids, reason):
        self.outputs = [self]
        self.token_ids, self.finish_reason = ids, reason

class LLM:
    def __init__(self, model, dtype, max_model_len, trust_remote_code):
        assert not trust_remote_code
        self.max_model_len = max_model_len

    def generate(self, prompts, settings, use_tqdm):
        outputs = []
        for prompt, one in zip(prompts, settings):
            ids = [*reversed(prompt["prompt_token_ids"]), one.stop_token_ids[0]]
            cut = ids[: one.max_tokens]
            outputs.append(Output(cut, "stop" if cut == ids else "length"))
        return outputs
"""


def stub_python(folder: Path, source: str | None = STUB) -> str:
    """Write an interpreter into a folder. source: of its package vllm; None: it has none."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    if source is not None:
        (packages / "vllm.py").write_text(source)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)
