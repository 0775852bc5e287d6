"""Generates with transformers: in padded batches sorted by length, or with its continuous batching."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.config.sections.section import EMBEDDED
from tandem.errors import ConfigError, OutOfMemoryError, one_line
from tandem.generation.records import Answer, Batching, EngineSettings, Request, Sampling
from tandem.generation.sampling import SeededSampling, random_numbers
from tandem.generation.target import FoundModel
from tandem.generation.text import TextStream, completion_text, stop_ids
from tandem.model.architecture import architecture_of, check_architecture
from tandem.model.checks.trial import is_out_of_memory
from tandem.model.files.layer_values import values_of
from tandem.model.load import load_policy
from tandem.terminal.arguments import option

CPU_BATCH = 16  # sequences: larger batches are hardly faster on a CPU, and pad more
MAX_BATCH = 512
MEMORY_SHARE = 0.6  # of the free GPU memory, for keys and values and the logits
CONTINUOUS_BLOCK = 1024  # requests handed to continuous batching at a time; a kill loses at most these


def load_model(found: FoundModel, device: torch.device) -> Any:
    """Load the weights for generation: float32 on a CPU, the published dtype on a GPU. Adapters stay separate."""
    policy = PolicyConfig.model_validate({"model_name": EMBEDDED, "packing": {"mode": "none"}})
    check_architecture(found.source)
    dtype = found.source.dtype if device.type == "cuda" else torch.float32
    try:
        model = load_policy(found.source, policy, device, dtype=dtype).model
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{found.target.name}: its weights do not fit in the memory of this device. Use a larger one, or another "
            "engine."
        ) from None
    if found.target.adapter is not None:
        from peft import PeftModel

        from tandem.model.lora.files import read_adapter

        read_adapter(str(found.target.adapter))  # refuses anything but plain LoRA weights in safetensors
        # peft reads a deprecated property of transformers' models, which warns.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            adapted: Any = PeftModel.from_pretrained(model, str(found.target.adapter))
        model = adapted.eval().base_model.model
    return model


class TransformersEngine:
    """Generates with `model.generate`, or `generate_batch` for continuous batching."""

    name = "transformers"

    def __init__(
        self, found: FoundModel, model: Any, end_of_turn: int | None, sampling: Sampling, settings: EngineSettings
    ):
        from transformers import GenerationConfig, __version__

        self.version = f"transformers {__version__}"
        self._model: Any = model
        self._found, self._sampling = found, sampling
        self._tokenizer = found.template.tokenizer
        self._batch_size = settings.batch_size
        self._stops = stop_ids(self._tokenizer, end_of_turn, model.generation_config)
        self.batching = choose_batching(settings.batching, needs_equal_lengths(model))
        # The folder's own settings (repetition penalty, temperature) would change what is generated without being asked for.
        model.generation_config = GenerationConfig()

    def answers(self, requests: list[Request]) -> Iterator[Answer]:
        limited = [request for request in requests if self._num_new(request) < self._sampling.max_new_tokens]
        others = [request for request in requests if self._num_new(request) == self._sampling.max_new_tokens]
        if self.batching == "continuous":
            for start in range(0, len(others), CONTINUOUS_BLOCK):
                yield from self._continuous(others[start : start + CONTINUOUS_BLOCK])
            others = []
        for batch in self._batches(others, limited):
            yield from self._padded(batch)

    def stream(self, request: Request, write: Callable[[str], None]) -> Answer:
        stream = TextStream(self._tokenizer, self._stops, write)
        [ids] = self._generate([request], streamer=stream)
        return self._answer(request, ids)

    def close(self) -> None:
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _num_new(self, request: Request) -> int:
        """How many tokens may be generated: as asked, or up to the longest sequence that the model is made for."""
        limit = self._found.max_tokens
        asked = self._sampling.max_new_tokens
        return asked if limit is None else min(asked, limit - len(request.ids))

    def _batches(self, others: list[Request], limited: list[Request]) -> Iterator[list[Request]]:
        """Batches of requests of similar length, longest first, so that memory runs out at once if it does.

        All requests of a batch may generate the same number of tokens. Models with recurrent layers get no padding.
        """
        equal = needs_equal_lengths(self._model)
        ordered = sorted([*others, *limited], key=lambda request: -len(request.ids))
        for _, group in groupby(ordered, key=lambda request: (self._num_new(request), equal and len(request.ids))):
            rows = list(group)
            size = self._batch_size or auto_batch_size(self._model, len(rows[0].ids) + self._num_new(rows[0]))
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def _padded(self, batch: list[Request]) -> Iterator[Answer]:
        try:
            generated = self._generate(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            generated = None
        if generated is not None:
            yield from (self._answer(request, ids) for request, ids in zip(batch, generated, strict=True))
            return
        if self._batch_size is not None or len(batch) == 1:
            raise OutOfMemoryError(
                f"a batch of {len(batch)} sequences of up to {len(batch[0].ids) + self._num_new(batch[0]):,} tokens does "
                f"not fit in memory. Lower {option('batch_size' if len(batch) > 1 else 'max_new_tokens')}."
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(batch) // 2
        yield from self._padded(batch[:half])
        yield from self._padded(batch[half:])

    def _generate(self, batch: Sequence[Request], streamer: Any = None) -> list[list[int]]:
        """The new tokens of each request, up to and including the first that ends it.

        Prompts are padded on the left: [pad pad a b], [c d e f].
        """
        from transformers import GenerationConfig, LogitsProcessorList

        device = self._model.device
        width, num_new = max(len(request.ids) for request in batch), self._num_new(batch[0])
        pad = self._stops[0]
        rows = [[pad] * (width - len(request.ids)) + list(request.ids) for request in batch]
        mask = [[0] * (width - len(request.ids)) + [1] * len(request.ids) for request in batch]
        processors = LogitsProcessorList()
        if not self._sampling.is_greedy:
            numbers = random_numbers(batch, self._sampling, num_new).to(device)
            processors.append(SeededSampling(numbers, width, self._sampling))
        settings = GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=list(self._stops), pad_token_id=pad, use_cache=True
        )
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            found: Tensor = self._model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=settings,
                logits_processor=processors,
                streamer=streamer,
            )
        return [self._up_to_end(row) for row in found[:, width:].tolist()]

    def _continuous(self, block: list[Request]) -> Iterator[Answer]:
        """Let transformers schedule the requests. When it samples, results depend on the order of the requests."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        greedy = self._sampling.is_greedy
        chosen = (
            {} if greedy else {"temperature": self._sampling.temperature, "top_p": self._sampling.top_p, "top_k": 0}
        )
        settings = GenerationConfig(
            max_new_tokens=self._sampling.max_new_tokens,
            do_sample=not greedy,
            eos_token_id=list(self._stops),
            pad_token_id=self._stops[0],
            **chosen,
        )
        try:
            results = self._model.generate_batch(
                inputs=[list(request.ids) for request in block],
                generation_config=settings,
                continuous_batching_config=ContinuousBatchingConfig(seed=block[0].seed(self._sampling.seed)),
            )
            outputs = list(results.values())
            problem = next((Exception(one.error) for one in outputs if one.error), None)
        except Exception as error:
            problem, outputs = error, []
        if problem is not None or len(outputs) != len(block):
            reason = one_line(problem or Exception("an answer is missing"))
            raise ConfigError(
                f"{option('batching', 'continuous')}: transformers could not generate with {self._found.target.name} "
                f"({reason}). Use {option('batching', 'padded')}."
            )
        for request, output in zip(block, outputs, strict=True):
            yield self._answer(request, self._up_to_end(output.generated_tokens))

    def _up_to_end(self, ids: Sequence[int]) -> list[int]:
        end = next((i for i, id in enumerate(ids) if id in self._stops), None)
        return list(ids if end is None else ids[: end + 1])

    def _answer(self, request: Request, ids: list[int]) -> Answer:
        finish = "stop" if ids and ids[-1] in self._stops else "length"
        return Answer(request, completion_text(self._tokenizer, ids, self._stops), tuple(ids), finish)


