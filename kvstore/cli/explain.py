"""``kvstore explain``: why a prompt hits or misses in stores at rest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.command import Command, Subcommands, add_command, add_store_options, store_exit_code
from kvstore.cli.output import print_json, table
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.cli.inquest import Answer, Verdict
    from kvstore.cli.resting import Resting

_DESCRIPTION = """\
Says for each block of a prompt and each tier whether a reader finds it there: present, corrupt, gone, never
stored, behind a hole, or stored under another namespace or key, with the field that differs. It reads and
verifies the records of the prompt and changes nothing. What a running cache knows besides (queues, refusals,
evictions with their time), KVCache.explain tells."""

_WORDS: Final = {
    "present": "present",
    "not_stored": "absent",
    "vanished": "gone",
    "behind_a_hole": "behind a hole",
    "namespace_differs": "other namespace",
    "key_differs": "other key",
    "no_answer": "no answer",
    "tier_down": "failed",
}
_DAMAGE: Final = frozenset({"corrupt", "mismatch", "unauthenticated"})
_UNREAD: Final = frozenset({"no_answer", "tier_down"})


def add_to(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        Command(
            name="explain",
            summary="say why a prompt hits or misses",
            description=_DESCRIPTION,
            examples=(
                ("kvstore explain kvstore.toml --tokens prompt.json", "a prompt as a JSON list of token ids"),
                ("kvstore explain kvstore.toml --tokens prompt.txt --salt tenant-7", "the same of one tenant"),
                ("kvstore explain ~/.cache/llm-kvstore/store --hashes hashes.txt", "an engine's block hashes, in hex"),
                (
                    "kvstore explain kvstore.toml $(kvstore ls kvstore.toml --json | head -1 | jq -r .digest)",
                    "one block",
                ),
            ),
            run=_run,
        ),
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="STORE|KEY",
        help="config file or store directory; digest of a block (64 hex digits)",
    )
    add_store_options(parser)
    parser.add_argument("--tokens", metavar="FILE", help="token ids: a JSON list or numbers as text; - reads stdin")
    parser.add_argument("--hashes", metavar="FILE", help="block hashes of an engine, in the order of the prompt")
    parser.add_argument(
        "--hash-type", choices=("bytes", "text", "int"), default="bytes", help="what they are (bytes, in hex)"
    )
    parser.add_argument("--unchained", action="store_true", help="the hashes say nothing of what precedes their block")
    parser.add_argument("--salt", metavar="TEXT", help="salt of the keys")
    parser.add_argument("--adapter", metavar="NAME", help="adapter of the keys, with its revision")
    parser.add_argument("--group", metavar="N", type=int, help="KV group of the keys")
    parser.add_argument(
        "--namespace", metavar="NAME", help="start of its digest, or its model, where there are several"
    )


def _run(args: argparse.Namespace) -> int:
    from kvstore.cli.inquest import Inquest
    from kvstore.cli.prompts import Question
    from kvstore.cli.store import Named

    digest, args.store = _split(args.words)
    question = Question.by(args, digest)
    verdict = Inquest(Named.by(args), question, args.namespace).verdict()
    if args.json:
        print_json(_as_json(verdict))
    else:
        print("\n".join(_lines(verdict)))
    causes = {block.cause.value for answer in verdict.answers for block in answer.blocks}
    return store_exit_code(corrupt=bool(causes & _DAMAGE), unread=bool(causes & _UNREAD))


def _split(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Tell the store's name from the block's digest.

    Raises:
        ConfigError: There is more than one of a kind.
    """
    from kvstore.cli.prompts import DIGEST

    digests = [word for word in words if DIGEST.match(word) and not Path(word).exists()]
    stores = [word for word in words if word not in digests]
    if len(digests) > 1 or len(stores) > 1:
        msg = f"{' '.join(words)!r}: expected at most one STORE and one KEY, which has 64 hex digits"
        raise ConfigError(msg)
    return next(iter(digests), None), next(iter(stores), None)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "namespace": verdict.namespace,
        "block_tokens": verdict.block_tokens,
        "blocks": len(verdict.digests),
        "reachable_blocks": verdict.reachable,
        "tiers": [
            {
                "tier": answer.tier,
                "backend": answer.backend,
                "blocks": [
                    block.to_dict(i, digest)
                    for i, (block, digest) in enumerate(zip(answer.blocks, verdict.digests, strict=True))
                ],
            }
            for answer in verdict.answers
        ],
    }


def _lines(verdict: Verdict) -> Iterator[str]:
    yield verdict.title
    for answer in verdict.answers:
        yield f"tier {answer.tier!r} ({answer.backend})"
        rows = [("BLOCKS", "STATE", "WHY"), *(fold.row() for fold in _folds(answer))]
        yield from (f"  {line}" for line in table(rows))
    yield from verdict.conclusions


@dataclass(frozen=True, slots=True)
class _Fold:
    """Consecutive blocks of which the same is to be said."""

    first: int
    blocks: Sequence[Resting]

    def row(self) -> tuple[str, str, str]:
        """Cells of the table."""
        last = self.first + len(self.blocks) - 1
        span = str(self.first) if last == self.first else f"{self.first}-{last}"
        one = self.blocks[0]
        cause = one.cause.value
        facts = [one.detail] if one.detail else []
        if any(block.written for block in self.blocks):
            facts = [*facts, *_facts(self.blocks)]
        return span, _WORDS.get(cause, cause.replace("_", " ")), "; ".join(facts)


def _facts(blocks: Sequence[Resting]) -> Iterator[str]:
    """Age, use, size and codec of records that are there."""
    import time

    from kvstore.cli.output import age, size

    now = time.time()

    def span(times: Sequence[float]) -> str:
        newest, oldest = age(now - max(times)), age(now - min(times))
        return f"{newest} ago" if newest == oldest else f"{newest} to {oldest} ago"

    yield f"written {span([block.written for block in blocks])}"
    used = [block.used for block in blocks if block.used]
    if used:
        yield f"last used {span(used)}"
    yield size(sum(block.nbytes for block in blocks))
    yield f"codec {', '.join(sorted({block.codec for block in blocks}))}"


def _folds(answer: Answer) -> Iterator[_Fold]:
    numbered = enumerate(answer.blocks)
    for _, group in groupby(numbered, key=lambda pair: (pair[1].cause, pair[1].detail)):
        members = list(group)
        yield _Fold(members[0][0], [block for _, block in members])
