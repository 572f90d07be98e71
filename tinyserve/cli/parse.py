"""The command line, the environment and a YAML file become one EngineConfig; the earlier of these wins.

The parser is generated from the declarations in config.py. It also takes what vLLM's does: underscores for dashes,
`--flag.key value` for one key of an object option, and the model as first argument. A wrong name is answered with the
nearest right one, and a flag of vLLM that tinyserve lacks is refused by name rather than guessed at, unless its value
asks for what happens anyway (`-tp 1`).

Before: config.py, options.py, elsewhere.py.  After: serve.py, plan.py.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..config import EngineConfig, build, environment_values, flags, refuse_unknown, unknown_option
from ..elsewhere import asks_nothing, is_switch, name_elsewhere
from ..errors import ConfigError, shown
from ..options import FALSE, TRUE, Flag

logger = logging.getLogger("tinyserve.cli")
Own = Callable[[Any], None] | None

_TITLES = {
    "model": "model", "load": "loading", "cache": "KV cache", "scheduler": "scheduler", "lora": "adapters",
    "runner": "execution", "server": "server", "log": "log",
}  # fmt: skip
_EPILOG = """\
Sizes take suffixes: 4k = 4000, 4K = 4096, 2GiB, 2GB. Object options take JSON, or one key: --hf-overrides.key 3.
Each option is also an environment variable, TINYSERVE_MAX_MODEL_LEN=4k, and a key of the YAML file given by --config.
The command line wins over the environment, the environment over the file."""


# Options that mean nothing where nobody listens: taken by every command, shown by `serve` alone.
OF_A_SOCKET = {
    "host", "port", "uds", "api_key", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "allowed_origins",
    "allowed_methods", "allowed_headers", "allow_credentials", "allowed_hosts", "enable_request_id_headers",
    "shutdown_timeout", "metrics_prefix", "sse_keep_alive_interval", "enable_admin_routes", "max_num_queued_reqs",
    "max_num_queued_tokens",
}  # fmt: skip

# What Kubernetes sets in every pod beside a service of our name: TINYSERVE_SERVICE_HOST, TINYSERVE_PORT_80_TCP_ADDR ...
_OF_KUBERNETES = re.compile(r"TINYSERVE_(SERVICE|PORT)_.*")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError in the place of printing the usage, which for a server is seventy flags."""

    def error(self, message: str) -> NoReturn:
        """Raises: ConfigError."""
        raise ConfigError(f"{message.rstrip('.')}.")

    def print_help(self, file: Any = None) -> None:
        """Print it, and tell who called when that fails, as the library does not."""
        print(self.format_help(), end="", file=file)


def read_config(argv: Sequence[str], prog: str, description: str, own: Own = None) -> EngineConfig:
    """Make the config from all sources. Prints the help and exits when asked for it.

    Args: own: adds options that the caller has already taken out of `argv` to the help of a command that has some.
    Raises: ConfigError: says which source is wrong, and what would be right.
    """
    argv, dotted = _normalised(argv)
    parser = make_parser(prog, description, own)
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
        if not _OF_KUBERNETES.fullmatch(name):
            hint = unknown_option(name.removeprefix("TINYSERVE_").lower())
            logger.warning("the environment variable %s is ignored: %s", name, hint)
    values = _checked(_from_file(file), f"{file}") if file else {}
    values |= _checked(environment, "environment")
    values |= _checked(_with_dotted(_with_lists(line), dotted), None)
    config = build(values)
    _check_variables(config.server.default_chat_template_kwargs)
    return config


def _check_variables(given: Mapping[str, Any]) -> None:
    """Raises: ConfigError: a variable that is the request's own, which would make every request a wrong one."""
    if not given:
        return
    from ..text.template import RESERVED

    if wrong := sorted(RESERVED & given.keys()):
        raise ConfigError(f"--default-chat-template-kwargs must not contain {wrong[0]!r}, which each request gives.")


def _with_lists(line: dict[str, Any]) -> dict[str, Any]:
    """A list given as one word is read as in the environment: separated by commas, or JSON."""
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in line.items()}


