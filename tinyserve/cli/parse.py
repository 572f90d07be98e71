"""The command line, the environment and a YAML file become one EngineConfig; the earlier of these wins.

The parser is generated from the declarations in config.py. It also takes what vLLM's does: underscores for dashes,
`--flag.key value` for one key of an object option, and the model as first argument. A wrong name is answered with the
nearest right one, and a flag of vLLM that tinyserve lacks is refused by name rather than guessed at.

Before: config.py, options.py.  After: serve.py, plan.py.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config import EngineConfig, build, environment_values, flags, unknown_option
from ..errors import ConfigError
from ..options import Flag

logger = logging.getLogger("tinyserve.cli")

_TITLES = {
    "model": "model", "load": "loading", "cache": "KV cache", "scheduler": "scheduler", "lora": "adapters",
    "runner": "execution", "server": "server", "log": "log",
}  # fmt: skip
_EPILOG = """\
Sizes take suffixes: 4k = 4000, 4K = 4096, 2GiB, 2GB. Object options take JSON, or one key: --hf-overrides.key 3.
Each option is also an environment variable, TINYSERVE_MAX_MODEL_LEN=4k, and a key of the YAML file given by --config.
The command line wins over the environment, the environment over the file."""


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError in the place of printing the usage of seventy flags."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_config(argv: Sequence[str], prog: str, description: str) -> EngineConfig:
    """Make the config from all sources. Prints the help and exits when asked for it.

    Raises: ConfigError: says which source is wrong, and what would be right.
    """
    argv, dotted = _normalised(argv)
    parser = make_parser(prog, description)
    found, rest = parser.parse_known_args(argv)
    if rest:
        wrong = next((text for text in rest if text.startswith("-")), None)
        raise ConfigError(unknown_option(wrong.partition("=")[0]) if wrong else f"unexpected argument {rest[0]!r}.")
    line = dict(vars(found))
    file = line.pop("config", None)
    positional = line.pop("positional_model", None)
    if positional is not None:
        if line.get("model", positional) != positional:
            raise ConfigError(f"two models are given: {positional!r} and --model {line['model']!r}.")
        line["model"] = positional
    environment, unknown = environment_values()
    for name in unknown:
        logger.warning("environment variable %s is no option of tinyserve and is ignored", name)
    values = _checked(_from_file(file), f"{file}") if file else {}
    values |= _checked(environment, "environment")
    values |= _checked(_with_dotted(_with_lists(line), dotted), None)
    return build(values)


def _with_lists(line: dict[str, Any]) -> dict[str, Any]:
    """A list given as one word is read as in the environment: separated by commas, or JSON."""
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in line.items()}


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of all options, in groups."""
    width = min(shutil.get_terminal_size().columns, 130)
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [options]",
        description=description,
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=width),
    )
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options")
    groups = {name: parser.add_argument_group(title) for name, title in _TITLES.items()}
    for flag in flags():
        _add(groups[flag.group], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    names = [flag.cli, *([flag.short] if flag.short else [])]
    text = flag.help.replace("%", "%%") + _default_text(flag)
    if flag.type is bool:
        group.add_argument(*names, dest=flag.name, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices and len(flag.choices) < 5 else _metavar(flag)
    group.add_argument(*names, dest=flag.name, metavar=metavar, nargs="+" if flag.is_list else None, help=text)


def _default_text(flag: Flag) -> str:
    if flag.choices and len(flag.choices) >= 5:
        return f" ({', '.join(flag.choices)}) [{flag.default}]"
    if flag.default in (None, "", (), {}) or "[" in flag.help:
        return ""
    if isinstance(flag.default, bool):
        return " [yes]" if flag.default else " [no]"
    shown = " ".join(map(str, flag.default)) if flag.is_list else str(flag.default)
    return f" [{shown}]".replace("%", "%%")


def _metavar(flag: Flag) -> str:
    if flag.type is dict:
        return "JSON"
    return {int: "N", float: "X"}.get(flag.type, "X")


def _normalised(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str], str]]]:
    """Flags with dashes, and the dotted ones taken out: (option, path inside it, value)."""
    objects = {flag.cli for flag in flags() if flag.type is dict}
    plain: list[str] = []
    dotted: list[tuple[str, list[str], str]] = []
    rest = iter(argv)
    for text in rest:
        name, equals, value = text.partition("=")
        if not name.startswith("--") or text == "--":
            plain.append(text)
            continue
        option, *path = name.split(".")
        option = "--" + option[2:].replace("_", "-")
        if path and option in objects:
            value = value if equals else next(rest, None)
            if value is None:
                raise ConfigError(f"{name}: a value is needed.")
            dotted.append((option[2:].replace("-", "_"), path, value))
        else:
            plain.append(".".join([option, *path]) + equals + value)
    return plain, dotted


def _with_dotted(line: dict[str, Any], dotted: Iterable[tuple[str, list[str], str]]) -> dict[str, Any]:
    import yaml

    known = {flag.name: flag for flag in flags()}
    for name, path, text in dotted:
        target = line[name] = known[name].convert(line.get(name, {}))
        for key in path[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{known[name].cli}.{'.'.join(path)}: {key} already has a value.")
        target[path[-1]] = yaml.safe_load(text)
    return line


def _from_file(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {path}: must hold options by name, got {type(values).__name__}.")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _checked(values: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """The values of one source, converted. Raises: ConfigError: names the source."""
    known = {flag.name: flag for flag in flags()}
    checked = {}
    for name, value in values.items():
        try:
            if name not in known:
                raise ConfigError(unknown_option(name))
            checked[name] = known[name].convert(value)
            if name == "api_key" and not checked[name] and source != "environment":  # where empty means not set
                raise ConfigError("--api-key is empty: everybody could ask. Set it, or leave the option out.")
        except ConfigError as error:
            where = known[name].env if source == "environment" else source
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
    return checked


def chosen(config: EngineConfig) -> dict[str, Any]:
    """The options that differ from their defaults, by name; keys are not shown."""
    found = {}
    for flag in flags():
        value = getattr(getattr(config, flag.group), flag.name)
        if value != flag.default:
            found[flag.name] = "***" if flag.name == "api_key" else value
    return found
