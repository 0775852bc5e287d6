"""Builds the embedded model in the cache, once: a tiny random Llama and a tokenizer trained on the bundled pairs."""

import json
from pathlib import Path

from tandem.embedded.files import TRAIN
from tandem.storage.cache import cache_dir, check_cache_dir, fingerprint, published, sha256_of

VERSION = 1
VOCABULARY = 2048
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model() -> Path:
    """Return the folder of the embedded model, in the Hugging Face layout. The first call builds the model."""
    folder = _folder("tiny")
    if not folder.is_dir():
        check_cache_dir()
        with published(folder, "model") as aside:
            _save_tokenizer(aside)
            _save_model(aside)
    return folder


def tiny_tokenizer() -> Path:
    """Return a folder with the embedded model's tokenizer, without importing torch.

    This is the model's folder if the model was built before. Otherwise it is a folder with only the tokenizer.
    """
    model, tokenizer = _folder("tiny"), _folder("tiny-tokenizer")
    if model.is_dir():
        return model
    if not tokenizer.is_dir():
        check_cache_dir()
        with published(tokenizer, "model") as aside:
            _save_tokenizer(aside)
    return tokenizer


def _folder(name: str) -> Path:
    return cache_dir() / "models" / f"{name}-{fingerprint(VERSION, sha256_of(TRAIN))[:12]}"


def _training_texts() -> list[str]:
    texts = []
    for line in TRAIN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"]
        texts += [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        texts += [row["chosen"], row["rejected"]]
    return texts


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    pad, _, end = SPECIAL
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(folder))


def _save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(VERSION)
        LlamaForCausalLM(config).save_pretrained(str(folder))
