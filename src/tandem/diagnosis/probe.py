"""A child process that imports torch and prints what it finds as one line of JSON. A broken torch ends only this process."""

import json
from importlib import metadata
from typing import Any


def probe() -> dict[str, Any]:
    """Return versions and devices as torch sees them."""
    import torch
    import transformers

    from tandem.config.sections.policy import Policy
    from tandem.model.load import describe_attention
    from tandem.training.memory import device_memory
    from tandem.training.start.machine import this_device

    device = this_device()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "attention": describe_attention(Policy(), device, None),
        "memory": device_memory(torch.device("cpu")),
        "driver": _driver(),
        "devices": [_device(number) for number in range(torch.cuda.device_count())],
        "triton": _triton() if torch.cuda.is_available() else None,
    }


def _device(number: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {"name": found.name, "capability": [found.major, found.minor], "free": free, "total": total}


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)
    except Exception:
        return None


def _triton() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(probe()), flush=True)
