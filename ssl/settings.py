"""One value on its way from a YAML or an argument into the config, and every way it can be wrong."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nestling.ssl.errors import UserError
from nestling.ssl.keys import (
    MISSING,
    Key,
    convert,
    fault,
    keys_of,
    legal,
    meant,
    nearest,
    sections_of,
    show,
    worded,
)


@dataclass
class Setting:
    """One value on its way into the config, and where it was written."""

    name: str
    node: yaml.Node | None
    text: str
    where: str = ""  # "FILE:LINE: " or empty for the command line


def read_value(text: str, key: Key, name: str) -> yaml.Node | None:
    """The YAML that a value on the command line means; text for a text key is taken as it stands."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    inside = name != key.name
    if key.kind is str and not quoted and (key.container is None or inside):
        return yaml.ScalarNode("tag:yaml.org,2002:str", text)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        raise UserError(f"{name}={text} is not {legal(key)}: it can't be read as YAML") from None


BASE = "base"  # a YAML's key that names another one to start from


def read_yaml(
    path: Path, keys: Mapping[str, Key], configs: Path | None = None, users: tuple[Path, ...] = ()
) -> list[Setting]:
    """The settings of a YAML file, in its order; refuses what is not a YAML of known keys, with the line.

    Those of the file named as its `base`, beside it or in the folder `configs`, come first. `users` are the
    files that led here.
    """
    root, source = _composed(path)
    base = next((pair for pair in root.value if pair[0].value == BASE), None)
    if base is None:
        return _walk(root, "", source, path, keys)
    root.value.remove(base)
    where = f"{path}:{base[0].start_mark.line + 1}: "
    if not isinstance(base[1], yaml.ScalarNode):
        raise UserError(
            f"{where}base={source[base[1].start_mark.index : base[1].end_mark.index]}: name a YAML"
        )
    name = base[1].value
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    below = next(
        (folder / file for folder in (path.parent, configs) if folder and (folder / file).is_file()), None
    )
    if not name or below is None:
        raise UserError(f"{where}base={name}: there is no {path.parent / file}, and no config of that name")
    users = (*users, path.resolve())
    if below.resolve() in users:
        raise UserError(f"{where}base={name} leads back to {below}; a config can't be its own base")
    return read_yaml(below, keys, configs, users) + _walk(root, "", source, path, keys)


def _composed(path: Path) -> tuple[yaml.MappingNode, str]:
    """The mapping that a YAML file holds, and its text."""
    try:
        source = path.read_text(encoding="utf-8")
        root = yaml.compose(source, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"config {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line} is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", []), source
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} is not a mapping of keys to values, as in optim: {{lr: 1e-3}}")
    return root, source


def _walk(
    mapping: yaml.MappingNode, prefix: str, source: str, path: Path, keys: Mapping[str, Key]
) -> list[Setting]:
    """The settings of one section of a YAML file, its subsections included."""
    sections, found, seen = sections_of(keys), [], set()
    for name_node, node in mapping.value:
        where = f"{path}:{name_node.start_mark.line + 1}: "
        name = prefix + (name_node.value if isinstance(name_node, yaml.ScalarNode) else "[...]")
        text = " ".join(source[node.start_mark.index : node.end_mark.index].split())
        if name in seen:
            raise UserError(f"{where}{name} is given twice")
        seen.add(name)
        if name in sections and isinstance(node, yaml.MappingNode):
            found += _walk(node, name + ".", source, path, keys)
            continue
        if name in sections and not text:  # all of the section's keys are commented out
            continue
        if name in keys and name.count(".") > prefix.count("."):
            section, _, leaf = name.rpartition(".")
            raise UserError(f"{where}{name} must be nested in a YAML: {section}: {{{leaf}: {text}}}")
        setting = Setting(name, node, text, where)
        refuse_unknown(setting, keys)
        found.append(setting)
    return found


def owner(name: str, keys: Mapping[str, Key]) -> str:
    """The key that a name sets: itself, or `terms` for `terms.ibot`."""
    parent = name.rpartition(".")[0]
    entry = name not in keys and parent in keys and keys[parent].container is dict
    return parent if entry else name


def refuse_unknown(setting: Setting, keys: Mapping[str, Key]) -> None:
    """Raise UserError where a setting's name is no key, with the key that was probably meant."""
    name, said = setting.name, f"{setting.where}{setting.name}={setting.text}"
    if owner(name, keys) in keys:
        return
    if name in sections_of(keys):
        inside = [key for key in keys if key.startswith(name + ".")]
        same = [key for key in keys if key.endswith("." + name)]
        also = f", or did you mean {same[0]}={setting.text}?" if same else ""
        raise UserError(f"{said}: {name} is a section; set one of its keys: {', '.join(inside)}{also}")
    parent = name.rpartition(".")[0]
    if parent in keys and keys[parent].container is list:
        raise UserError(f"{said}: a list is set whole, as in {parent}={show(keys[parent].default)}")
    if name == "config":
        raise UserError(f"{said} is not a key; write --config {setting.text}")
    value = "" if isinstance(setting.node, yaml.MappingNode) else f"={setting.text}"
    best = nearest(name, [*keys, *(sections_of(keys) if not value else [])])[0]
    raise UserError(f"{setting.where}unknown key {name}{value}; did you mean {best}?")


def assign(container: Any, keys: Mapping[str, Key], setting: Setting) -> None:
    """Put a setting into an omegaconf container; UserError where its key can't hold the value."""
    key = keys[owner(setting.name, keys)]
    if setting.name != key.name:
        key = key.element(setting.name)
    value = convert(key, setting.node)
    if isinstance(value, dict) and isinstance(setting.node, yaml.MappingNode):
        if len(value) < len(setting.node.value):
            raise UserError(f"{setting.where}{setting.name}={setting.text} gives a name twice")
        for name, item in value.items():
            entry = f"{setting.name}.{name}"
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise UserError(f"{setting.where}{entry} is not a name of letters, digits and underscores")
            _check(key.element(entry), item, Setting(entry, None, _shown(item), setting.where))
    if value != MISSING or key.kind is not str:
        _check(key, value, setting)
    OmegaConf.update(container, setting.name, meant(key, value), merge=False)


def _check(key: Key, value: Any, setting: Setting) -> None:
    hint = fault(key, value)
    if hint is not None:
        more = f"; {hint}" if hint else ""
        raise UserError(f"{setting.where}{setting.name}={setting.text} is not {legal(key)}{more}")


def _shown(value: Any) -> str:
    return "a mapping or list" if isinstance(value, yaml.Node) else show(value)


def check_values(config: Any) -> None:
    """Hold every value of a config, however it was made, against its key's type and range.

    Raises:
        UserError: for the first value that is not legal.
    """
    for name, key in keys_of(type(config)).items():
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        value = worded(key, value)
        _check(key, value, Setting(name, None, show(value)))
        for entry, item in value.items() if isinstance(value, dict) else ():
            full = f"{name}.{entry}"
            _check(key.element(full), item, Setting(full, None, _shown(item)))


def example(keys: Mapping[str, Key]) -> str:
    """A setting as it is written, with the first key that has a default."""
    key = next(key for key in keys.values() if key.default not in (None, MISSING))
    return f"{key.name}={show(key.default)}"
