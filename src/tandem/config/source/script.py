"""Reads the settings of a TRL training script from its syntax tree. The script is never run or imported."""

import ast
import warnings
from pathlib import Path
from typing import Any

from tandem.config.compat.records import nested
from tandem.config.source.files import TreeAndOrigins
from tandem.config.source.literals import Literals, NotLiteralError
from tandem.config.source.script_datasets import ScriptDataset, UnreadableDatasetError, dataset_of
from tandem.config.source.statements import Statements
from tandem.config.source.yaml_text import read_limited
from tandem.errors import ConfigError, one_line
from tandem.terminal.printable import not_utf8

MAX_CHARACTERS = 1024 * 1024
CONFIGS = ("DPOConfig", "TrainingArguments")
FIRST_ARGUMENTS = {
    "DPOTrainer": ("model", "ref_model", "args"),
    "DPOConfig": ("output_dir",),
    "TrainingArguments": ("output_dir",),
    "LoraConfig": (),
    "BitsAndBytesConfig": (),
    "from_pretrained": ("pretrained_model_name_or_path",),
    "load_dataset": ("path", "name"),
    "train_test_split": ("test_size", "train_size", "shuffle", "stratify_by_column", "seed"),
    "shuffle": ("seed",),
}
PAIRS_HELD_OUT = 0.25  # the default of train_test_split
NOT_RUN = ("callbacks", "data_collator", "compute_metrics", "optimizers", "preprocess_logits_for_metrics", "model_init")
TOKENIZERS = ("processing_class", "tokenizer")
NO_CALL = (
    "no DPOTrainer(...) and no DPOConfig(...) is called in it. If the script parses flags, give them to tandem: "
    "tandem train --from-format trl -- --FLAG VALUE."
)
SHOWN = 20  # problems in a message


def is_script(path: str) -> bool:
    return path.endswith(".py")


def read_script(path: Path) -> TreeAndOrigins:
    """Return the settings of a script by TRL's names, and the line of each. Raise ConfigError if one is not a literal value."""
    return _Script(path).read()


