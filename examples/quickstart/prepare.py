"""Prepares the quickstart: a dozen real photographs with captions, and a tiny Z-Image model. Needs no network.

The photographs are copied out of the installed scikit-image wheel, which ships them; all are in the public domain or CC0.
The model has the classes and files of the real one and random weights of a few megabytes, so that the whole way is walked on
a laptop's CPU in a minute. To train a real adapter, put a real model and your own pictures in their place.

Usage: python examples/quickstart/prepare.py [OUT]
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LICENSE_NOTE = """\
These photographs come from the scikit-image project (https://scikit-image.org), which ships them in its wheel.
They are in the public domain, or their authors have waived their rights (CC0); scikit-image names the sources in
skimage/data/_fetchers.py. The captions were written for this example.
"""


@dataclass(frozen=True)
class Photo:
    """A photograph of the wheel, and what it shows."""

    file: str
    longest_side: int  # pixels; small, and different, so that pictures fall into several buckets
    caption: str


PHOTOS = (
    Photo(
        "astronaut.png", 256, "portrait of a smiling astronaut in an orange space suit in front of a flag and a shuttle"
    ),
    Photo("brick.png", 192, "a wall of weathered bricks in black and white, seen straight on"),
    Photo("camera.png", 224, "a man with a camera on a tripod on a lawn, black and white photograph"),
    Photo("chelsea.png", 320, "close-up of the face of a tabby cat that looks past the camera"),
    Photo("clock_motion.png", 240, "a round wall clock blurred by the motion of the camera, black and white"),
    Photo("coffee.png", 384, "a cup of espresso on a saucer with a small spoon, on a wooden table"),
    Photo("coins.png", 288, "rows of ancient Greek coins from Pompeii on a dark ground, black and white"),
    Photo("grass.png", 160, "blades of grass that fill the picture, black and white texture"),
    Photo("gravel.png", 176, "coarse gravel seen from above, black and white texture"),
    Photo(
        "hubble_deep_field.jpg",
        400,
        "hundreds of distant galaxies in front of black space, Hubble telescope photograph",
    ),
    Photo("retina.jpg", 272, "the retina of a human eye with its blood vessels, orange disc on black"),
    Photo("rocket.jpg", 352, "a rocket on its launch pad at dusk, between steel towers"),
)


def photo_folder() -> Path:
    """Where the installed wheel keeps its pictures. Raises SystemExit without scikit-image."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("scikit-image is not installed; its wheel holds the photographs: pip install scikit-image")
    return Path(spec.submodule_search_locations[0]) / "data"


def write_photos(source: Path, target: Path) -> int:
    """Writes every photograph with its caption beside it. Returns how many."""
    from PIL import Image  # noqa: PLC0415 - not needed for the usage text

    target.mkdir(parents=True, exist_ok=True)
    for photo in PHOTOS:
        with Image.open(source / photo.file) as picture:
            picture.thumbnail((photo.longest_side, photo.longest_side), Image.Resampling.LANCZOS)
            picture.convert("RGB").save(target / photo.file, quality=95)
        (target / photo.file).with_suffix(".txt").write_text(photo.caption + "\n")
    (target / "LICENSE").write_text(LICENSE_NOTE)
    return len(PHOTOS)


def write_model(target: Path) -> None:
    """Writes the tiny model, unless it is there already."""
    if (target / "model_index.json").exists():
        return
    subprocess.run([sys.executable, "-m", "lora_trainer", "make-tiny", str(target), "--arch", "zimage"], check=True)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "build"
    parser.add_argument("out", nargs="?", type=Path, default=default, help=f"folder to write (default: {default})")
    out = parser.parse_args().out
    count = write_photos(photo_folder(), out / "photos")
    print(f"{out / 'photos'}: {count} photographs with captions")  # noqa: T201 - a program that talks to people
    write_model(out / "model")
    print(f"{out / 'model'}: tiny Z-Image model with random weights")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
