"""docs/tutorials/first-plugin.md does what it says, docs/how-to/venvs.md goes on from there,
contrib/gcore-example is the end.
"""

from __future__ import annotations

import shutil
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support import pages

PAGE = pages.REPOSITORY / "docs/tutorials/first-plugin.md"
FINISHED = pages.REPOSITORY / "contrib/gcore-example"


def page(file: Path = PAGE) -> str:
    return file.read_text(encoding="utf-8")


def both_pages() -> str:
    return page() + page(PAGE.parents[1] / "how-to/venvs.md")


def assert_as_shown(found: list[Any]) -> None:
    assert len(found) > 10
    for command in found:
        assert pages.same(command.printed) == pages.same(command.shown), (
            f"$ {command.line}\n{command.printed}\ndiffers from the page. To mend that, look at "
            "it, then:\n"
            "python -m tests.support.pages "
            "docs/tutorials/first-plugin.md docs/how-to/venvs.md"
        )


@pytest.mark.slow
def test_the_pages_followed_in_a_fresh_environment_give_the_outputs_they_show(
    tmp_path: Path,
) -> None:
    """Nothing but pip and this checkout: the environments are made and filled by the pages' own
    commands.
    """
    pages.copy_core(tmp_path / "g-core")
    assert_as_shown(pages.follow(both_pages(), tmp_path, pages.shell_environment()))


def test_the_pages_followed_without_pip_give_the_outputs_they_show(tmp_path: Path) -> None:
    """Fresh environments too, of links to what is installed here; what pip would write is written
    here.
    """
    root = tmp_path / "gcore-example"

    def instead(line: str) -> bool:
        words = line.split()
        if line.startswith("python3 -m venv"):
            linked_environment(root / words[-1])
        elif line == "pip install -q -e .":
            site = site_packages(root / ".venv")
            write_metadata(site, read_project(root))
            (site / "project.pth").write_text(f"{root}\n")
        elif line == "envs/letters/bin/pip install -q ../g-core ../g-core/plugins/gcore-testing .":
            link_test_kit(root / "envs/letters")
            site = site_packages(root / "envs/letters")
            write_metadata(site, read_project(root))
            shutil.copytree(root / "gcore_example", site / "gcore_example")
        elif line == "pip install -q ../g-core ../g-core/plugins/gcore-testing":
            link_test_kit(root / ".venv")
        else:
            return "pip install" in line  # of what the links give already
        return True

    assert_as_shown(pages.follow(both_pages(), tmp_path, pages.shell_environment(), instead))


def test_the_finished_plugin_is_what_the_page_ends_with(tmp_path: Path) -> None:
    for block in pages.blocks(page()):
        if block.file:
            pages.apply(block, tmp_path)
    assert files(tmp_path) == {
        name: text for name, text in files(FINISHED).items() if name != "README.md"
    }


def test_every_block_of_the_page_is_a_file_or_commands() -> None:
    assert [
        block.text
        for block in pages.blocks(page())
        if not block.file and block.language != "console"
    ] == []


def test_the_first_module_has_twelve_lines_and_its_project_eight() -> None:
    module, project = [block for block in pages.blocks(page()) if block.file][:2]
    lines = [
        sum(bool(line.strip()) for line in block.text.splitlines()) for block in (module, project)
    ]
    assert lines == [12, 8]


def test_the_comparison_detects_a_different_output() -> None:
    assert pages.same("step 1/3  reward 0.090  left 0:00\n") != pages.same(
        "step 1/3  reward 0.091  left 0:00\n"
    )
    assert pages.same("2 failed, 42 passed in 1.01s") == pages.same("2 failed, 43 passed in 0.46s")
    assert pages.same("2 failed, 42 passed in 1.01s") != pages.same("3 failed, 42 passed in 1.01s")


def files(directory: Path) -> dict[str, str]:
    """Path -> text, without what tools leave behind."""
    left = {"__pycache__", ".pytest_cache", ".venv", "runs", "build"}
    return {
        str(path.relative_to(directory)): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and not any(part in left or part.endswith(".egg-info") for part in path.parts)
    }


# -- an environment without pip --------------------------------------------------------------------


def linked_environment(root: Path) -> None:
    """A virtual environment with gcore-core and what it requires, and nothing else."""
    venv.create(root, symlinks=True)
    site = site_packages(root)
    link_requirements("gcore-core", site)
    (site / "gcore_core").symlink_to(pages.REPOSITORY / "gcore_core")
    write_metadata(site, read_project(pages.REPOSITORY))
    write_script(root, "g-core", "gcore_core.cli")


def link_test_kit(root: Path) -> None:
    """Adds gcore-testing and what it requires to such an environment."""
    project = pages.REPOSITORY / "plugins/gcore-testing"
    site = site_packages(root)
    link_requirements("gcore-testing", site)
    (site / "gcore_testing").symlink_to(project / "gcore_testing")
    write_metadata(site, read_project(project))
    write_script(root, "pytest", "pytest")


def link_requirements(name: str, site: Path) -> None:
    """Links what a distribution requires and that is not ours."""
    for other in required(name) - {"gcore-core", "gcore-testing"}:
        found = distribution(other)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def write_script(root: Path, script: str, module: str) -> None:
    """Writes a program of such an environment, which calls the module's ``main``."""
    (python,) = root.glob("bin/python3.*")
    file = root / "bin" / script
    file.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
    file.chmod(0o755)


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distribution and all that it requires here."""
    found = {name}
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found |= required(requirement.name, frozenset(requirement.extras))
    return found


def read_project(directory: Path) -> dict[str, Any]:
    """The project as its pyproject.toml describes it."""
    return dict(
        tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    )


def write_metadata(site: Path, project: dict[str, Any]) -> None:
    """What pip leaves of a project in the place of another version."""
    module = project["name"].replace("-", "_")
    for old in site.glob(f"{module}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    requires = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    (info / "METADATA").write_text(head + requires)
    entries = project["entry-points"]["gcore"].items()
    (info / "entry_points.txt").write_text(
        "[gcore]\n" + "".join(f"{name} = {value}\n" for name, value in entries)
    )


def site_packages(root: Path) -> Path:
    (site,) = root.glob("lib/python3*/site-packages")
    return site
