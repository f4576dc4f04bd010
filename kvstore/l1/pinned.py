"""Page-locking of the host slab, so that an accelerator copies to and from it on its own."""

from __future__ import annotations

import contextlib
import logging
import sys

logger = logging.getLogger("kvstore.cache")


def accelerator_in_use() -> bool:
    """Whether this process works with CUDA already.

    Page-locking makes a CUDA context, which takes device memory and breaks a later fork: a process
    that never touches the device shall not pay for that.
    """
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available()) and bool(torch.cuda.is_initialized())


def pin(address: int, nbytes: int) -> bool:
    """Page-lock memory for every CUDA device of this process.

    Takes the memory from the system now, about 0.1 s per GiB.  A refusal is logged once, and the
    memory stays usable as it is.

    Args:
        address: Start, on a page boundary.
        nbytes: Length.

    Returns:
        Whether it is page-locked now; then :func:`unpin` it before it is unmapped.
    """
    from torch import cuda

    try:
        cuda.init()  # type: ignore[no-untyped-call]
        cuda.check_error(cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:  # torch raises a bare AssertionError without CUDA
        logger.warning(
            "the L1 slab (%d bytes) is not page-locked: %s; copies to and from the device go through a staging "
            "buffer. Raise the memlock limit (ulimit -l), lower l1.capacity, or set l1.pin to 'never'",
            nbytes,
            e,
        )
        _forget_error()
        return False
    return True


def unpin(address: int) -> None:
    """Undo :func:`pin`."""
    from torch import cuda

    with contextlib.suppress(RuntimeError):  # the driver is shutting down: nothing left to undo
        cuda.check_error(cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """CUDA repeats the last error to whoever launches a kernel next: let that be us."""
    import torch

    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