def make_parser(prog: str, description: str, own: Own = None) -> argparse.ArgumentParser:
    """The parser of all options, in groups, those of the command itself first."""
    width = min(shutil.get_terminal_size().columns, 130)
    parser = Parser(
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
    if own is not None:
        own(parser.add_argument_group("of this command"))
    groups = {name: parser.add_argument_group(title) for name, title in _TITLES.items()}
    for flag in flags():
        _add(groups[flag.group], flag, shown=prog.endswith(" serve") or flag.name not in OF_A_SOCKET)
    return parser


def _add(group: Any, flag: Flag, *, shown: bool) -> None:
    names = [flag.cli, *([flag.short] if flag.short else [])]
    text = flag.help.replace("%", "%%") + _default_text(flag) if shown else argparse.SUPPRESS
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
    """Flags with dashes and as the parser takes them, and the dotted ones taken out: (option, path inside it, value).

    Raises: ConfigError: a flag of vLLM that asks for something else than what happens anyway.
    """
    known = {flag.cli: flag for flag in flags()}
    plain: list[str] = []
    dotted: list[tuple[str, list[str], str]] = []
    rest = deque(argv)
    while rest:
        text = rest.popleft()
        if text == "--":
            plain += [text, *rest]
            break
        if re.fullmatch(r"-O\d", text):
            text = f"-O={text[2:]}"
        name, equals, value = text.partition("=")
        if name.startswith("-") and (theirs := name_elsewhere(name)):
            _pass_over(theirs, name, value if equals else None, rest)
            continue
        if not name.startswith("--"):
            plain.append(text)
            continue
        option, *path = name.split(".")
        option = "--" + option[2:].replace("_", "-")
        flag = known.get(option)
        if path and flag is not None and flag.type is dict:
            if not (equals or rest) or not all(path):
                raise ConfigError(f"{name}: a value is needed." if all(path) else f"{name}: a key is missing.")
            dotted.append((flag.name, path, value if equals else rest.popleft()))
        else:
            plain.append(_with_value(".".join([option, *path]), value if equals else None, flag, rest))
    return plain, dotted


def _pass_over(theirs: str, name: str, value: str | None, rest: deque[str]) -> None:
    """Take an option of vLLM and its value from the command line. Raises: ConfigError: it would change something."""
    follows = rest[0].lower() if rest and not rest[0].startswith("-") else None
    if is_switch(theirs):
        negative = name.startswith(("--no-", "--no_"))
        if value is None:
            value = rest.popleft() if follows in TRUE + FALSE else "true"
        value = str((value.lower() in TRUE) != negative)
    elif value is None and follows is not None:
        value = rest.popleft()
    if value is None or not asks_nothing(theirs, value):
        raise ConfigError(unknown_option(name))


def _with_value(option: str, value: str | None, flag: Flag | None, rest: deque[str]) -> str:
    """The option as one word: a switch as --name or --no-name, a negative number bound to its name."""
    follows = rest[0] if rest else ""
    if flag is not None and flag.type is bool:
        if value is None and follows.lower() in TRUE + FALSE:
            value = rest.popleft()
        return option if value is None or flag.convert(value) else f"--no-{option[2:]}"
    if option.startswith("--no-") and (value is not None or follows.lower() in TRUE + FALSE):
        raise ConfigError(f"{option} takes no value: leave out {shown(follows if value is None else value)}.")
    if value is None and flag is not None and not flag.is_list and re.match(r"-\d", follows):
        value = rest.popleft()
    return option if value is None else f"{option}={value}"


def _with_dotted(line: dict[str, Any], dotted: Iterable[tuple[str, list[str], str]]) -> dict[str, Any]:
    known = {flag.name: flag for flag in flags()}
    for name, path, text in dotted:
        target = line[name] = known[name].convert(line.get(name, {}))
        where = f"{known[name].cli}.{'.'.join(path)}"
        for key in path[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{where}: {key} already has a value.")
        target[path[-1]] = _yaml(text, where)
    return line


def _yaml(text: str, where: str) -> Any:
    """A value as YAML reads it. Raises: ConfigError: it cannot be read, in one line; a name stands there twice."""
    import yaml

    try:
        tree = yaml.compose(text, yaml.SafeLoader)
        if isinstance(tree, yaml.MappingNode):
            names = [str(key.value).replace("-", "_") for key, _ in tree.value]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ConfigError(f"{where}: {twice} stands there twice.")
        return yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"{where}: brackets are nested too deeply.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {' '.join(str(error).split())}.") from None


def _from_file(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: is no text in UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from None
    values = _yaml(text, f"--config {path}")
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {path}: must hold options by name, such as port: 8000; got {shown(values)}.")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _checked(values: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """The values of one source, converted. Raises: ConfigError: names the source."""
    known = {flag.name: flag for flag in flags()}
    checked = {}
    for name, value in values.items():
        try:
            if name not in known:
                refuse_unknown(name, value)
                continue
            checked[name] = known[name].convert(value)
            if name == "api_key" and not checked[name] and source != "environment":  # where empty means not set
                raise ConfigError("--api-key is empty: everybody could ask. Set it, or leave the option out.")
        except ConfigError as error:
            where = known[name].env if source == "environment" else source  # no name of the environment is unknown
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
    return checked


def chosen(config: EngineConfig) -> dict[str, Any]:
    """The options that differ from their defaults, by name; keys are not shown."""
    found = {}
    for flag in flags():
        value = getattr(getattr(config, flag.group), flag.name)
        if value != flag.default:
            found[flag.name] = "***" if flag.secret else value
    return found
