"""Answer two questions about one document; the second one restores the document's KV cache.

    python examples/transformers_generate.py MODEL_FOLDER STORE_FOLDER

Run it twice: the second process restores both prompts from disk.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import kvstore_transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENT = "The ferry to Skerry Point leaves on Tuesdays at nine. Its captain is Ada Holm. " * 8
QUESTIONS = ("When does the ferry leave?", "Who is the captain of the ferry?")


def main(model_folder: str, store_folder: str) -> None:
    """Answer each question and say where its K/V came from."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = {
        "l1": {"capacity": "512MiB"},
        "l2": [{"backend": "lmdb", "path": store_folder, "capacity": "2GiB", "codec": "planes"}],
    }
    with kvstore_transformers.open_cache(model, config) as cached:
        for question in QUESTIONS:
            prompt = f"{DOCUMENT}\n\nQuestion: {question}\nAnswer:"
            input_ids = tokenizer(prompt, return_tensors="pt").input_ids
            restored_tokens, start_s = cached.cached_tokens(input_ids), time.perf_counter()
            output: Any = cached.generate(input_ids, max_new_tokens=16, do_sample=False)
            seconds = time.perf_counter() - start_s
            answer = tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)
            print(question, str(answer).strip().partition("\n")[0])
            print(f"  {restored_tokens} of {input_ids.shape[1]} tokens restored, answered in {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
