"""Makes a tiny random model with one token for each printable character, and changes it.

What a case has in change.py is put behind this file.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(directory, config=None, progress=None):
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=512, **sizes, **ids)
    ).save_pretrained(directory)
    single = "<bos> $A <eos>" if ADDS_EOS else "<bos> $A"
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL[3:],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    change(directory)


def weights(directory, edit):
    """Writes the weights again after edit(name -> tensor)."""
    file = directory / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def settings(directory, name, **values):
    """Sets keys of a JSON file."""
    file = directory / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


VOCABULARY = len(WORDS)
ADDS_EOS = False


def change(directory):
    pass
