"""Converts an exported model to GGUF, with the converter of llama.cpp. The user installs llama.cpp."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tandem.config.sections.section import expand_home
from tandem.errors import ConfigError, TandemError, full_disk
from tandem.isolation import SAFE_PATH, isolated_environment
from tandem.storage.ownership import temporary_path
from tandem.terminal.arguments import option

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
OUTPUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SHOWN_CHARACTERS = 500  # of the end of the converter's output


def find_converter(given: str | Path | None = None) -> Path:
    """Return the path of the converter: the file or folder that is given, else of LLAMA_CPP, else the file on the PATH."""
    named = [("llama_cpp", given), (VARIABLE, os.environ.get(VARIABLE))]
    for origin, place in named:
        if not place:
            continue
        path = Path(expand_home(str(place)))
        path = path / CONVERTER if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"{option('llama_cpp', place) if origin == 'llama_cpp' else f'{VARIABLE}={place}'}: there is no "
                f"{CONVERTER}. Give a checkout of llama.cpp, or the path of that file."
            )
        return path
    if (found := shutil.which(CONVERTER)) is not None:
        return Path(found)
    raise ConfigError(
        f"{option('gguf', True)}: {CONVERTER} was not found. It is part of llama.cpp: clone "
        f"https://github.com/ggml-org/llama.cpp, and give its folder by {option('llama_cpp', metavar='DIR')} or "
        f"{VARIABLE}=DIR."
    )


def gguf_file(folder: Path, dtype: str) -> Path:
    return folder / f"model-{OUTPUT_TYPES[dtype]}.gguf"


def convert(folder: Path, converter: Path, dtype: str) -> Path:
    """Convert the model in `folder` to one GGUF file in the same folder, and return its path. An existing file is kept."""
    target = gguf_file(folder, dtype)
    if target.is_file():
        return target
    aside = temporary_path(target)
    outputs = ["--outfile", str(aside), "--outtype", OUTPUT_TYPES[dtype]]
    # The converter imports modules of its own folder, which PYTHONSAFEPATH would hide; the working directory is not searched.
    environment = {name: value for name, value in isolated_environment().items() if name not in SAFE_PATH}
    try:
        done = subprocess.run(
            [sys.executable, str(converter), str(folder), *outputs],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or not aside.is_file() or not aside.stat().st_size:
            said = " ".join((done.stderr or done.stdout).split())[-SHOWN_CHARACTERS:]
            if full := full_disk(OSError(said)):
                raise full
            raise TandemError(
                f"{converter} failed (exit code {done.returncode}): {said or 'it wrote no file'}. The export in {folder} is "
                "complete; only the GGUF file is missing."
            )
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return target
