"""Compares a model's files with its architecture before a run, for ``gcore_check_files``.

``gcore_language.model_places`` yields the looks; ``problems`` answers them in a helper process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import DataError
from gcore_language.model_files import read_model_files, tensors_in

#: Weights of so many bytes or fewer are read whole, as they are when they are loaded.
_READ_BYTES = 1 << 30


def problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Looks at one model; what is wrong with it is raised as a DataError.

    Names and shapes are compared by the files' headers. Of weights up to 1 GiB the numbers are
    looked at, too.

    arguments: of ``model_places.look_at``.
    """
    directory, kind = Path(arguments["directory"]), arguments["kind"]
    trust = bool(arguments["trust_remote_code"])
    read_model_files(directory, quantised=kind == "engine")
    if kind == "files":
        return
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        return  # what a role needs is checked by its provider
    from gcore_language import pretrained
    from gcore_language.models import check_classifier, check_one_output

    if kind == "engine" and not pretrained.may_compare(directory):
        return  # the engine knows what it can load
    what = pretrained.CLASSIFIER.what if kind == "classifier" else "model"
    config = pretrained.read_hf_config(directory, trust_remote_code=trust, what=what)
    if kind == "classifier":
        opening = pretrained.CLASSIFIER
    elif kind == "clip":
        opening = pretrained.CLIP
    elif kind == "trainer" and _is_classifier(config):
        check_classifier(config, str(directory))
        opening = pretrained.VALUES
    else:
        opening = pretrained.language_opening(config, images=bool(arguments["images"]))
    model, _ = pretrained.open_pretrained(
        directory, opening, config=config, trust_remote_code=trust, empty=True
    )
    if arguments.get("generates") and getattr(model, "_is_stateful", False):
        raise DataError(
            "a state-space model cannot generate here: it has no cache of keys and values.",
            where=str(directory),
            why=f"model_type in config.json is {config.model_type!r}",
            todo="take a model of another architecture, or use vllm or sglang for this role",
        )
    if kind == "classifier":
        check_one_output(config, str(directory))
    files = {tensor.file for tensor in tensors_in(directory).values()}
    if sum(file.stat().st_size for file in files) <= _READ_BYTES:
        pretrained.refuse_not_finite_files(directory)
    yield from ()


def _is_classifier(config: Any) -> bool:
    return any(name.endswith("Classification") for name in config.architectures or ())
