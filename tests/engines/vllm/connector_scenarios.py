"""What the tests of the connector let real engines do; each runs in a process of its own and reports data."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.vllm.connector_child import (
    ask,
    block_ids,
    end,
    make_llm,
    page_bytes,
    page_digests,
    scheduler_of,
    store_of,
    sums,
    worker_half,
)
from tests.engines.vllm.connector_storm import MAX_TOKENS, Storm, use_flaky_medium
from tests.engines.vllm.rig import prompt

Job = Mapping[str, Any]


def one_engine(job: Job) -> dict[str, Any]:
    """Cold, native hit, store hit, damaged store, healed store, reset."""
    llm = make_llm(job, extra=job["extra"])
    ids = prompt(1, 700)
    sums()
    report: dict[str, Any] = {"cold": ask(llm, [ids])}
    report["cold_kv"] = page_digests(llm)
    report["native"] = ask(llm, [ids])
    report["store"] = _again(llm, ids)
    report["store_kv"] = page_digests(llm)
    _damage(llm, Path(job["folder"]), number=5)
    report["sums"] = [sums()]
    report["damaged"] = _again(llm, ids)
    report["damaged_kv"] = page_digests(llm)
    report["sums"].append(sums())
    report["healed"] = _again(llm, ids)
    report["sums"].append(sums())
    _settle()
    report["reset_done"] = llm.reset_prefix_cache(reset_connector=True)
    report["after_reset"] = ask(llm, [ids])
    report["after_reset_again"] = _again(llm, ids)
    report["left"] = _left(llm)
    end(llm)
    return report


def fresh_engine(job: Job) -> dict[str, Any]:
    """A process that finds what others stored; the worker may be a process of its own."""
    llm = make_llm(job, extra=job["extra"], **job["llm"])
    report = ask(llm, [prompt(seed, 700) for seed in job["seeds"]], max_tokens=job["max_tokens"])
    end(llm)
    return report


def role(job: Job) -> dict[str, Any]:
    """A producer or a consumer; waits for the other one's word before it answers."""
    llm = make_llm(job, transfer={"kv_role": job["role"]})
    Path(job["ready"]).touch()
    deadline = time.monotonic() + 240
    while not Path(job["go"]).exists():
        if time.monotonic() > deadline:
            msg = f"{job['go']} did not come"
            raise TimeoutError(msg)
        time.sleep(0.05)
    report = {"first": ask(llm, [prompt(seed, 700) for seed in (1, 2)], max_tokens=job["max_tokens"])}
    _settle()
    llm.reset_prefix_cache()
    Path(job["done"]).touch()
    report["second"] = ask(llm, [prompt(3, 700)], max_tokens=job["max_tokens"])
    report["third"] = _again(llm, prompt(3, 700))
    end(llm)
    return report


def chaos(job: Job) -> dict[str, Any]:
    """Hundreds of requests in little memory over a medium that fails at random, some of them aborted."""
    rng = random.Random(job["seed"])
    use_flaky_medium(rng)
    # In float32 no near-tie of two tokens depends on how a prompt is cut.
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 26}
    llm = make_llm(job, extra=job["extra"], **settings)
    prompts = [[*prompt(i % 4, 96), *prompt(100 + i, rng.randrange(20, 90))] for i in range(20)]
    truth = ask(llm, prompts, max_tokens=MAX_TOKENS)["tokens"]
    _settle()
    llm.reset_prefix_cache()
    sums()
    outcome = Storm(llm, rng, prompts, truth).run(job["n_requests"])
    report = {**dataclasses.asdict(outcome), "sums": sums(), "left": _left(llm)}
    end(llm)
    return report


def speculation(job: Job) -> dict[str, Any]:
    """Drafts from the prompt's own n-grams: the text repeats itself, so that many are accepted."""
    ids = [*prompt(1, 40)] * 6
    plain = make_llm(job, connector=False, dtype="float32")
    report: dict[str, Any] = {"truth": ask(plain, [ids], max_tokens=200)}
    report["truth_next"] = ask(plain, [[*ids, *report["truth"]["tokens"][0]]], max_tokens=24)
    end(plain)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    llm = make_llm(job, dtype="float32", speculative_config=drafts)
    sums()
    steps = scheduler_of(llm).current_step
    accepted = _count_accepted(llm)
    report["drafted"] = ask(llm, [ids], max_tokens=200)
    report["steps"], report["accepted"] = scheduler_of(llm).current_step - steps, sum(accepted)
    report["saved"] = sums()
    turn = [*ids, *report["drafted"]["tokens"][0]]
    native = {h: page_bytes(block) for h, block in block_ids(llm).items()}
    _settle()
    llm.reset_prefix_cache()
    report["next"] = ask(llm, [turn], max_tokens=24)
    loaded = {h: page_bytes(block) for h, block in block_ids(llm).items()}
    shared = [h for h in loaded if h in native]
    report["same_kv"] = sum(loaded[h] == native[h] for h in shared), len(shared)
    report["tokens"] = len(turn)
    report["left"] = _left(llm)
    end(llm)
    return report


# -- steps


def _again(llm: Any, ids: Sequence[int]) -> dict[str, Any]:
    """Ask once more, after the engine has forgotten its own cache and the store has written everything."""
    _settle()
    llm.reset_prefix_cache()
    return ask(llm, [ids])


def _settle() -> None:
    store_of().flush(30)


def _left(llm: Any) -> dict[str, int]:
    """What must be zero when nobody asks for anything."""
    for _ in range(3):
        llm.llm_engine.step()
    scheduler, worker = scheduler_of(llm), worker_half()
    half = scheduler.connector._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    stats = store_of().stats()
    return {
        "requests": len(scheduler.requests) + half.n_requests,
        "loads": worker.n_under_way + half.n_loads,
        "keys": len(worker._keys),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "pinned": stats.l1.pinned_blocks if stats.l1 is not None else 0,
    }


def _damage(llm: Any, folder: Path, *, number: int) -> None:
    """Flip one bit of a stored block on the medium."""
    _settle()
    hashes = _hashes_in_order(llm)
    needle = page_bytes(block_ids(llm)[hashes[number]])[:256]
    for file in folder.rglob("*.mdb"):
        data = file.read_bytes()
        at = data.find(needle)
        if at >= 0:
            with file.open("r+b") as f:
                f.seek(at + 100)
                f.write(bytes([data[at + 100] ^ 0x40]))
            return
    msg = f"the block is not in {folder}"
    raise AssertionError(msg)


def _hashes_in_order(llm: Any) -> list[str]:
    """Hashes of the one cached prompt: its blocks were allocated in order."""
    ids = block_ids(llm)
    return sorted(ids, key=lambda h: ids[h])


def _count_accepted(llm: Any) -> list[int]:
    """A list that grows by the tokens that each step yields beyond one."""
    scheduler, accepted = scheduler_of(llm), []
    update = scheduler._update_request_with_output

    def counted(request: Any, new_token_ids: list[int], *more: Any, **others: Any) -> Any:
        accepted.append(max(0, len(new_token_ids) - 1))
        return update(request, new_token_ids, *more, **others)

    scheduler._update_request_with_output = counted
    return accepted
