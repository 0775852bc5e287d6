"""A path in, of a tokenizer's folder or of a SentencePiece model file; the tokenizer out."""

import hashlib
import json
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tandem.data.store.pool import Died, Stalled, in_a_process
from tandem.data.text.sentencepiece_model import SAVED_AS, SentencePiece
from tandem.errors import ConfigError
from tandem.storage.cache import cache_dir, content_of, fingerprint, refuse_outside
from tandem.terminal.commands import install_command

INSTALL = f"In the tandem checkout, run {install_command('sentencepiece')}."
KNOWN_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
READ_SUFFIXES = (".json", ".model", ".txt", ".jinja")
MORE_TEMPLATES = "additional_chat_templates"  # transformers reads the templates in this folder too
# What loading a tokenizer and trying it out may take, beside what grows with its files: 18 MB of merges took 7 seconds.
LOAD_SECONDS, BYTES_PER_SECOND = 60.0, 100_000
LOAD_BYTES, BYTES_PER_BYTE = 4 * 1024**3, 200
# Plain text, on which any conversion of a SentencePiece model must agree with it; then what conversions get wrong.
PLAIN = "How far is the moon?"
# Settings of a tokenizer that do not change how it encodes a text, or that are known elsewhere.
NO_STATE = (
    "backend", "chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_max_length",
    "name_or_path", "padding_side", "processor_class", "tokenizer_class", "transformers_version", "truncation_side",
)  # fmt: skip
PROBES = (PLAIN, "  two  spaces,\n\ta tab\n", "é 東京 😀 ｶﾞ", "<extra_id_1>User\nHi\n<extra_id_1>Assistant\n")


def load_tokenizer(name: Path) -> Any:
    """The tokenizer of a folder, or of a SentencePiece model (a file ending in .model); one without EOS is refused.

    What its files make the libraries do may never end, or take all memory, and cannot be stopped: one whose content is new
    is loaded in a process of its own first.
    """
    files = [name] if name.is_file() else _files_of(name)
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ConfigError(
                f"{file}: not a file, but a pipe or a device, which a tokenizer is not read from. Download the tokenizer again."
            )
    folder = name.parent if name.is_file() else name
    contents = {str(file.relative_to(folder)): content_of(file) for file in files if file.is_file()}
    note = cache_dir() / "tokenizers" / fingerprint(contents, version("tokenizers"), version("transformers"))
    if not note.exists():
        _try_out(name, sum(file.stat().st_size for file in files if file.is_file()))
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return _load(name)


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder that a tokenizer may be read from; a link out of the folder is refused."""
    inside = (*folder.glob("*"), *folder.glob(f"{MORE_TEMPLATES}/*"))
    files = sorted(file for file in inside if file.suffix in READ_SUFFIXES)
    for file in files:
        refuse_outside(folder, file)
    return files


def _try_out(name: Path, num_bytes: int) -> None:
    """Load a tokenizer, and use it as it will be used, where it can be killed."""

    def work() -> None:
        from tandem.data.text.word_cache import WordEncoder  # which imports this module

        tokenizer = _load(name)
        _check_usable(tokenizer, name)
        if (backend := fast_backend(tokenizer)) is not None:
            WordEncoder(backend)
            WordEncoder(without_dummy_prefix(backend))

    seconds, memory = LOAD_SECONDS + num_bytes / BYTES_PER_SECOND, LOAD_BYTES + num_bytes * BYTES_PER_BYTE
    try:
        in_a_process(work, seconds, memory)
    except Stalled:
        raise ConfigError(
            f"{name}: its tokenizer is not loaded and tried out within {seconds:.0f} seconds. Use another tokenizer, by "
            "policy.tokenizer.name."
        ) from None
    except (Died, MemoryError):
        raise ConfigError(
            f"{name}: its tokenizer ends the process that loads it and tries it out, or needs more than {memory / 2**30:.1f} GiB "
            "of memory. Use another tokenizer, by policy.tokenizer.name."
        ) from None


def _check_usable(tokenizer: Any, name: Path) -> None:
    """Refuse a tokenizer in which the libraries fail on a text: not every setting of its files is checked when it is loaded."""
    try:
        if not isinstance(tokenizer, SentencePiece):
            tokenizer.get_vocab()
            tokenizer(list(PROBES), add_special_tokens=False)
        for text in PROBES:
            tokenizer.decode(tokenizer(text)["input_ids"])
    except MemoryError:
        raise
    except Exception as error:
        reason = _one_line(error).rstrip(".")
        raise ConfigError(
            f"{name}: its tokenizer cannot encode and decode a text ({type(error).__name__}: {reason}). Download it again, or "
            "use another, by policy.tokenizer.name."
        ) from None


def _load(name: Path) -> Any:
    if name.suffix == ".model" and not name.is_dir():
        return _read_sentencepiece(name, f"policy.tokenizer.name = {name}")
    if _exported(name):
        tokenizer = _read_sentencepiece(name / "tokenizer.model", str(name))
        tokenizer.chat_template = _from_folder(name).chat_template
        return tokenizer
    tokenizer = _from_folder(name)
    if tokenizer.eos_token is None:
        raise ConfigError(f"{name}: the tokenizer has no EOS token, so no completion could end. Set eos_token in it.")
    return tokenizer


def check_export(tokenizer: Any, name: Path, model_config: Any) -> None:
    """Refuse a SentencePiece model whose ids `AutoTokenizer` would not give again from the exported model's folder.

    For some model types transformers chooses the class of the tokenizer, whatever the folder says.
    """
    from transformers import AutoTokenizer

    if not isinstance(tokenizer, SentencePiece):
        return
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            same = _agree(AutoTokenizer.from_pretrained(folder), tokenizer, PROBES)
        except Exception:  # of whatever class transformers took, on files that are not meant for it
            same = False
    if not same:
        raise ConfigError(
            f"policy.tokenizer.name = {name}: transformers would read this SentencePiece model differently once it is "
            f"exported with a {model_config.model_type} model. Give a folder with a tokenizer.json instead."
        )


def state_of(tokenizer: Any) -> str:
    """What tells a tokenizer from every other one."""
    if isinstance(tokenizer, SentencePiece):
        return hashlib.sha256(tokenizer.model).hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else _state_in_python(tokenizer)
    return hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()


def _state_in_python(tokenizer: Any) -> str:
    """Of one that transformers computes in Python, with merges or pieces in files of its own, and with settings.

    CTRL's vocabulary is a set of tokens; which letters become which of them is said by merges.txt.
    """
    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotImplementedError):  # has no files
            tokenizer.save_vocabulary(folder)
        files = {file.name: content_of(file) for file in sorted(Path(folder).iterdir())}
    others = {*NO_STATE, *tokenizer.special_tokens_map}  # special tokens are among those added
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | int | float) and name not in others and not name.endswith("_file")
    }
    added = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    state = [type(tokenizer).__name__, tokenizer.get_vocab(), files, settings, added]
    return json.dumps(state, sort_keys=True)


def fast_backend(tokenizer: Any) -> Any | None:
    """A tokenizer's Rust backend, if it has one and nothing in between changes what it gives.

    Called directly, without offsets and without Python objects that nobody reads, it takes two thirds of the time.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    same = all(
        tokenizer(text, add_special_tokens=False)["input_ids"] == backend.encode(text, add_special_tokens=False).ids
        for text in PROBES
    )
    return backend if same else None


