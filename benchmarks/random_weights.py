"""Models of real shapes with random weights on a device, with adapters, for train.py and trl_steps.py.

TRL's interpreter imports this file too, so it must not import tandem.
"""

import sys
from importlib.util import find_spec
from typing import Any

import torch
from made_model import SHAPES, config_of


def random_model(
    name: str,
    *,
    longest: int,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    quantization: str | None = None,
) -> Any:
    """A model of that shape, made on its device. `quantization`: None or nf4, of all linear layers except the head."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {"dtype": dtype, "attn_implementation": attention}
    with torch.device(device if quantization is None else "meta"):
        model = AutoModelForCausalLM.from_config(config_of(name, longest), **settings)
    if quantization is not None:
        _fill_quantized(model, dtype, device)
    return model


def adapter_settings(rank: int) -> Any:
    """How both sides add adapters: peft's defaults, on all linear layers except the head."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def require_quantization(quantization: str | None, shape: str) -> None:
    """Exit with a message if models of this shape cannot be quantised here."""
    if quantization is None:
        return
    if find_spec("bitsandbytes") is None:
        sys.exit(f"--quantization {quantization}: the package bitsandbytes is not installed: pip install bitsandbytes.")
    if SHAPES[shape].more:
        what = "recurrent layers" if SHAPES[shape].has_recurrent_layers else "experts"
        sys.exit(f"--quantization {quantization}: {shape} has {what}, whose random weights are not made here.")


def _fill_quantized(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Quantise an empty model as `from_pretrained` does, and give each layer random weights as it is quantised.

    So a device never holds more than one layer's weights that are not quantised.
    """
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    quantizer: Any = Bnb4BitHfQuantizer(settings, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": device})
    std = model.config.initializer_range
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                plain = torch.randn(module.out_features, module.in_features, dtype=dtype, device=device) * std
                made = bnb.nn.Params4bit(plain, requires_grad=False, **module.weight.__dict__)
                module.weight = made.to(device)
                if module.bias is not None:
                    zeros = torch.zeros(module.out_features, dtype=dtype, device=device)
                    module.bias = torch.nn.Parameter(zeros, requires_grad=False)
            else:
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)
    model.tie_weights()
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    empty = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta]
    assert not empty, f"without values: {empty[:3]}"
