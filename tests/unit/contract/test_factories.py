from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core.contract.errors import ConfigError, ContractError, PluginBroken
from gcore_core.contract.factories import (
    FactorySpec,
    build,
    import_attribute,
    import_file,
    reference_to,
)


def test_build_calls_the_factory_with_the_plugins_own_dataclass(
    installed: InstalledPlugins,
) -> None:
    spec = FactorySpec(
        factory="gcore_fake_engine:make",
        config_class="gcore_fake_config:EngineConfig",
        config={"tensor_parallel": 2, "optimizer": {"learning_rate": 1}},
    )
    config, args = build(spec, "context")
    assert (config.tensor_parallel, config.optimizer.learning_rate, args) == (2, 1.0, ("context",))


def test_a_factory_without_config_class_gets_none(installed: InstalledPlugins) -> None:
    assert build(FactorySpec(factory="gcore_fake_engine:make")) == (None, ())


def test_a_spec_survives_the_wire_and_is_built_in_another_process(
    installed: InstalledPlugins,
) -> None:
    spec = FactorySpec(
        "gcore_fake_engine:make", "gcore_fake_config:EngineConfig", {"dtype": "bfloat16"}
    )
    code = (
        "import json, sys, msgspec; sys.path.insert(0, sys.argv[1])\n"
        "from gcore_core.contract.factories import FactorySpec, build\n"
        "config, _ = build(msgspec.json.decode(sys.argv[2], type=FactorySpec))\n"
        "print(json.dumps([config.dtype, sorted({'pluggy', 'omegaconf', 'numpy'} & "
        "set(sys.modules))]))"
    )
    words = [
        sys.executable,
        "-c",
        code,
        str(installed.directory),
        msgspec.json.encode(spec).decode(),
    ]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout) == ["bfloat16", []]


def test_a_factory_that_does_not_import_is_broken_with_its_cause(
    installed: InstalledPlugins,
) -> None:
    installed.add("x", files={"gcore_x_engine.py": "import no_such_engine"})
    with pytest.raises(
        PluginBroken, match="'gcore_x_engine:Make' does not import: ModuleNotFoundError"
    ) as caught:
        import_attribute("gcore_x_engine:Make")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert sys.executable in str(caught.value)


def test_a_missing_attribute_is_named_with_a_suggestion(installed: InstalledPlugins) -> None:
    with pytest.raises(
        PluginBroken, match=r"gcore_fake_engine has no 'mke' \(did you mean 'make'\?\)"
    ):
        import_attribute("gcore_fake_engine:mke")


def test_a_value_the_dataclass_refuses_names_the_value_and_the_class(
    installed: InstalledPlugins,
) -> None:
    spec = FactorySpec(
        "gcore_fake_engine:make", "gcore_fake_config:EngineConfig", {"tensor_parallel": 0}
    )
    with pytest.raises(
        ConfigError, match="(?s)must be at least 1, not 0.*gcore_fake_config:EngineConfig"
    ):
        build(spec)


def test_a_factory_that_cannot_be_called_breaks_its_contract(installed: InstalledPlugins) -> None:
    with pytest.raises(ContractError, match="is a str, it cannot be called"):
        build(FactorySpec("gcore_fake_engine:__name__"))


def test_a_file_is_imported_once_and_its_classes_are_found_again_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import "
        "dataclass\n@dataclass\nclass C:\n    a: int = 1\n"
    )
    module = import_file(file)
    assert import_file(file) is module
    assert "mine" not in sys.modules and str(tmp_path) not in sys.path
    assert reference_to(module.C) == f"{file}:C"
    assert import_attribute(f"{file}:C") is module.C


def test_a_file_that_fails_to_import_leaves_no_half_module(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("raise ValueError('no')")
    for _ in range(2):
        with pytest.raises(PluginBroken, match="ValueError: no"):
            import_attribute(f"{file}:x")


def test_a_config_class_inside_a_function_is_refused() -> None:
    class Inner:
        pass

    with pytest.raises(ContractError, match="is defined inside a function"):
        reference_to(Inner)
