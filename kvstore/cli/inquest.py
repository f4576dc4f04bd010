"""The investigation behind ``kvstore explain``: which namespace, which key, every tier, then the whole picture."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvstore.cli.keys import record_keys
from kvstore.cli.lineage import ancestry
from kvstore.cli.namespaces import find_namespace, identity_lines, parse_document
from kvstore.cli.output import plural
from kvstore.cli.resting import ABSENT, Look, Resting, infer
from kvstore.cli.store import sites
from kvstore.errors import ConfigError
from kvstore.explain import Cause
from kvstore.other_namespaces import holders, neighbours
from kvstore.types import Call

if TYPE_CHECKING:
    from kvstore.cli.prompts import Asked, Question
    from kvstore.cli.store import Named, Site, Store
    from kvstore.namespace import Namespace
    from kvstore.other_namespaces import OtherNamespace
    from kvstore.spec import BlockSpec

_ELSEWHERE_BLOCKS: Final = 64  # absent blocks that other namespaces are asked for; one is told from the next
_ELSEWHERE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one tier says.

    Attributes:
        tier: Its name.
        backend: Its plugin.
        blocks: One for each block of the prompt.
    """

    tier: str
    backend: str
    blocks: list[Resting]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole explanation.

    Attributes:
        namespace: Digest of the namespace in hex; empty when the stores know none.
        block_tokens: Tokens of one block.
        digests: The blocks.
        answers: One for each tier.
        reachable: Leading blocks that a prefix read delivers.
        title: What was looked for.
        conclusions: What follows, line by line.
    """

    namespace: str
    block_tokens: int
    digests: Sequence[bytes]
    answers: list[Answer]
    reachable: int
    title: str
    conclusions: list[str]


@dataclass(frozen=True, slots=True)
class _Subject:
    """The namespace that is meant."""

    text: bytes
    namespace: Namespace
    spec: BlockSpec

    @property
    def digest(self) -> bytes:
        return self.namespace.digest(self.spec)


class Inquest:
    """Looks into every tier for the blocks of one question.

    Args:
        named: Which stores.
        question: Which blocks.
        wanted: Which namespace: start of its digest, or its model; None where there is one only.
    """

    def __init__(self, named: Named, question: Question, wanted: str | None) -> None:
        self._sites = sites(named)
        self._where = named.store or self._sites[0].config.source
        self._question = question
        self._wanted = wanted
        self._keys = record_keys(self._sites[0].config)
        self._texts: dict[str, dict[bytes, bytes]] = {}  # by tier: description by digest
        self._records = 0

    def verdict(self) -> Verdict:
        """Explain.

        Raises:
            ConfigError: It is not clear what is meant.
            BackendError: A tier cannot be opened or fails.
        """
        for site in self._sites:
            with site.opened() as store:
                self._texts[site.tier.name] = _descriptions(store)
                self._records += store.backend.usage().records
        subject = self._subject()
        if subject is None:
            return Verdict("", 0, (), [], 0, "nothing was stored here yet: no tier knows any namespace", [])
        asked = self._question.asked(subject.spec.block_tokens)
        answers = []
        conclusions: list[str] = []
        for site in self._sites:
            with site.opened() as store:
                answers.append(self._answer(site, store, subject, asked, conclusions))
        return self._conclude(subject, asked, answers, conclusions)

    # -- which namespace

    def _subject(self) -> _Subject | None:
        texts = {digest: text for known in self._texts.values() for digest, text in known.items()}
        where = self._where
        if not texts:
            if not self._records:
                return None
            msg = f"{where}: there are records and no description of their namespace, so no block can be named"
            raise ConfigError(msg)
        chosen = self._chosen(texts, where)
        parsed = parse_document(texts[chosen])
        if parsed is None:
            msg = f"{where}: the description of namespace {chosen.hex()} is damaged, or a newer release wrote it"
            raise ConfigError(msg)
        return _Subject(texts[chosen], *parsed)

    def _chosen(self, texts: dict[bytes, bytes], where: str) -> bytes:
        documents = {digest.hex(): json.loads(text) for digest, text in texts.items()}
        if self._wanted is not None:
            return find_namespace(self._wanted, texts, documents, where)
        if len(texts) == 1:
            return next(iter(texts))
        holder = self._holder(texts) if self._question.digest is not None else None
        if holder is not None:
            return holder
        listed = "; ".join(f"{digest[:12]} ({next(identity_lines(known), '')})" for digest, known in documents.items())
        msg = f"{where} holds several namespaces; say with --namespace which one is meant: {listed}"
        raise ConfigError(msg)

    def _holder(self, texts: dict[bytes, bytes]) -> bytes | None:
        """The namespace that holds the one block that is asked for."""
        asked = self._question.asked(1)
        for site in self._sites:
            with site.opened() as store:
                for digest in texts:
                    look = Look(store, digest, b"", None)
                    if any(any(look.present(replace(asked, kinds=(kind,)))) for kind in asked.kinds):
                        return digest
        return None

    # -- one tier

    def _answer(self, site: Site, store: Store, subject: _Subject, asked: Asked, conclusions: list[str]) -> Answer:
        look = Look(store, subject.digest, subject.spec.fingerprint(), self._keys)
        found = look.blocks(asked)
        blocks = infer(found, look.fullness(time.time()), empty=look.empty())
        unknown = [i for i, block in enumerate(blocks) if block.cause is Cause.NOT_STORED]
        if unknown:
            told = self._elsewhere(store, subject, asked, unknown)
            if not told and unknown[0] == 0:
                told = self._other_keys(look, subject) or self._other_lengths(store, subject, len(blocks))
            blocks = [
                replace(ABSENT, cause=told[i][0], detail=told[i][1]) if i in told else b for i, b in enumerate(blocks)
            ]
        if self._question.digest is not None:
            conclusions += ancestry(look, asked, blocks[0])
        return Answer(site.tier.name, site.tier.backend, blocks)

    def _elsewhere(
        self, store: Store, subject: _Subject, asked: Asked, unknown: Sequence[int]
    ) -> dict[int, tuple[Cause, str]]:
        """Absent blocks that other namespaces of the tier hold."""
        texts = list(self._texts[store.tier.name].values())
        others = neighbours(texts, subject.namespace, subject.spec)
        wanted = unknown[:_ELSEWHERE_BLOCKS]
        found: dict[int, OtherNamespace] = {}
        for kind in asked.kinds:
            found |= holders(store.backend, others, asked.sought(kind), wanted, Call.within(_ELSEWHERE_S))
        if len(found) == len(wanted) < len(unknown):
            found |= dict.fromkeys(unknown, found[wanted[-1]])
        return {
            i: (
                Cause.NAMESPACE_DIFFERS,
                f"namespace {other.digest.hex()[:12]} has it; they differ in {other.describe('asked for')}",
            )
            for i, other in found.items()
        }

    def _other_keys(self, look: Look, subject: _Subject) -> dict[int, tuple[Cause, str]]:
        """The same prompt under another salt, adapter or group."""
        for label, question in self._question.variants():
            there = look.present(question.asked(subject.spec.block_tokens))
            if any(there):
                text = f"the same tokens {label} are here: salt, adapter or group differ from the writer's"
                return {i: (Cause.KEY_DIFFERS, text) for i, here in enumerate(there) if here}
        return {}

    def _other_lengths(self, store: Store, subject: _Subject, n_blocks: int) -> dict[int, tuple[Cause, str]]:
        """The same prompt in blocks of another length, which other namespaces may have."""
        own = subject.spec.block_tokens
        for digest, text in self._texts[store.tier.name].items():
            parsed = parse_document(text)
            if parsed is None or parsed[1].block_tokens == own or self._question.digest is not None:
                continue
            theirs = parsed[1].block_tokens
            if any(Look(store, digest, b"", None).present(self._question.asked(theirs))):
                text_ = (
                    f"namespace {digest.hex()[:12]} has this prompt; they differ in spec.block_tokens: {own} asked "
                    f"for, {theirs} there"
                )
                return dict.fromkeys(range(n_blocks), (Cause.NAMESPACE_DIFFERS, text_))
        return {}

    # -- the whole picture

    def _conclude(self, subject: _Subject, asked: Asked, answers: list[Answer], conclusions: list[str]) -> Verdict:
        n_blocks, tokens = len(asked.digests), subject.spec.block_tokens
        there = [any(a.blocks[i].cause is Cause.PRESENT for a in answers) for i in range(n_blocks)]
        reachable = next((i for i, here in enumerate(there) if not here), n_blocks)
        text = f"a prefix read ends at block {reachable}, which is missing in every tier"
        hidden = [
            replace(a, blocks=[_behind(b, text) if i > reachable else b for i, b in enumerate(a.blocks)])
            for a in answers
        ]
        identity = next(identity_lines(json.loads(subject.text)), "")
        what = f"{plural(n_blocks, 'block')} of {plural(tokens, 'token')}"
        title = f"{what}, namespace {subject.digest.hex()[:12]} ({identity})"
        if self._question.digest is None:
            conclusions = [*conclusions, *_delivered(reachable, n_blocks, tokens)]
        return Verdict(subject.digest.hex(), tokens, asked.digests, hidden, reachable, title, conclusions)


def _descriptions(store: Store) -> dict[bytes, bytes]:
    """Descriptions by the digest that they claim."""
    found = {}
    for text in store.backend.namespaces():
        try:
            found[bytes.fromhex(json.loads(text)["digest"])] = text
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return found


def _behind(block: Resting, text: str) -> Resting:
    return replace(block, cause=Cause.BEHIND_A_HOLE, detail=text) if block.cause is Cause.PRESENT else block


def _delivered(reachable: int, n_blocks: int, block_tokens: int) -> Iterator[str]:
    if not n_blocks:
        yield "the prompt is shorter than one block: nothing of it can be stored"
    elif reachable == n_blocks:
        yield f"a read delivers the whole prompt: {plural(n_blocks * block_tokens, 'token')}"
    elif reachable:
        tokens = f"{reachable * block_tokens:,} of {plural(n_blocks * block_tokens, 'token')}"
        yield f"a read delivers the first {plural(reachable, 'block')}: {tokens}"
    else:
        yield f"a read delivers nothing of {plural(n_blocks * block_tokens, 'token')}"
