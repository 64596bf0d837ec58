"""Says where a model lies and what its directory lacks, before a worker opens it.

Light: neither torch nor transformers. Plugins ask ``problems`` in ``gcore_check_files``; what it
finds is what ``gcore_language.model_files`` and ``load_tokenizer`` would refuse in a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.looking import Look, Note

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
#: What a config calls the number of positions: most, GPT-2 and its like, MPT.
_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
#: Names, or beginnings or ends of names, of which a directory with a tokenizer has one.
_TOKENIZER_BEGINS = ("tokenizer", "tokenization", "vocab.", "spiece", "sentencepiece")
_TOKENIZER_ENDS = (".tiktoken",)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def is_hub_name(path: str) -> bool:
    """Whether a path that is no directory can be a name on the hub, such as ``Qwen/Qwen3-0.6B``."""
    return bool(path) and path.count("/") <= 1 and not path.startswith((".", "/", "~"))


def hub_cache() -> Path:
    """Returns the directory in which the hub's library keeps what it has downloaded."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def directory_here(path: str, revision: Any = None) -> Path | None:
    """Returns the directory of a model on this machine; None where there is none.

    path: a directory, or a name on the hub, which is looked up in the hub's cache.
    revision: commit on the hub; None: the one that the cache calls main.
    """
    if Path(path).is_dir():
        return Path(path)
    if not is_hub_name(path):
        return None
    repository = hub_cache() / f"models--{path.replace('/', '--')}"
    name = str(revision or "main")
    ref = repository / "refs" / name
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else name
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a model has places for; None where its config does not say.

    config: of the language model. Families name the number differently.
    """
    found = (config.get(name) for name in _LIMITS)
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def problems(
    plan: Mapping[str, Any], plugin: str, here: bool, *, images: bool = True, kind: str = ""
) -> Iterator[str | Look]:
    """Yields a sentence for each model of a plugin's roles that no worker could open, and a look at
    each other one.

    plan: the resolved configuration.
    plugin: name of the plugin; roles of others are left to these.
    here: whether all workers start on this machine. Elsewhere a directory may lie that is not here.
    images: whether the plugin takes models that take images.
    kind: see ``look_at``; "" where the plugin opens language models itself. The model of a
        generator that follows a trainer is never of kind "engine": it gets what is trained.
    """
    for name, role in plan["roles"].items():
        model = role.get("model") or {}
        config = role.get("config") or {}
        if role["use"].partition("/")[0] != plugin:
            continue
        opened = {
            "python": role.get("python"),
            "images": images,
            "trust_remote_code": bool(config.get("trust_remote_code")),
        }
        if model.get("path"):  # a model that the job makes has one when it has been made
            key = "make" if "make" in model else "path"
            where, path = f"roles.{name}.model.{key}", str(model["path"])
            is_trainer = "reference_path" in config
            own_kind = kind or ("trainer" if is_trainer else "language")
            if kind == "engine" and role.get("follows"):
                own_kind = "language"
            generates = not is_trainer or any(
                other["use"].partition("/")[0] == plugin
                for other in plan["roles"].values()
                if other.get("follows") == name
            )
            yield from path_problems(
                where,
                path,
                model.get("revision"),
                here,
                own_kind,
                generates=generates and not kind,
                **opened,
            )
        reference = str(config.get("reference_path") or "")
        if reference:
            where = f"roles.{name}.config.reference_path"
            directory = directory_here(reference)
            if directory is None:
                yield from missing(where, reference, here)
            else:
                yield look_at(where, directory, "language", **opened)
                yield from _tokens_of(where, directory, _model_of(role), role)
        elif "reference_path" in config and name != POLICY:  # a trainer of the policy's samples
            policy = _model_of(plan["roles"].get(POLICY) or {})
            yield from _tokens_of(f"roles.{name}.model.path", _model_of(role), policy, role)


def _model_of(role: Mapping[str, Any]) -> Path | None:
    model = role.get("model") or {}
    path = str(model.get("path") or "")
    return directory_here(path, model.get("revision")) if path else None


def _tokens_of(
    where: str, directory: Path | None, policy: Path | None, role: Mapping[str, Any]
) -> Iterator[Look]:
    """Yields a look at whether a model reads the policy's ids as the policy does."""
    if directory is None or policy is None or directory.resolve() == policy.resolve():
        return
    yield Look(
        where=where,
        python=role.get("python"),
        function="gcore_language.vocabularies:problems",
        arguments={
            "where": where,
            "directory": str(directory),
            "policy": str(policy),
            "trust_remote_code": bool((role.get("config") or {}).get("trust_remote_code")),
        },
        files=(str(directory), str(policy)),
    )


