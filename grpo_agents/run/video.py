"""Writes episodes to an MP4 file; needs no display."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from grpo_agents.errors import CheckpointError
from grpo_agents.run.moment import Moment, Viewer
from grpo_agents.run.panel import GROUND, draw_frame


class VideoViewer(Viewer):
    """One frame a moment, without waiting. H.264 where PyAV has libx264, else MPEG-4 part 2.

    The file is written beside its name and renamed by `close`. Where no moment was shown, or the `with` block ends with
    an exception, nothing is left, and a file that was there before stays as it was.

    Args:
        path: the MP4 file.
        fps: frames a second when it is played back.

    Raises:
        CheckpointError: by `show` and `close`, when the file cannot be written.
    """

    def __init__(self, path: str | Path, fps: float):
        self.path = Path(path)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._rate = Fraction(fps).limit_denominator(1001)
        self._container: Any = None
        self._stream: Any = None

    def show(self, moment: Moment) -> bool:
        """Append a frame. The first fixes the size; frames of another size are fitted into it."""
        frame = draw_frame(moment)
        with self._discarding_on_error():
            if self._container is None:
                self._open(frame)
            size = (self._stream.width, self._stream.height)
            if frame.shape[1::-1] != size:
                frame = np.asarray(ImageOps.pad(Image.fromarray(frame), size, color=GROUND))
            self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        return True

    def close(self) -> None:
        if self._container is None:
            return
        with self._discarding_on_error():
            self._container.mux(self._stream.encode())
            self._container.close()
            os.replace(self._temporary, self.path)
        self._container = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _open(self, frame: NDArray[np.uint8]) -> None:
        # The index goes first, so that a browser plays the file while it is still loading.
        self._container = av.open(str(self._temporary), "w", format="mp4", options={"movflags": "faststart"})
        if "libx264" in av.codecs_available:
            self._stream = self._container.add_stream(
                "libx264", self._rate, options={"crf": "18", "preset": "veryfast"}
            )
        else:
            self._stream = self._container.add_stream("mpeg4", self._rate, options={"qscale": "3"})
        self._stream.pix_fmt = "yuv420p"
        self._stream.height, self._stream.width = frame.shape[:2]

    def _discard(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            # What cannot be written is deleted next.
            with suppress(OSError, av.FFmpegError):
                container.close()
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _discarding_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, av.FFmpegError) as error:
            self._discard()
            raise CheckpointError(
                f"{self.path} cannot be written ({error.strerror or error}). Free some space, or check that its folder "
                "exists and may be written to"
            ) from error
