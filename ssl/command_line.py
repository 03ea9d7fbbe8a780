"""A recipe's command line: schema defaults, then a YAML, then `key=value`, each mistake refused by name.

    config = read(Config, argv, program="recipes/dino_xcit.py", configs=CONFIGS, default="photo_tiles")

Nothing here imports torch, so that `--help` and a typo answer at once.
"""

import dataclasses
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nestling.ssl.errors import Stopped, UserError
from nestling.ssl.keys import Key, keys_of, legal, nearest, worded
from nestling.ssl.manual import help_text
from nestling.ssl.settings import (
    Setting,
    assign,
    check_values,
    example,
    owner,
    read_value,
    read_yaml,
    refuse_unknown,
)

T = TypeVar("T")
Default = str | Path | None | Callable[[Mapping[str, str]], str | Path | None]
SECONDS_FOR_THE_FIRST = 3.0
KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def read(
    schema: type[T],
    argv: Sequence[str],
    *,
    program: str,
    about: str = "",
    configs: Path | None = None,
    default: Default = None,
    positional: Sequence[str] = (),
    options: Sequence[str] = (),
) -> T:
    """The config that a command line means; `--help` prints every key and exits.

    Args:
        schema: a dataclass; its keys with their legal values are what may be set.
        program: the script as a user calls it, for the usage line.
        about: what the script does, printed above the keys.
        configs: the folder where `--config NAME` finds NAME.yaml.
        default: the config without `--config`: a name, a file, None for the schema's defaults, or a
            function that picks one of these from the raw `key=value` pairs.
        positional: keys that may be given by position, as `eval_knn.py CHECKPOINT`.
        options: keys that may also be given as `--key VALUE`, as `export.py CHECKPOINT --to onnx`.

    Raises:
        UserError: one sentence about the first mistake found.
    """
    keys = keys_of(schema)
    if any(argument in ("-h", "--help") for argument in argv):
        print(help_text(schema, program, about, positional, known_configs(configs), options), flush=True)
        raise SystemExit(0)
    chosen, settings = _parse(list(argv), keys, positional, options)
    base: str | Path | None = chosen
    if chosen is None:
        base = default({item.name: item.text for item in settings}) if callable(default) else default
    if base is not None:
        settings = read_yaml(_find(base, configs), keys, configs) + settings
    config = _merged(schema, keys, settings, positional, options)
    check_values(config)
    return config


def _merged(
    schema: type[T],
    keys: Mapping[str, Key],
    settings: list[Setting],
    positional: Sequence[str],
    options: Sequence[str],
) -> T:
    """Lay the settings over the schema's defaults, in their order."""
    container = OmegaConf.structured(schema)
    try:
        for setting in settings:
            assign(container, keys, setting)
        missing = OmegaConf.missing_keys(container)
        if not missing:
            return cast(T, OmegaConf.to_object(container))
    except OmegaConfBaseException as error:  # an interpolation as in out='runs/${backbone.nam}'
        name = str(error.full_key or error.key)
        written = f"{name}={next((item.text for item in settings if item.name == name), '')}"
        raise UserError(f"{written} can't be resolved: {str(error.msg).splitlines()[0]}") from None
    name = next(name for name in keys if name in missing)
    wanted = name.upper() if name in positional else f"{name}=VALUE"
    wanted = f"--{name} NAME" if name in options else wanted
    raise UserError(f"{name} is missing; add {wanted}: {keys[name].meaning}")


def write(config: Any, path: Path) -> None:
    """Write a config as YAML that reads back to an equal one."""
    container = OmegaConf.create(_escaped(dataclasses.asdict(config)))
    for key in keys_of(type(config)).values():
        if key.words:
            OmegaConf.update(container, key.name, worded(key, OmegaConf.select(container, key.name)))
    path.write_text(OmegaConf.to_yaml(container), encoding="utf-8")


