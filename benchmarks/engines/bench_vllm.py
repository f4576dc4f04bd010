"""kvstore behind vLLM on a CPU with SmolLM2-135M: what a restore saves, and what storing costs.

    .venv-vllm/bin/python benchmarks/engines/bench_vllm.py restore|damage|throughput [--model DIR] [--tokens 2200]

Runs in the environment of ``make test-engines`` (``make .venv-vllm/.stamp-engine``).  The model is the
one of ``make demo``: a folder of bfloat16 weights with a tokenizer, by default where the demo keeps it.

``restore``: one process computes a prompt and stores it in LMDB, NVMe and S3 (a moto server on
loopback) at once; a second, fresh process restores it from each.  Time to first token is a request for
one token; the baseline is the same request recomputed by an engine without a store, in the same process.

``damage``: one stored block of that prompt is damaged on the medium (the lowest exponent bits of its
numbers flipped, same length) under vLLM's own ``fs`` tier and under kvstore, and fresh engines answer.

``throughput``: prompts that nobody has seen, so that every lookup misses and every block is stored.
Engines without a connector, with vLLM's own CPU offloading and with kvstore behind it take turns.  On a
CPU the model needs every core, so that all that the store costs shows.  The best batch of each kind counts:
on shared machines the others say what else was running.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the rig of the tests

from kvstore.cli.demo.model import model_folder
from kvstore.cli.demo.prompts import document_text, fit_document, user_message
from kvstore.engine_hashes import vllm_block_hashes
from tests.engines.vllm.rig import Engine, Run, run_engines
from tests.support_s3 import CREDENTIALS, make_bucket

BUCKET: Final = "kv-cache"
LLM: Final[dict[str, Any]] = {
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "block_size": 128,  # vLLM's default on CPUs
    "max_num_batched_tokens": 4096,
}
CPU_BYTES: Final = 400_000_000
REPEATS: Final = 3
DAMAGED_BLOCK: Final = 3  # of 17
THREADS: Final = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
ANSWER_TOKENS: Final = 24
WARM_UP: Final = Run([list(range(100, 400))], max_tokens=2)


@contextmanager
def moto_server() -> Iterator[str]:
    """An S3 server in this process, on loopback."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        make_bucket(url, BUCKET)
        yield url
    finally:
        server.stop()


def tiers(folder: Path, s3_url: str) -> dict[str, dict[str, Any]]:
    """One kvstore tier for each medium."""
    stores = {
        "lmdb": {"backend": "lmdb", "path": str(folder / "lmdb"), "capacity": "1GiB"},
        "nvme": {"backend": "nvme", "path": str(folder / "nvme"), "capacity": "1GiB"},
        "s3": {"backend": "s3", "bucket": BUCKET, "endpoint_url": s3_url, **CREDENTIALS},
    }
    return {name: {"type": "kvstore", "config": {"l2": [store]}} for name, store in stores.items()}


