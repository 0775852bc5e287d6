"""Loads a tokenizer from a folder or from a SentencePiece model file, and checks that it is safe to use."""

import hashlib
import json
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tandem.data.store.pool import WorkerDied, WorkerStalled, run_in_process
from tandem.data.text.sentencepiece_model import EXPORT_MARKER, SentencePiece
from tandem.errors import ConfigError, one_line
from tandem.storage.cache import cache_dir, content_of, fingerprint, refuse_outside
from tandem.terminal.commands import install_command

INSTALL_HINT = f"In the tandem checkout, run {install_command('sentencepiece')}."
KNOWN_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
READ_SUFFIXES = (".json", ".model", ".txt", ".jinja")
MORE_TEMPLATES = "additional_chat_templates"  # transformers reads the templates in this folder too
# Limits on loading and testing a tokenizer: a constant, plus a rate for the size of its files (18 MB of merges took 7 seconds).
LOAD_SECONDS, BYTES_PER_SECOND = 60.0, 100_000
LOAD_BYTES, BYTES_PER_BYTE = 4 * 1024**3, 200
# A conversion of a SentencePiece model must give the same ids for this text.
PLAIN_TEXT = "How far is the moon?"
# Settings of a tokenizer that do not change how it encodes a text, or that have a separate fingerprint.
IGNORED_SETTINGS = (
    "backend", "chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_max_length",
    "name_or_path", "padding_side", "processor_class", "tokenizer_class", "transformers_version", "truncation_side",
)  # fmt: skip
# Plain text, then texts that conversions often get wrong.
PROBES = (PLAIN_TEXT, "  two  spaces,\n\ta tab\n", "é 東京 😀 ｶﾞ", "<extra_id_1>User\nHi\n<extra_id_1>Assistant\n")


def load_tokenizer(name: Path) -> Any:
    """Load a tokenizer from a folder or from a SentencePiece model (a file ending in .model). It must have an EOS token.

    Malicious files can make the libraries hang or take all memory. So a tokenizer that has not been loaded before is
    first loaded in a separate process, which can be killed.
    """
    files = [name] if name.is_file() else _files_of(name)
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ConfigError(f"{file}: a pipe or a device, not a plain file. Download the tokenizer again.")
    folder = name.parent if name.is_file() else name
    contents = {str(file.relative_to(folder)): content_of(file) for file in files if file.is_file()}
    passed_marker = cache_dir() / "tokenizers" / fingerprint(contents, version("tokenizers"), version("transformers"))
    if not passed_marker.exists():
        _try_out(name, sum(file.stat().st_size for file in files if file.is_file()))
        with suppress(OSError):
            passed_marker.parent.mkdir(parents=True, exist_ok=True)
            passed_marker.touch()
    return _load(name)


def _files_of(folder: Path) -> list[Path]:
    """Return the files in a folder that transformers may read for a tokenizer.

    Raise a ConfigError if a file is a link to outside the folder.
    """
    inside = (*folder.glob("*"), *folder.glob(f"{MORE_TEMPLATES}/*"))
    files = sorted(file for file in inside if file.suffix in READ_SUFFIXES)
    for file in files:
        refuse_outside(folder, file)
    return files


def _try_out(name: Path, num_bytes: int) -> None:
    """Load and test a tokenizer in a separate process, which is killed if it takes too much time or memory."""

    def work() -> None:
        from tandem.data.text.word_cache import WordEncoder  # here, because it imports this module

        tokenizer = _load(name)
        _check_usable(tokenizer, name)
        if (backend := fast_backend(tokenizer)) is not None:
            WordEncoder(backend)
            WordEncoder(without_dummy_prefix(backend))

    seconds, memory = LOAD_SECONDS + num_bytes / BYTES_PER_SECOND, LOAD_BYTES + num_bytes * BYTES_PER_BYTE
    try:
        run_in_process(work, seconds, memory)
    except WorkerStalled:
        raise ConfigError(
            f"{name}: loading and testing the tokenizer took over {seconds:.0f} seconds. Use another tokenizer with "
            "policy.tokenizer.name."
        ) from None
    except (WorkerDied, MemoryError):
        raise ConfigError(
            f"{name}: loading and testing the tokenizer crashed, or took over {memory / 2**30:.1f} GiB of memory. Use another "
            "tokenizer with policy.tokenizer.name."
        ) from None


def _check_usable(tokenizer: Any, name: Path) -> None:
    """Raise a ConfigError if a tokenizer cannot encode and decode texts. Loading a tokenizer does not check all its settings."""
    try:
        if not isinstance(tokenizer, SentencePiece):
            tokenizer.get_vocab()
            tokenizer(list(PROBES), add_special_tokens=False)
        for text in PROBES:
            tokenizer.decode(tokenizer(text)["input_ids"])
    except MemoryError:
        raise
    except Exception as error:
        reason = one_line(error)
        raise ConfigError(
            f"{name}: the tokenizer cannot encode and decode a text ({type(error).__name__}: {reason}). Download it again, or "
            "use another with policy.tokenizer.name."
        ) from None


def _load(name: Path) -> Any:
    if name.suffix == ".model" and not name.is_dir():
        return _read_sentencepiece(name, f"policy.tokenizer.name = {name}")
    if _was_exported(name):
        tokenizer = _read_sentencepiece(name / "tokenizer.model", str(name))
        tokenizer.chat_template = _from_folder(name).chat_template
        return tokenizer
    tokenizer = _from_folder(name)
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"{name}: the tokenizer has no EOS token, so no completion could end. Set eos_token in tokenizer_config.json."
        )
    return tokenizer


