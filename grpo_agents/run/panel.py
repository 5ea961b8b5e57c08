"""Draws a moment for the video and the window: the environment's frame, and beside it a panel with the decision.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from grpo_agents.run.moment import Moment

GROUND, ROW, TEXT, MUTED = "#14171F", "#2A303D", "#F2F4F7", "#98A1B0"
BAR, CHOSEN = "#0072B2", "#D55E00"

LEAST_HEIGHT, MOST_HEIGHT = 400, 800
"""Smaller pictures are enlarged by a whole number, larger ones are reduced, so that a panel of readable text fits."""
PANEL_WIDTH, MARGIN = 320, 16
"""Pixels at a height of 400; a panel of another height is scaled, up to one and a half times."""
LEAST_PITCH, MOST_PITCH = 16, 38
"""Distance of the actions' rows in the same pixels: what they need at least, and take at most."""
ONE_COLUMN = 9
"""Most actions that stand in one column."""


def draw_frame(moment: Moment) -> NDArray[np.uint8]:
    """The environment's frame with the panel to its right: uint8 (H, W, 3), both sizes even, as H.264 wants them."""
    picture = _resized(moment.picture)
    panel = draw_panel(moment, picture.shape[0])
    frame = np.concatenate([picture, panel], axis=1)
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")


def draw_panel(moment: Moment, height: int) -> NDArray[np.uint8]:
    """The decision: title, counters, what the policy sees, and the probability of each action.

    The chosen action's bar has its own colour. Of more than `SHOWN_ACTIONS` actions the likeliest are drawn.

    Args:
        moment: what to draw.
        height: height of the panel in pixels; at least 400 for 20 readable actions.

    Returns:
        uint8 (height, width, 3); the width depends on the height alone.
    """
    scale = min(max(height / LEAST_HEIGHT, 1.0), 1.5)
    panel = Image.new("RGB", (round(PANEL_WIDTH * scale), height), GROUND)
    draw = ImageDraw.Draw(panel)
    small = _font(round(12 * scale))
    left, right = round(MARGIN * scale), panel.width - round(MARGIN * scale)
    font = _font(round(17 * scale))
    draw.text((left, 30 * scale), _shortened(moment.title, right - left, font), TEXT, font, anchor="ls")

    counters = {"step": str(moment.step), "episode": str(moment.episode), "return": moment.total_text()}
    for column, (label, value) in enumerate(counters.items()):
        x = left + column * (right - left) / 3
        draw.text((x, 56 * scale), label, MUTED, small, anchor="ls")
        draw.text((x, 77 * scale), value, TEXT, _font(round(20 * scale)), anchor="ls")

    draw.text((left, 103 * scale), "what the policy sees", MUTED, small, anchor="ls")
    top, bottom = round(110 * scale), height - round(12 * scale)
    indices = moment.listed()
    columns = 1 if len(indices) <= ONE_COLUMN else 2
    rows = math.ceil(len(indices) / columns)
    spare = bottom - top - round((25 + LEAST_PITCH * rows) * scale)
    seen = _enlarged(moment.seen, right - left, max(min(spare, round(0.28 * height)), 1))
    panel.paste(seen, (left, top))

    label = "actions" if len(indices) == len(moment.actions) else f"{len(indices)} of {len(moment.actions)} actions"
    top += seen.height + round(25 * scale)
    if indices:
        draw.text((left, top - 7 * scale), label, MUTED, small, anchor="ls")
        _draw_actions(draw, moment, indices, (left, top, right, bottom), columns, scale)
    return np.asarray(panel)


def _draw_actions(
    draw: ImageDraw.ImageDraw,
    moment: Moment,
    indices: list[int],
    box: tuple[int, int, int, int],
    columns: int,
    scale: float,
) -> None:
    """Rows of word, bar and number within the box (left, top, right, bottom), read down one column, then the next."""
    left, top, right, bottom = box
    rows = math.ceil(len(indices) / columns)
    gap = round(8 * scale)
    width = (right - left - gap * (columns - 1)) // columns
    pitch = min((bottom - top) // rows, round(MOST_PITCH * scale))
    bar_height = max(pitch - max(2, round(pitch / 8)), 1)
    font = _font(max(min(round(0.68 * bar_height), round(15 * scale)), 7))
    pad = max(round(bar_height / 4), 3)
    for place, index in enumerate(indices):
        x, y = left + (place // rows) * (width + gap), top + (place % rows) * pitch
        probability = float(moment.probabilities[index])
        chosen = index == moment.choice
        draw.rectangle((x, y, x + width - 1, y + bar_height - 1), ROW)
        filled = round(width * min(max(probability, 0.0), 1.0))
        if filled:
            draw.rectangle((x, y, x + filled - 1, y + bar_height - 1), CHOSEN if chosen else BAR)
        if chosen:
            draw.rectangle((x, y, x + width - 1, y + bar_height - 1), outline=CHOSEN, width=max(round(scale), 1))
        number = f"{probability:.2f}"
        # The baseline is set by the height of capitals, so that words with and without descenders stand alike.
        baseline = y + round((bar_height - font.getbbox("H", anchor="ls")[1]) / 2)
        word = _shortened(moment.actions[index], width - 3 * pad - font.getlength("0.00"), font)
        draw.text((x + pad, baseline), word, TEXT, font, anchor="ls")
        draw.text((x + width - pad, baseline), number, TEXT, font, anchor="rs")


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; its digits have one width."""
    return ImageFont.load_default(size=size)


def _shortened(text: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, or as much of its beginning as fits the width with an ellipsis."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _enlarged(pixels: NDArray[np.uint8], width: int, height: int) -> Image.Image:
    """The pixels as squares, as large as fits the box; pixels that are more than the box holds are averaged."""
    image = Image.fromarray(pixels)
    factor = min(width / image.width, height / image.height)
    if factor >= 1:
        factor = int(factor)
    size = (max(round(image.width * factor), 1), max(round(image.height * factor), 1))
    return image.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BOX)


def _resized(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture with a height between the limits, aspect ratio kept."""
    height, width = picture.shape[:2]
    if height < LEAST_HEIGHT:
        factor = math.ceil(LEAST_HEIGHT / height)
        return picture.repeat(factor, axis=0).repeat(factor, axis=1)
    if height > MOST_HEIGHT:
        size = (round(width * MOST_HEIGHT / height), MOST_HEIGHT)
        return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))
    return picture
