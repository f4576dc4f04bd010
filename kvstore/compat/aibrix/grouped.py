"""AIBrix's cache for the ranks of a tensor-parallel group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvstore.compat.aibrix.arguments import Arguments
from kvstore.compat.aibrix.cache import AibrixCache
from kvstore.compat.aibrix.handles import KVCacheHandle
from kvstore.compat.aibrix.spec import KVCacheConfig
from kvstore.compat.aibrix.status import Status, StatusCodes
from kvstore.group import LOCAL_SHARE, Agreement, Clock, question

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log: Final = logging.getLogger(__name__)


class AibrixGroupCache(AibrixCache):
    """A cache whose ``acquire`` and ``get`` give every rank of a group the same number of tokens.

    All ranks call both with the same prefix and query, in the same order.  What one rank lacks, or
    fails to read, is a miss for all.  A rank that does not come in time is not waited for longer
    than 1.7 deadlines; the group is broken then, and everything a miss.  The other methods speak for
    their own rank, as AIBrix's do: ranks need not agree on when to ask ``exists``.

    Args:
        config: Shape of this rank's blocks.
        process_group: The ranks; every one of them makes its cache at about the same time.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised, or a setting is wrong.
    """

    def __init__(self, config: KVCacheConfig, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self._agreement = Agreement.join(process_group)
        self.world_size: int = process_group.size()
        self.rank: int = process_group.rank()
        super().__init__(config)
        # A rank's own work may take its tiers' whole deadline before it answers the others.
        self._deadline_s = self._store.config.defaults.deadline / LOCAL_SHARE

    def close(self) -> None:
        """Leave the group and close; takes at most about 5 s."""
        super().close()
        if self._agreement is not None:
            self._agreement.close()

    def _acquire(self, arguments: Arguments) -> Status[tuple[int, KVCacheHandle]]:
        clock = Clock.start(self._deadline_s)
        own = self._attempt(super()._acquire, arguments)
        handle: KVCacheHandle | None = own.value[1] if own.is_ok() else None
        n_blocks = self._agree("acquire", arguments, 0 if handle is None else len(handle), clock)
        if handle is None:
            return own
        handle.truncate(n_blocks)
        if not n_blocks:
            return Status(StatusCodes.NOT_FOUND)
        return Status.ok((n_blocks * self.block_ntokens, handle))

    def _get(self, arguments: Arguments) -> Status[int]:
        clock = Clock.start(self._deadline_s)
        own = self._attempt(super()._get, arguments)
        n_blocks = own.value // self.block_ntokens if own.is_ok() else 0
        n_blocks = self._agree("get", arguments, n_blocks, clock)
        return self._tokens(n_blocks) if own.is_ok() else own

    @staticmethod
    def _attempt(function: Callable[[Arguments], Status[Any]], arguments: Arguments) -> Status[Any]:
        try:
            return function(arguments)
        except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks wait for this one's answer
            return Status(StatusCodes.ERROR, e)

    def _agree(self, call: str, arguments: Arguments, n_blocks: int, clock: Clock) -> int:
        """The smallest number of blocks of all ranks."""
        if self._agreement is None:
            return n_blocks
        wanted = self._address(arguments)
        asked = question(call, wanted.key().digests if wanted.n_blocks else ())
        (agreed,) = self._agreement.agree(asked, [n_blocks], clock)
        return agreed

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.rank} of {self.world_size}]({self._store!r})"