def check_export(tokenizer: Any, name: Path, model_config: Any) -> None:
    """Raise a ConfigError if `AutoTokenizer` would give other ids than the SentencePiece model after an export.

    For some model types, transformers ignores the tokenizer class that is set in the exported folder.
    """
    from transformers import AutoTokenizer

    if not isinstance(tokenizer, SentencePiece):
        return
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            same = _ids_agree(AutoTokenizer.from_pretrained(folder), tokenizer, PROBES)
        except Exception:  # transformers may choose a class that cannot read these files
            same = False
    if not same:
        raise ConfigError(
            f"policy.tokenizer.name = {name}: transformers would load this SentencePiece model differently after it is "
            f"exported with a {model_config.model_type} model. Give a folder with a tokenizer.json instead."
        )


def state_of(tokenizer: Any) -> str:
    """Return a hash of everything that determines how a tokenizer encodes texts."""
    if isinstance(tokenizer, SentencePiece):
        return hashlib.sha256(tokenizer.model).hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else _state_in_python(tokenizer)
    return hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()


def _state_in_python(tokenizer: Any) -> str:
    """Return the state of a tokenizer that is implemented in Python: its class, vocabulary, files, settings and added tokens.

    The vocabulary alone may not be enough. In CTRL, for example, the file merges.txt determines how a text is split.
    """
    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotImplementedError):  # it has no files
            tokenizer.save_vocabulary(folder)
        files = {file.name: content_of(file) for file in sorted(Path(folder).iterdir())}
    others = {*IGNORED_SETTINGS, *tokenizer.special_tokens_map}  # special tokens are in added_tokens_decoder
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | int | float) and name not in others and not name.endswith("_file")
    }
    added = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    state = [type(tokenizer).__name__, tokenizer.get_vocab(), files, settings, added]
    return json.dumps(state, sort_keys=True)


def fast_backend(tokenizer: Any) -> Any | None:
    """Return the Rust backend of a tokenizer if it gives the same ids as the tokenizer, else None.

    Calling the backend directly takes two thirds of the time, because offsets and other unused objects are not created.
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
    """Return a backend that does not add a space before every text.

    The backends of Llama 2 and Mistral add such a space. For such a backend, return a changed copy; otherwise return
    `backend`. The result encodes completions, which continue a prompt: "Yes" after "[/INST] " gives Yes, without a second
    space.
    """
    # Only the components are compared: JSON of the full backend, with its vocabulary, takes half a second.
    steps = {name: component_state(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")}
    plain = {name: _without_prefix(step) for name, step in steps.items()}
    if plain == steps:
        return backend
    changed = type(backend).from_str(json.dumps({**json.loads(backend.to_str()), **plain}))
    changed.no_truncation()
    changed.no_padding()
    return changed


def component_state(component: Any) -> Any:
    """Return a normalizer or pre-tokenizer as JSON, or None if `component` is None."""
    return None if component is None else json.loads(component.__getstate__())


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer (as JSON) without the step that adds a space before the text."""
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
    if bare and not _sentencepiece_installed():
        raise ConfigError(f"{folder}: its tokenizer.model needs the sentencepiece package. {INSTALL_HINT}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        differs = bare and not _ids_agree(tokenizer, SentencePiece(model), (PLAIN_TEXT,))
    except Exception as error:
        if not any((folder / name).is_file() for name in KNOWN_FILES):
            raise ConfigError(
                f"{folder}: there is no tokenizer (no {', no '.join(KNOWN_FILES)}). Set policy.tokenizer.name to the folder of "
                "a tokenizer."
            ) from None
        reason = "its files are nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded: {reason}.") from None
    if differs:
        raise ConfigError(
            f"{folder}: transformers gives other ids than the SentencePiece model in this folder (tokenizer.model). "
            f"Use the model directly: policy.tokenizer.name={model}"
        )
    return tokenizer


def _read_sentencepiece(file: Path, place: str) -> SentencePiece:
    if not file.is_file():
        raise ConfigError(f"{place}: no such file. Give the path of a SentencePiece model.")
    if not _sentencepiece_installed():
        raise ConfigError(f"{place}: a SentencePiece model needs the sentencepiece package. {INSTALL_HINT}")
    try:
        tokenizer = SentencePiece(file)
    except Exception:  # the library's errors differ from version to version
        raise ConfigError(
            f"{place}: not a SentencePiece model, or damaged. Copy it again, or give the folder of a tokenizer."
        ) from None
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"{place}: the model has no EOS symbol, so no completion could end. Train it with --eos_id, or use another."
        )
    return tokenizer


def _was_exported(folder: Path) -> bool:
    """Whether a folder was written by `SentencePiece.save_pretrained`."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and EXPORT_MARKER in config


def _ids_agree(tokenizer: Any, model: SentencePiece, texts: tuple[str, ...]) -> bool:
    return all(tokenizer(text, add_special_tokens=False)["input_ids"] == model(text)["input_ids"] for text in texts)


def _sentencepiece_installed() -> bool:
    try:
        import_module("sentencepiece.sentencepiece_model_pb2")  # it imports protobuf
    except ImportError:
        return False
    return True
