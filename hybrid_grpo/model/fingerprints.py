"""Fingerprints of files, and of the models in them: whether they are what they were.

A file of up to 64 MiB is read whole. Of a larger one the size is taken, the header of a safetensors file, and a block
of 4 KiB from the middle of every tensor in it; of other files, 1,024 blocks at equal distances. Other weights of the
same shapes differ there, and large models take seconds; what differs outside of the blocks alone goes unnoticed.
"""

import json
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from transformers.utils import cached_file

_WHOLE_BYTES, _BLOCK_BYTES, _BLOCKS = 64 << 20, 4096, 1024
_PARTS = {
    "weights": ("*.safetensors", "pytorch_model*.bin"),
    "configuration": ("config.json", "generation_config.json"),
    "tokenizer": (
        *("tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.*"),
        *("*.model", "*.tiktoken"),
    ),
}


def of_model(name: str) -> dict[str, str]:
    """Fingerprints of weights, configuration and tokenizer of a model in a folder, or of what there is of it in the
    cache of the hub."""
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except OSError:
        return {}
    folder = Path(config or name).parent
    parts = {part: sorted({path for glob in globs for path in folder.glob(glob)}) for part, globs in _PARTS.items()}
    return {part: of_texts(map(of_file, files)) for part, files in parts.items() if files}


def of_file(path: Path) -> str:
    """The name of a file, and what it holds."""
    size = path.stat().st_size
    seen = blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            seen.update(file.read())
        else:
            start = _header(file.read(8), size) if path.suffix == ".safetensors" else 0
            header = file.read(start - 8) if start else b""
            seen.update(header)
            for place in _places(header, start, size):
                file.seek(place)
                seen.update(file.read(_BLOCK_BYTES))
    return f"{path.name} {size} {seen.hexdigest()}"


def of_texts(texts: Iterable[str]) -> str:
    """One fingerprint of many texts in their order."""
    seen = blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        seen.update(b"%d " % len(encoded) + encoded)
    return seen.hexdigest()


def _header(beginning: bytes, size: int) -> int:
    """Where the tensors of a safetensors file begin; 0 where it is none."""
    start = 8 + struct.unpack("<Q", beginning)[0]
    return start if start < size else 0


def _places(header: bytes, start: int, size: int) -> list[int]:
    """Where blocks are read."""
    try:
        entries = (entry for name, entry in json.loads(header).items() if name != "__metadata__")
        return sorted(start + max(first, (first + end - _BLOCK_BYTES) // 2) for first, end in _offsets(entries))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [size * block // _BLOCKS for block in range(_BLOCKS)]


def _offsets(entries: Iterable[dict[str, list[int]]]) -> list[tuple[int, int]]:
    return [(int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries]