def without_dummy_prefix(backend: Any) -> Any:
    """A backend that puts a space before every text (Llama 2's, Mistral's), without it; any other as it is.

    An answer is encoded apart from its prompt, which it follows: "Yes" behind "[/INST] " is Yes, never a second space.
    """
    # Of the backend as a whole, which holds its vocabulary, writing and reading JSON takes half a second.
    steps = {name: component_state(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")}
    plain = {name: _without_prefix(step) for name, step in steps.items()}
    if plain == steps:
        return backend
    changed = type(backend).from_str(json.dumps({**json.loads(backend.to_str()), **plain}))
    changed.no_truncation()
    changed.no_padding()
    return changed


def component_state(component: Any) -> Any:
    """A normalizer or pre-tokenizer as JSON; None if there is none."""
    return None if component is None else json.loads(component.__getstate__())


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, less what puts a space before the text."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    for inner in ("normalizers", "pretokenizers"):
        if inner in step:
            return {**step, inner: [kept for one in step[inner] if (kept := _without_prefix(one)) is not None]}
    return step


def _from_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    model = folder / "tokenizer.model"
    bare = model.is_file() and not (folder / "tokenizer.json").is_file()
    if bare and not _installed():
        raise ConfigError(f"{folder}: its tokenizer.model needs the sentencepiece package. {INSTALL}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        differs = bare and not _agree(tokenizer, SentencePiece(model), (PLAIN,))
    except Exception as error:
        if not any((folder / name).is_file() for name in KNOWN_FILES):
            raise ConfigError(
                f"{folder}: holds no tokenizer (no {', no '.join(KNOWN_FILES)}). Give its folder as policy.tokenizer.name."
            ) from None
        reason = "its files are nested too deeply" if isinstance(error, RecursionError) else _one_line(error)
        raise ConfigError(f"{folder}: no tokenizer could be loaded: {reason}") from None
    if differs:
        raise ConfigError(
            f"{folder}: transformers gives other ids than the SentencePiece model in there (tokenizer.model). "
            f"Use the model itself: policy.tokenizer.name={model}"
        )
    return tokenizer


def _one_line(error: Exception) -> str:
    """What a library says, which may quote its file."""
    return " ".join(str(error).split())[:500]


def _read_sentencepiece(file: Path, place: str) -> SentencePiece:
    if not file.is_file():
        raise ConfigError(f"{place}: there is no such file. Give the path of a SentencePiece model.")
    if not _installed():
        raise ConfigError(f"{place}: a SentencePiece model needs the sentencepiece package. {INSTALL}")
    try:
        tokenizer = SentencePiece(file)
    except Exception:  # the library's errors differ from version to version
        raise ConfigError(
            f"{place}: this is no SentencePiece model, or it is damaged. Copy it again, or give a tokenizer's folder."
        ) from None
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"{place}: the model has no EOS symbol, so no completion could end. Train it with --eos_id, or use another."
        )
    return tokenizer


def _exported(folder: Path) -> bool:
    """Whether a folder holds what `SentencePiece.save_pretrained` writes."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and SAVED_AS in config


def _agree(tokenizer: Any, model: SentencePiece, texts: tuple[str, ...]) -> bool:
    return all(tokenizer(text, add_special_tokens=False)["input_ids"] == model(text)["input_ids"] for text in texts)


def _installed() -> bool:
    try:
        import_module("sentencepiece.sentencepiece_model_pb2")  # which imports protobuf
    except ImportError:
        return False
    return True
