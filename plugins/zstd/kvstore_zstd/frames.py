"""Single zstd frames, read with distrust.

A zstd frame declares the size of its content, and the library allocates that much before it looks
at the data: 13 bytes can ask for exabytes, and a limit given to ``decompress`` is ignored then.
What follows a frame is ignored as well unless told otherwise.  So the declared size is compared
first, and all input must be consumed.
"""

from __future__ import annotations

import zstandard

from kvstore.errors import CorruptRecordError


def open_frame(decompressor: zstandard.ZstdDecompressor, frame: memoryview, content_bytes: int) -> bytes:
    """Decompress exactly one frame of exactly ``content_bytes``.

    Raises:
        CorruptRecordError: ``codec``: another size is declared or produced, the frame is damaged,
            a skippable frame, or followed by anything.
    """
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != content_bytes:
            raise CorruptRecordError("codec", f"a zstd frame declares {declared} bytes, expected {content_bytes}")
        content = decompressor.decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptRecordError("codec", f"zstd frame of {len(frame)} bytes: {error}") from error
    if len(content) != content_bytes:
        raise CorruptRecordError("codec", f"a zstd frame held {len(content)} bytes, expected {content_bytes}")
    return content
