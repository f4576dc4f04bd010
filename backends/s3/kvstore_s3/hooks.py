"""Registration of the S3 backend; imports neither boto3 nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.hookspecs import hookimpl
from kvstore.plugins import BackendPlugin
from kvstore_s3.options import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.backend import Backend, BackendContext, Finding

DEADLINE_S: Final = (
    2.0  # 32k tokens in 1 MiB packs take 0.3 s at 30 ms a request, 1.2 s at 1 Gbit/s; prefill is no slower than 2 s
)
WRITERS: Final = 4  # a call sends its packs in parallel by itself; four calls overlap encoding with sending


def _make() -> Backend:
    from kvstore_s3.backend import S3Backend

    return S3Backend()


def _diagnose(context: BackendContext) -> Sequence[Finding]:
    from kvstore_s3.diagnose import diagnose

    return diagnose(context)


@hookimpl
def kvstore_register_backends() -> Iterable[BackendPlugin]:
    """Offer ``backend = "s3"``."""
    return [
        BackendPlugin(
            name="s3",
            options=S3Options,
            factory=_make,
            summary="Bucket of AWS or an S3-compatible server, shared by machines; blocks travel in packs.",
            default_codec="planes-base",  # the smallest: a link of 10 Gbit/s is slower than any decoder
            default_admit="hot",  # a PUT costs more than ten GETs, and most stored blocks are never read again
            default_deadline_s=DEADLINE_S,
            max_writers=WRITERS,
            diagnose=_diagnose,
        )
    ]
