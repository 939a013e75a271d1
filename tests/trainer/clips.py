"""Support for tests with clips: small videos made on the spot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CODECS = {".mkv": "ffv1", ".mp4": "mpeg4", ".avi": "mpeg4", ".mov": "mpeg4", ".webm": "libvpx-vp9"}
GREY_STEP = 10


def make_clip(path: Path, *, frames: int = 12, fps: int = 8, size: tuple[int, int] = (64, 48)) -> Path:
    """A clip whose n-th frame is grey of level `GREY_STEP` n, with a white edge on the left; exact in `.mkv`."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix.lower()], rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "bgr0" if path.suffix == ".mkv" else "yuv420p"
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), GREY_STEP * number % 256, np.uint8)
            pixels[:, : size[0] // 8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def make_clips(folder: Path, count: int = 3, **options) -> Path:
    """A folder of clips with captions."""
    for number in range(count):
        make_clip(folder / f"{number}.mkv", **options)
        (folder / f"{number}.txt").write_text(f"grey that brightens, number {number}")
    return folder