def run(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Call a recipe's main; end what was to be foreseen in one line without a traceback.

    Exit codes: 2 a user's mistake, 130 Ctrl-C before or after training, else that of `Stopped`, which has
    said its line already.
    """
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        if _beside_others():
            _end(0)
    except UserError as error:
        _leave(f"error: {error}", 2)
    except Stopped as stopped:
        _end(stopped.code)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BrokenPipeError:  # `--help | head`; Python would complain again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _leave(message: str, code: int) -> NoReturn:
    """Say it once: a launcher ends the other processes as soon as one has left.

    So whoever is still there a little later saw what process 0 did not, and speaks for itself.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(SECONDS_FOR_THE_FIRST)
        message = f"process {rank}: {message}"
    print(message, file=sys.stderr, flush=True)
    _end(code)


def _end(code: int) -> NoReturn:
    """Exit; beside other processes without Python's shutdown.

    DDP keeps threads of gloo beyond their process group, and one that lets go of a tensor while Python
    shuts down aborts the process: a finished run would end with code 134.
    """
    sys.stdout.flush()
    if _beside_others():
        os._exit(code)
    sys.exit(code)


def _beside_others() -> bool:
    """Whether a launcher started other processes too."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def known_configs(configs: Path | None) -> list[str]:
    """The names that `--config` takes."""
    return sorted(path.stem for path in configs.glob("*.yaml")) if configs else []


def _parse(
    arguments: list[str], keys: Mapping[str, Key], positional: Sequence[str], options: Sequence[str]
) -> tuple[str | None, list[Setting]]:
    """Split arguments into the name after `--config` and the settings."""
    flags = {f"--{name}": keys[name] for name in options}
    chosen: str | None = None
    settings: dict[str, Setting] = {}
    while arguments:
        argument = arguments.pop(0)
        flag = argument.partition("=")[0]
        if flag in flags:
            argument = f"{flags[flag].name}={_following(argument, arguments, _wanted(flags[flag]))}"
        elif flag == "--config":
            name = _following(argument, arguments, "a name or a file, as in --config NAME")
            if chosen is not None:
                raise UserError(f"--config is given twice: {chosen} and {name}")
            chosen = name
            continue
        name, equals, text = argument.partition("=")
        free = [place for place in positional if place not in settings]
        is_setting = name in keys or (equals and KEY.fullmatch(name))
        if free and not is_setting and not argument.startswith("-"):
            name, text = free[0], argument
        elif argument.startswith("-") or not text:
            raise UserError(_misspelt(argument, arguments, keys, flags))
        refuse_unknown(Setting(name, None, text), keys)
        if name in settings:
            raise UserError(f"{name} is given twice: {name}={settings[name].text} and {name}={text}")
        settings[name] = Setting(name, read_value(text, keys[owner(name, keys)], name), text)
    return chosen, list(settings.values())


def _following(argument: str, rest: list[str], wanted: str) -> str:
    """What follows an option such as `--config`, in the same argument or the next."""
    flag, equals, name = argument.partition("=")
    name = name if equals else rest.pop(0) if rest else ""
    if not name or name.startswith("-") or (KEY.fullmatch(name.partition("=")[0]) and "=" in name):
        raise UserError(f"{flag} needs {wanted}")
    return name


def _wanted(key: Key) -> str:
    return f"{legal(key)}, as in --{key.name} {key.choices[0] if key.choices else 'VALUE'}"


def _misspelt(argument: str, rest: list[str], keys: Mapping[str, Key], flags: Iterable[str]) -> str:
    """What to write instead of an argument that is not `key=value`."""
    flag = argument.partition("=")[0]
    options = difflib.get_close_matches(flag, ["--config", "--help", *flags], n=1, cutoff=0.7)
    if options:
        return f"unknown option {flag}; did you mean {options[0]}?"
    name, _, text = argument.lstrip("-+").partition("=")
    shown = argument
    following = next((item.lstrip("=") for item in rest[:2] if item != "="), "")
    if not text and following and "=" not in following and not following.startswith("-"):
        text, shown = following, f"{argument} {following}"  # key value, key = value, key= value
    known = owner(name, keys) in keys
    if known and not text:
        return f"{shown} has no value; write {name}=VALUE"
    if known:
        return f"{shown} is not written key=value; write {name}={text}"
    if text:
        return f"{shown} is not written key=value; did you mean {nearest(name, keys)[0]}={text}?"
    return f"unexpected argument {shown}; settings are written key=value, as in {example(keys)}"


def _find(chosen: str | Path, configs: Path | None) -> Path:
    text = str(chosen)
    path = Path(text)
    if isinstance(chosen, Path) or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if path.exists() or configs is None or not (configs / text).is_file():
            return path
        return configs / text
    known = known_configs(configs)
    if text in known and configs is not None:
        return configs / f"{text}.yaml"
    if not known:
        raise UserError(f"--config {text} is not a YAML file; write --config FILE.yaml")
    raise UserError(f"--config {text} is unknown; the nearest are {', '.join(nearest(text, known, 3))}")


def _escaped(value: Any) -> Any:
    """The same value with `${` made plain text, which omegaconf would take for an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value
