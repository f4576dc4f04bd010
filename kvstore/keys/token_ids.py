"""Token ids from any container, as u32 little-endian bytes."""

from __future__ import annotations

import operator
import reprlib
import sys
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Protocol, SupportsIndex, TypeAlias

TOKEN_LIMIT: Final = 1 << 32
"""Token ids are below this: they are stored as u32."""


class SupportsArray(Protocol):
    """A numpy array, or what converts itself to one: torch and JAX tensors, pandas columns."""

    def __array__(self) -> Any:
        """Return the values as a numpy array."""


TokenIds: TypeAlias = Sequence[SupportsIndex] | SupportsArray
"""List, tuple, range, ``array.array``, or a one-dimensional integer array of numpy, torch and the like."""


def token_bytes(ids: object, name: str) -> bytes:
    """Convert token ids; equal values give equal bytes, whatever the container or integer width.

    Neither numpy nor torch is imported unless ``ids`` comes from them.  A tensor on an accelerator
    is copied to the host first.

    Args:
        ids: :data:`TokenIds` in ``[0, 2**32)``.
        name: What to call ``ids`` in errors, such as ``"query"``.

    Returns:
        The ids as u32 little-endian.

    Raises:
        TypeError: ``ids`` is no sequence of integers (text, bytes, a set, an iterator).
        ValueError: An id is no integer or out of range, named with its index; or the array is not
            one-dimensional or not of an integer dtype.
    """
    if hasattr(ids, "__array__"):
        return _from_array(ids, name)
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise TypeError(
            f"{name} is of type {type(ids).__name__}; "
            "expected a sequence of token ids: list, tuple, range or integer array"
        )
    return _from_sequence(ids, name)


def _from_sequence(ids: Sequence[SupportsIndex], name: str) -> bytes:
    # array("I", ...) refuses what does not fit, but takes bools and IntEnums for integers; looking
    # for them first costs 0.9 ms per 65,536 ids. Whatever is unusual goes the slow way.
    if isinstance(ids, range | array) or list(map(type, ids)).count(int) == len(ids):
        try:
            return _little_endian(array("I", ids))  # type: ignore[arg-type]  # elements are known by now
        except (OverflowError, TypeError):
            pass  # the slow way names the culprit
    return _little_endian(array("I", [_checked(i, token, name) for i, token in enumerate(ids)]))


def _little_endian(ids: array[int]) -> bytes:
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        ids.byteswap()
    return ids.tobytes()


def _checked(index: int, token: Any, name: str) -> int:
    value = token.tolist() if hasattr(token, "tolist") else token  # numpy and torch scalars
    if not hasattr(value, "__index__") or isinstance(value, (bool, Enum)):
        raise _bad_token(index, value, name)
    number = operator.index(value)
    if not 0 <= number < TOKEN_LIMIT:
        raise _bad_token(index, number, name)
    return number


def _bad_token(index: int, value: object, name: str) -> ValueError:
    return ValueError(
        f"{name}[{index}] is {reprlib.repr(value)} ({type(value).__name__}); "
        f"expected an integer token id, 0 to {TOKEN_LIMIT - 1}"
    )


def _from_array(ids: Any, name: str) -> bytes:
    import numpy as np

    tensor = ids.detach().cpu() if hasattr(ids, "detach") else ids
    try:
        values = np.asarray(tensor)
    except TypeError as e:  # torch.bfloat16 and other dtypes that numpy lacks
        raise ValueError(f"{name} has dtype {ids.dtype}; expected an integer dtype") from e
    if values.ndim != 1:
        raise ValueError(
            f"{name} has shape {values.shape}; expected one dimension: pass one sequence at a time, such as ids[0]"
        )
    if values.size == 0:  # an empty array's dtype says nothing: np.array([]) is float64
        return b""
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {values.dtype}; expected an integer dtype")
    if int(values.min()) < 0 or int(values.max()) >= TOKEN_LIMIT:
        index = int(np.flatnonzero((values < 0) | (values >= TOKEN_LIMIT))[0])
        raise _bad_token(index, int(values[index]), name)
    return values.astype("<u4", copy=False).tobytes()
