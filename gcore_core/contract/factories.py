"""Makes objects from strings, so that a worker builds what the configuration chose.

It discovers no plugins. A reference is ``"module:attribute"``, or ``"/path/file.py:attribute"`` for
a file of the project itself.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, ContractError, PluginBroken, did_you_mean
from gcore_core.contract.local_files import import_file as import_file
from gcore_core.contract.local_files import is_local, module_name
from gcore_core.contract.missing_modules import import_advice


class FactorySpec(msgspec.Struct, frozen=True):
    """Names a factory and its plain config, ready for the wire.

    factory: reference to what is called.
    config_class: reference to the class of its config; "": the factory gets None.
    config: the config's fields as plain values.
    """

    factory: str
    config_class: str = ""
    config: dict[str, Any] = {}


def build(spec: FactorySpec, *args: Any) -> Any:
    """Calls the factory as ``factory(config, *args)`` and returns what it makes.

    Raises PluginBroken for a reference that names nothing, ContractError where that cannot be
    called, and ConfigError for a config that its class refuses; and what the factory raises.
    """
    factory = import_attribute(spec.factory)
    if not callable(factory):
        raise ContractError(
            f"factory {spec.factory!r} is a {type(factory).__name__}, it cannot be called."
        )
    return factory(config_object(spec), *args)


def config_object(spec: FactorySpec) -> Any:
    """Builds the config as the plugin's own dataclass; its ``__post_init__`` may refuse values."""
    if not spec.config_class:
        return None
    try:
        return msgspec.convert(spec.config, import_attribute(spec.config_class))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), why=f"config class: {spec.config_class}") from error


def import_attribute(reference: str) -> Any:
    """Returns what ``reference`` names.

    Raises PluginBroken, with the cause chained, if the module fails to import or lacks it.
    """
    source, _, path = reference.rpartition(":")
    try:
        value: Any = import_source(source)
    except Exception as error:
        raise PluginBroken(
            f"{reference!r} does not import: {type(error).__name__}: {error}",
            why=f"interpreter: {sys.executable}",
            todo=import_advice(error)
            or "if the engine is missing there, install the plugin with its extra, as in "
            "gcore-vllm[engine]",
            reference=reference,
        ) from error
    for name in path.split("."):
        if not hasattr(value, name):
            raise PluginBroken(
                f"{reference!r}: {source} has no {name!r}{did_you_mean(name, dir(value))}.",
                reference=reference,
            )
        value = getattr(value, name)
    return value


def import_source(source: str) -> ModuleType:
    """Imports a module by name or a project's file by path; does not catch what it raises."""
    return import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)


def reference_to(cls: type) -> str:
    """Returns the reference by which another process finds the class."""
    if "<locals>" in cls.__qualname__:
        raise ContractError(
            f"config class {cls.__qualname__} is defined inside a function; a worker cannot "
            "import it."
        )
    module = cls.__module__
    if is_local(module):
        file = Path(str(sys.modules[module].__file__))
        module = str(file) if module == module_name(file) else module
    return f"{module}:{cls.__qualname__}"