def prompt_of(model: Path, n_tokens: int) -> list[int]:
    """The demo's document with a question behind it, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    question = "Who is the chief of the weather station?"

    def ids(document: str) -> list[int]:
        messages = [{"role": "user", "content": user_message(document, question)}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return ids(fit_document(document_text(), n_tokens, lambda document: len(ids(document))))


def restore(model: Path, n_tokens: int) -> bool:
    """Print what each medium restores and what that saves; whether all of it is right."""
    prompt = prompt_of(model, n_tokens)
    ask = Run([prompt], max_tokens=1)
    with tempfile.TemporaryDirectory() as folder, moto_server() as s3_url:
        media = tiers(Path(folder), s3_url)
        answer = Run([prompt], max_tokens=ANSWER_TOKENS, kv=True)
        storing = Engine(runs=[answer, answer], tiers=list(media.values()), cpu_bytes=CPU_BYTES, llm=LLM)
        (stored,) = run_engines(model, [storing], timeout_s=900, environment=THREADS)["engines"]
        cold, native = stored["runs"]
        again = [Run([prompt], max_tokens=1, reset="gpu") for _ in range(REPEATS - 1)]
        engines = [Engine(runs=[WARM_UP, ask, *again], llm=LLM)]
        engines += [
            Engine(runs=[WARM_UP, Run([prompt], 1, kv=True), answer], tiers=[tier], cpu_bytes=CPU_BYTES, llm=LLM)
            for tier in media.values()
        ]
        report = run_engines(model, engines, timeout_s=1800, environment=THREADS)
    plain, *restored = report["engines"]
    recomputed_s = [run["seconds"] for run in plain["runs"][1:]]
    what = f"SmolLM2-135M {LLM['dtype']}, prompt of {len(prompt)} tokens, blocks of {LLM['block_size']}"
    print(f"vLLM {report['vllm']}, {what}")
    print(f"recomputed      TTFT {statistics.median(recomputed_s):6.3f} s  (each {_each(recomputed_s)})")
    right = [_told(name, engine, cold, native, recomputed_s) for name, engine in zip(media, restored, strict=True)]
    return all(right)


def _told(
    name: str, engine: Mapping[str, Any], cold: Mapping[str, Any], native: Mapping[str, Any], recomputed_s: list[float]
) -> bool:
    _, first, text = engine["runs"]
    shared = first["kv"].keys() & cold["kv"].keys()
    identical = bool(shared) and all(first["kv"][block] == cold["kv"][block] for block in shared)
    same_text = text["tokens"] == native["tokens"]
    ratio = statistics.median(recomputed_s) / first["seconds"]
    print(
        f"{name:5} restored  TTFT {first['seconds']:6.3f} s  {ratio:5.1f}x  {first['cached'][0]} tokens restored, "
        f"KV of {len(shared)} blocks bit-identical: {_yes(identical)}, text of a native prefix hit: {_yes(same_text)}"
    )
    return identical and same_text


def damage(model: Path, n_tokens: int) -> bool:
    """Print what engines answer over a damaged block; whether kvstore's answer is right."""
    from transformers import AutoTokenizer

    prompt = prompt_of(model, n_tokens)
    answer = Run([prompt], max_tokens=ANSWER_TOKENS, kv=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        tree = {"backend": "nvme", "path": f"{folder}/tree", "layout": "tree", "pack": 1, "codec": "none"}
        ours = {"type": "kvstore", "config": {"l2": [{**tree, "capacity": "1GiB"}]}}
        stock = {"type": "fs", "root_dir": f"{folder}/fs"}
        storing = Engine(runs=[answer, answer], tiers=[ours, stock], cpu_bytes=CPU_BYTES, llm=LLM)
        _, native = run_engines(model, [storing], timeout_s=900, environment=THREADS)["engines"][0]["runs"]
        _damage_block(prompt, Path(folder))
        engines = [Engine(runs=[answer], tiers=[tier], cpu_bytes=CPU_BYTES, llm=LLM) for tier in (stock, ours, ours)]
        report = run_engines(model, engines, timeout_s=1800, environment=THREADS)
    runs = [native, *(engine["runs"][0] for engine in report["engines"])]
    for name, run in zip(("undamaged", "vLLM's fs", "kvstore", "once more"), runs, strict=True):
        print(f"{name:10} {run['cached'][0]:5} tokens restored: {tokenizer.decode(run['tokens'][0])!r}")
    stock_run, first, second = runs[1:]
    print(f"kvstore's text is right: {_yes(first['tokens'] == second['tokens'] == native['tokens'])}")
    print(f"the damaged block was stored again: {_yes(second['cached'] == native['cached'])}")
    print(f"the text over vLLM's fs tier is right: {_yes(stock_run['tokens'] == native['tokens'])}")
    return bool(first["tokens"] == second["tokens"] == native["tokens"] and second["cached"] == native["cached"])


def _damage_block(prompt: Sequence[int], folder: Path) -> None:
    """Flip the lowest exponent bit of every number of one block, in the files of both stores."""
    name = vllm_block_hashes(prompt, block_tokens=LLM["block_size"])[DAMAGED_BLOCK].hex()
    (theirs,) = (file for file in (folder / "fs").rglob("*") if file.stem == name)
    sample = theirs.read_bytes()[-8192:-4096]
    (ours,) = (file for file in (folder / "tree").rglob("*") if file.is_file() and sample in file.read_bytes())
    for file in (theirs, ours):
        data = np.fromfile(file, np.uint8)
        data[-(len(data) // 4096 - 1) * 4096 :: 2] ^= 0x80
        data.tofile(file)


def throughput(model: Path, n_prompts: int, rounds: int) -> None:
    """Print the time of prompts that all miss, for three kinds of engines by turns."""
    kinds = ("no connector", "vLLM offloading", "kvstore lmdb")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    chance = random.Random(7)
    for _ in range(rounds):
        for kind in kinds:
            runs = [WARM_UP, *(_unseen(chance, n_prompts) for _ in range(2))]
            with tempfile.TemporaryDirectory() as folder:
                engine = Engine(runs=runs, tiers=_tiers_of(kind, Path(folder)), cpu_bytes=CPU_BYTES, llm=LLM)
                (told,) = run_engines(model, [engine], timeout_s=1800, environment=THREADS)["engines"]
            if any(cached for run in told["runs"][1:] for cached in run["cached"]):
                raise SystemExit("a prompt was not new: the figures would say nothing")
            seconds[kind] += [run["seconds"] for run in told["runs"][1:]]
            cpu_s[kind] += [run["cpu_seconds"] for run in told["runs"][1:]]
    print(f"SmolLM2-135M {LLM['dtype']}, batches of {n_prompts} new prompts of 1,000 tokens, 16 tokens each to answer")
    for kind in kinds:
        each = seconds[kind]
        ratio = min(seconds["no connector"]) / min(each)
        cpu_ratio = min(cpu_s["no connector"]) / min(cpu_s[kind])
        print(
            f"{kind:16} {min(each):7.2f} s a batch at best, throughput {ratio:.3f}, "
            f"of CPU time {cpu_ratio:.3f}  (each {_each(each)})"
        )


def _tiers_of(kind: str, folder: Path) -> Sequence[Mapping[str, Any]]:
    if kind == "no connector":
        return ()
    if kind == "vLLM offloading":
        return ({"type": "example"},)  # vLLM's own tier without a medium
    return (tiers(folder, "http://127.0.0.1:9")["lmdb"],)


def _unseen(chance: random.Random, n_prompts: int) -> Run:
    return Run([[chance.randrange(1000, 40000) for _ in range(1000)] for _ in range(n_prompts)], max_tokens=16)


def _each(seconds: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds)


def _yes(value: object) -> str:
    return "yes" if value else "NO"


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM on a CPU with and without kvstore")
    parser.add_argument("what", choices=("restore", "damage", "throughput"))
    parser.add_argument("--model", type=Path, default=model_folder(), help="folder with weights and tokenizer")
    parser.add_argument("--tokens", type=int, default=2200, help="length of the prompt that is restored")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV; many CPUs only emulate bfloat16")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of 1,000 tokens in a batch")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind of engine")
    given = parser.parse_args()
    if not (given.model / "config.json").is_file():
        parser.error(f"{given.model} holds no model; run `make demo` once, or name a folder with --model")
    LLM["dtype"] = given.dtype
    if given.what == "restore":
        return 0 if restore(given.model, given.tokens) else 1
    if given.what == "damage":
        return 0 if damage(given.model, given.tokens) else 1
    throughput(given.model, given.prompts, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