def path_problems(
    where: str, path: str, revision: Any, here: bool, kind: str, **opened: Any
) -> Iterator[str | Look]:
    """Yields why a model cannot be opened for which ``where`` names a directory or a hub name, or a
    look at it.

    kind, opened: see ``look_at``.
    """
    directory = directory_here(path, revision)
    if directory is None:
        yield from missing(where, path, here)
        return
    lacking = list(_of_directory(where, directory))
    yield from lacking
    if not lacking:
        yield look_at(where, directory, kind, **opened)


def look_at(
    where: str,
    directory: Path,
    kind: str,
    *,
    generates: bool = False,
    python: str | None = None,
    images: bool = True,
    trust_remote_code: bool = False,
) -> Look:
    """Returns a look that compares a model's files with its architecture.

    where: path of the setting that names the model.
    kind: as what it will be opened: "language", a language model; "trainer", that or a model of
        values; "engine", what an engine can load, which nobody trains; "files", any whose
        tokenizer alone is used; "classifier", a reward model; "clip", one for text and images.
    generates: whether the plugin itself generates with it, by a cache of keys and values.
    python: the interpreter that opens it.
    images: whether it may take images.
    trust_remote_code: whether Python code of the directory may run.
    """
    return Look(
        where=where,
        python=python,
        function="gcore_language.model_look:problems",
        arguments={
            "directory": str(directory),
            "kind": kind,
            "generates": generates,
            "images": images,
            "trust_remote_code": trust_remote_code,
        },
        files=(str(directory),),
    )


def missing(where: str, path: str, here: bool) -> Iterator[str | Look]:
    """Yields why a model that is not on this machine cannot be had, or that it will be fetched.

    path: what ``directory_here`` found nothing for.
    """
    if not here:
        return
    if not is_hub_name(path):
        folder = Path(path).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = did_you_mean(Path(path).name, sorted(names))
        yield f"{where}: there is no directory {path}{near}; correct it, or make the model there."
    elif is_offline():
        there = ", ".join(_cached()) or "none"
        yield (
            f"{where}: {path} is neither a directory nor in the cache of the hub ({hub_cache()}), "
            f"and HF_HUB_OFFLINE forbids to ask the hub; models there: {there}; unset it, or "
            f"download the model first: hf download {path}."
        )
    else:
        function = "gcore_language.model_places:to_be_fetched"
        yield Look(where=where, function=function, arguments={"where": where, "path": path})


def to_be_fetched(arguments: Mapping[str, Any]) -> Iterator[Note]:
    """Yields where a model will come from; ``where`` and ``path`` of the setting are arguments."""
    where, path = arguments["where"], arguments["path"]
    yield Note(f"{where}: there is no directory {path} here, so it will be fetched from the hub.")


def _of_directory(where: str, directory: Path) -> Iterator[str]:
    """Yields what a model directory lacks."""
    names = sorted(entry.name for entry in directory.iterdir())
    shown = f"it has {', '.join(names[:8]) or 'no files'}{', ...' if len(names) > 8 else ''}"
    if _ADAPTER in names:
        return  # a look says more
    if _CONFIG not in names:
        yield f"{where}: {directory} has no {_CONFIG}, so it is no model ({shown}); correct it."
        return
    if not any(name.endswith(".safetensors") for name in names):
        yield (
            f"{where}: {directory} has no weights in safetensors ({shown}); "
            "model.save_pretrained(directory) of transformers writes them."
        )
    if not any(_is_of_a_tokenizer(name) for name in names):
        yield (
            f"{where}: {directory} has no tokenizer ({shown}); "
            "tokenizer.save_pretrained(directory) of transformers writes one."
        )


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has any file of a tokenizer."""
    return any(_is_of_a_tokenizer(entry.name) for entry in directory.iterdir())


def _is_of_a_tokenizer(name: str) -> bool:
    return name.startswith(_TOKENIZER_BEGINS) or name.endswith(_TOKENIZER_ENDS)


def _cached() -> list[str]:
    """Returns the names of some models of the hub that lie in its cache."""
    cache = hub_cache()
    found = cache.glob("models--*/snapshots") if cache.is_dir() else ()
    names = (place.parent.name.removeprefix("models--").replace("--", "/") for place in found)
    return sorted(names)[:8]
