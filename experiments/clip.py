"""Turn a video into a small looping GIF: `python experiments/clip.py runs/NAME/evaluation.mp4 assets/figures/NAME.gif`."""

from __future__ import annotations

import sys
from pathlib import Path

import av
from PIL import Image

EVERY = 3
"""Only each third frame is kept: CartPole's 50 a second become 17, which browsers play at the right speed."""
LENGTH = 120
"""Frames of the clip, about seven seconds."""
WIDTH = 460
COLORS = 32


def clip(video: Path, target: Path) -> None:
    """Write the beginning of a video as an animated GIF.

    Args:
        video: a file that PyAV reads.
        target: the GIF to write.
    """
    with av.open(str(video)) as container:
        rate = float(container.streams.video[0].average_rate or 50)
        pictures: list[Image.Image] = []
        for index, frame in enumerate(container.decode(video=0)):
            if index % EVERY == 0:
                picture = frame.to_image()
                height = round(picture.height * WIDTH / picture.width)
                pictures.append(picture.resize((WIDTH, height), Image.Resampling.BOX).quantize(COLORS))
            if len(pictures) == LENGTH:
                break
    target.parent.mkdir(parents=True, exist_ok=True)
    first, *others = pictures
    first.save(target, save_all=True, append_images=others, duration=round(1000 * EVERY / rate), loop=0, optimize=True)


if __name__ == "__main__":
    clip(Path(sys.argv[1]), Path(sys.argv[2]))