def choose_batching(asked: Batching, equal_lengths: bool) -> Batching:
    """Padded batches unless continuous ones are asked for, which were not faster on a GPU (benchmarks/LAB_NOTES.md)."""
    if asked == "continuous" and equal_lengths:
        raise ConfigError(
            f"{option('batching', 'continuous')}: does not support models with recurrent layers. Use "
            f"{option('batching', 'padded')}."
        )
    return "padded" if asked == "auto" else asked


def needs_equal_lengths(model: Any) -> bool:
    """Whether layers carry state along a row, so that padding before a prompt could change it."""
    return bool(architecture_of(model.config, type(model)).recurrent)


def auto_batch_size(model: Any, num_tokens: int) -> int:
    """How many sequences of this many tokens to generate at a time: as many as fit in free GPU memory; 16 on a CPU."""
    if model.device.type != "cuda":
        return CPU_BATCH
    config = model.config.get_text_config()
    all_heads = max(values_of(config, "num_attention_heads"), default=1)
    heads = max(values_of(config, "num_key_value_heads"), default=all_heads)
    head_size = max(values_of(config, "head_dim"), default=config.hidden_size // all_heads)
    per_token = 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize
    # While a token is chosen, a row of logits exists a few times in float64.
    per_sequence = per_token * num_tokens + 8 * 8 * config.vocab_size
    free = torch.cuda.mem_get_info(model.device)[0]
    return max(1, min(MAX_BATCH, int(MEMORY_SHARE * free / per_sequence)))
