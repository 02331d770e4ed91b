"""Configs as what a person edits and a file stores, and what differs between two of them.

`to_config_dict` turns the dataclasses of `config` into the locked `ml_collections.ConfigDict` that
a file in configs/ edits and `--config.a.b=...` overrides; `from_mapping` turns that, or a stored
config.json, back into the checked dataclass.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from fixbin_jax.config import Config
from fixbin_jax.errors import UserError

T = TypeVar("T")

# What may differ when a run folder is used again: these decide how and when, not what.
FREE_ON_RESUME = ("mesh", "checkpoint", "log", "sample", "compute", "data.read_threads")


def changes(old: Config, new: Config) -> list[str]:
    """Keys that make `new` another run than `old`, each as "config.a.b: old -> new"."""
    before, after = _flatten(to_mapping(old)), _flatten(to_mapping(new))
    return [
        f"config.{key}: {before[key]!r} -> {after[key]!r}"
        for key in after
        if before[key] != after[key]
        and not any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)
    ]


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_mapping(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts that JSON can hold."""
    return {
        f.name: to_mapping(v)
        if dataclasses.is_dataclass(v := getattr(config, f.name))
        else list(v)
        if isinstance(v, tuple)
        else v
        for f in dataclasses.fields(config)
    }


def to_config_dict(config: Config) -> ConfigDict:
    """A config as the locked ConfigDict that files in configs/ edit."""

    def convert(node: Any) -> ConfigDict:
        result = ConfigDict()
        hints = typing.get_type_hints(type(node))
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                value = convert(value)
            elif value is None:
                value = placeholder(_without_none(hints[field.name]))
            result[field.name] = value
        return result

    return convert(config).lock()


def from_mapping(kind: type[T], mapping: Mapping[str, Any] | ConfigDict, path: str = "config") -> T:
    """The checked dataclass `kind` from nested mappings (a ConfigDict, or a parsed config.json).

    Raises:
      UserError: an unknown key (naming the nearest real one), a value of the wrong type, or a
        value the dataclass refuses.
    """
    if isinstance(mapping, ConfigDict):
        mapping = mapping.to_dict()
    if not isinstance(mapping, Mapping):
        raise UserError(f"{path}: found {mapping!r}, expected a group of keys")
    hints = typing.get_type_hints(kind)
    values = {}
    for key in mapping:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"; did you mean {path}.{near[0]}?" if near else ""
            raise UserError(f"{path}.{key}: no such key{hint}")
        values[key] = _typed(hints[key], mapping[key], f"{path}.{key}")
    return kind(**values)


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _typed(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast(type, hint), value, path)
    if isinstance(hint, types.UnionType):
        return None if value is None else _typed(_without_none(hint), value, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{path}: found {value!r}, expected a sequence")
        return tuple(_typed(typing.get_args(hint)[0], v, path) for v in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(
            f"{path}: found {value!r} ({type(value).__name__}), expected {hint.__name__}"
        )
    return value
