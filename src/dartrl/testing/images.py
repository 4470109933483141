"""Tiny valid PNG files without an imaging library."""

from __future__ import annotations

import struct
import zlib


def flat_png(width: int, height: int, shade: int) -> bytes:
    """PNG bytes of a grey picture; `shade` in [0, 255] makes pictures differ."""
    rows = (b"\x00" + bytes([shade % 256]) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 1)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