class _Script:
    """A script, the settings found in it, and those that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree, source = _parse(path)
        self.literals = Literals(self.tree, source)
        self.statements = Statements(self.tree)
        self.datasets: dict[str, ScriptDataset] = {}
        self.settings: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []

    def read(self) -> TreeAndOrigins:
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        trainers = [call for call in calls if _name(call) == "DPOTrainer"]
        configs = [call for call in calls if _name(call) in CONFIGS]
        several = trainers if len(trainers) > 1 else configs if not trainers and len(configs) > 1 else []
        if several:
            lines = " and ".join(str(call.lineno) for call in several[:3])
            raise ConfigError(
                f"{self.path}: {_name(several[0])}(...) is called several times, on lines {lines}, so the script has several "
                "runs. Keep one in a copy of the script."
            )
        if trainers:
            self._trainer(trainers[0])
        elif configs:
            self._config(configs[0], "args")
        else:
            raise ConfigError(f"{self.path}: {NO_CALL}")
        if self.problems:
            count = "a setting" if len(self.problems) == 1 else f"{len(self.problems)} settings"
            lines = "\n".join(f"  {line}" for line in self.problems[:SHOWN])
            raise ConfigError(
                f"{self.path}: {count} cannot be read, because the script is not run. Write literal values in a copy.\n{lines}"
            )
        return nested(self.settings), self.origins

    def _trainer(self, call: ast.Call) -> None:
        for name, node in self._arguments(call).items():
            found = self.literals.follow(node)
            if isinstance(found, ast.Constant) and found.value is None:
                continue
            if name == "model":
                self._model(found, name)
            elif name == "args":
                self._config(found, name)
            elif name == "ref_model" or name in TOKENIZERS:
                self._named(found, name)
            elif name in ("train_dataset", "eval_dataset"):
                self._dataset(node, name)
            elif name == "peft_config":
                self._lora(found, name)
            elif name == "quantization_config":
                self._call(found, name, ("BitsAndBytesConfig",), "model_init_kwargs.quantization_config.")
            elif name in NOT_RUN:
                self._problem(node, f"{name} is code, which tandem does not run. Remove it")
            else:
                self._set(name, node)  # of releases before 0.9: beta, max_length and others
        self._check_parts()

    def _config(self, node: ast.expr, what: str) -> None:
        if not self._call(node, what, CONFIGS, ""):
            return
        names = {name for name, values in self.literals.assigned.items() if node in values}
        for statement in ast.walk(self.tree):
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id in names
                    ):
                        self._set(target.attr, statement.value)

    def _model(self, node: ast.expr, what: str) -> None:
        if isinstance(node, ast.Call) and _name(node) == "get_peft_model" and len(node.args) == 2:
            self._model(self.literals.follow(node.args[0]), what)
            self._lora(self.literals.follow(node.args[1]), "peft_config")
        elif isinstance(node, ast.Call) and _name(node) == "from_pretrained" and "Peft" not in _owner(node):
            for name, value in self._arguments(node).items():
                if name == "quantization_config":
                    prefix = "model_init_kwargs.quantization_config."
                    self._call(self.literals.follow(value), name, ("BitsAndBytesConfig",), prefix)
                elif name == FIRST_ARGUMENTS["from_pretrained"][0]:
                    self._set("model_name_or_path", value)
                else:
                    self._set(f"model_init_kwargs.{name}", value)
        elif isinstance(node, ast.Call) and _name(node) == "from_pretrained":
            self._problem(node, f"{what} is a trained adapter. Set policy.lora.adapter to its folder")
        else:
            self._set("model_name_or_path", node, what)

    def _named(self, node: ast.expr, what: str) -> None:
        """A reference model or a tokenizer: its name alone counts."""
        if isinstance(node, ast.Call) and _name(node) == "from_pretrained":
            arguments = self._arguments(node)
            node = arguments.get(FIRST_ARGUMENTS["from_pretrained"][0], node)
        self._set("processing_class" if what in TOKENIZERS else what, node, what)

    def _dataset(self, node: ast.expr, what: str) -> None:
        try:
            found = dataset_of(node, self.literals, self.statements)
        except UnreadableDatasetError as error:
            self._problem(error.node, f"{what}: {error}")
            return
        self.datasets[what] = found
        if found.part == "test":
            self._put(f"{what}.part", "test", node)
            return
        self._call(found.load, what, ("load_dataset",), f"{what}.")
        if found.split is not None:
            self._set(f"{what}.split", found.split)
        if found.rows is not None:
            self._set(f"{what}.select", found.rows)
        if found.shuffle is not None:
            self._call(found.shuffle, what, ("shuffle",), f"{what}.shuffle.")
        if found.held_out is not None:
            self._put(f"{what}.train_test_split.test_size", PAIRS_HELD_OUT, found.held_out)
            self._call(found.held_out, what, ("train_test_split",), f"{what}.train_test_split.")

    def _check_parts(self) -> None:
        """Note a problem if a part of train_test_split(...) is used for anything else than what it is for."""
        train, validation = (self.datasets.get(f"{name}_dataset") for name in ("train", "eval"))
        if train is not None and train.part == "test":
            self._problem(train.load, 'train_dataset is the part that is held out. Take the part ["train"]')
        elif validation is not None and validation.part == "train":
            self._problem(validation.load, 'eval_dataset is the part that is trained on. Take the part ["test"]')
        elif validation is not None and validation.part == "test" and not validation.is_other_part_of(train):
            self._problem(
                validation.load,
                'eval_dataset is the part ["test"] of train_test_split(...), and train_dataset is not its part ["train"]',
            )
        elif train is not None and train.held_out is not None and validation is not None and not validation.part:
            self._problem(
                validation.load,
                "eval_dataset is another dataset than train_dataset.train_test_split(...) holds out. tandem validates on one of "
                "the two. Remove the other",
            )

    def _lora(self, node: ast.expr, what: str) -> None:
        if self._call(node, what, ("LoraConfig",), "peft_config."):
            self._put("peft_config.peft_type", "LORA", node)

    def _call(self, node: ast.expr, what: str, names: tuple[str, ...], prefix: str) -> bool:
        """Set the arguments of a call of one of these names. Return False, and note the problem, if it is none."""
        if not isinstance(node, ast.Call) or _name(node) not in names:
            self._problem(node, f"{what} is not {names[0]}(...) with literal values")
            return False
        for name, value in self._arguments(node).items():
            self._set(f"{prefix}{name}", value)
        return True

    def _arguments(self, call: ast.Call) -> dict[str, ast.expr]:
        """The arguments of a call by name, those given by position too."""
        known = FIRST_ARGUMENTS.get(_name(call), ())
        found: dict[str, ast.expr] = dict(zip(known, call.args, strict=False))
        for node in call.args[len(known) :]:
            self._problem(node, f"an argument of {_name(call)}(...) without a name. Give its name")
        for keyword in call.keywords:
            if keyword.arg is None:
                self._problem(keyword.value, f"**{self._text(keyword.value)} of {_name(call)}(...) hides its names")
            else:
                found[keyword.arg] = keyword.value
        return found

    def _set(self, key: str, node: ast.expr, what: str | None = None) -> None:
        try:
            self._put(key, self.literals.value(node), node)
        except NotLiteralError as error:
            self._problem(node, f"{what or key} = {self._text(node)}: {error}")

    def _put(self, key: str, value: Any, node: ast.expr) -> None:
        self.settings[key] = value
        self.origins[key] = f"{self.path}:{node.lineno}"

    def _problem(self, node: ast.expr, text: str) -> None:
        self.problems.append(f"{self.path}:{node.lineno}: {text}.")

    def _text(self, node: ast.expr) -> str:
        """The source of a value, on one line and shortened. Empty for values that no message shows: finding it takes long."""
        if len(self.problems) >= SHOWN:
            return ""
        text = " ".join((ast.get_source_segment(self.literals.source, node) or "...").split())
        return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(path: Path) -> tuple[ast.Module, str]:
    try:
        text = read_limited(path, MAX_CHARACTERS)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such script.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {not_utf8(error)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: not readable as a script: {one_line(error)}") from None
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path}: the script has more than {MAX_CHARACTERS:,} characters. Is it a training script?")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise ConfigError(f"{where}: not readable as Python: {error.msg}.") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{path}: not readable as Python: {one_line(error) or type(error).__name__}.") from None
    return tree, text


def _name(call: ast.Call) -> str:
    """The last part of what is called: from_pretrained of AutoModelForCausalLM.from_pretrained(...)."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
