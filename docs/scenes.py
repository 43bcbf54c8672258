"""Photographs of boats, houses, suns and trees, drawn at random for draw_photos.py."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

LONGER_SIDE = (120, 1200)
PROPORTIONS = (1.0, 3 / 4, 2 / 3, 9 / 16)

# Colors of the sky, above and at the horizon.
SKIES = (
    ((60, 120, 210), (190, 220, 245)),
    ((120, 140, 165), (215, 215, 210)),
    ((70, 60, 120), (250, 160, 90)),
    ((150, 110, 150), (250, 205, 150)),
)
SEAS = ((30, 80, 120), (20, 110, 120), (70, 90, 110))
MEADOWS = ((90, 140, 60), (120, 130, 70), (60, 110, 60), (150, 140, 90))
PAINTS = ((175, 60, 50), (230, 225, 210), (60, 90, 150), (205, 165, 90), (70, 70, 75))
LEAVES = ((40, 95, 45), (80, 125, 45), (175, 110, 40), (60, 110, 85))

Color = tuple[int, ...]


class Canvas:
    """A picture that is drawn in units of its shorter side, twice as large as it will
    be, so that its edges become smooth.

    Args:
        width, height: of the photograph.
        rng: draws whatever is left open.
    """

    def __init__(self, width: int, height: int, rng: np.random.Generator):
        self.unit = 2 * min(width, height)
        self.width, self.height = 2 * width / self.unit, 2 * height / self.unit
        self.rng = rng
        self.image = Image.new("RGB", (2 * width, 2 * height))
        self._draw = ImageDraw.Draw(self.image)

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def color(self, colors: Sequence[Color]) -> Color:
        """One of them, a little changed."""
        chosen = np.array(colors[self.rng.integers(len(colors))])
        return tuple(np.clip(chosen + self.rng.integers(-20, 21, 3), 0, 255).tolist())

    def pixel(self, x: float, y: float) -> np.ndarray:
        """The color at a place, int64 [3]."""
        place = (round(x * self.unit), round(y * self.unit))
        return np.array(self.image.getpixel(place))

    def polygon(self, color: Color, *points: tuple[float, float]) -> None:
        self._draw.polygon([(x * self.unit, y * self.unit) for x, y in points], color)

    def box(self, color: Color, left: float, top: float, right: float, bottom: float):
        self.polygon(color, (left, top), (right, top), (right, bottom), (left, bottom))

    def disc(self, color: Color, x: float, y: float, radius: float, flat: float = 1.0):
        """`flat`: its height over its width."""
        corners = (x - radius, y - flat * radius, x + radius, y + flat * radius)
        self._draw.ellipse([value * self.unit for value in corners], color)

    def shade(self, first: Color, last: Color, top: float, bottom: float) -> None:
        """Colors the rows from `top` to `bottom` from the first to the last."""
        begin, end = round(top * self.unit), round(bottom * self.unit)
        part = np.linspace(0, 1, max(end - begin, 1))[:, None, None]
        rows = (1 - part) * np.array(first) + part * np.array(last)
        rows = Image.fromarray(rows.astype(np.uint8))
        self.image.paste(rows.resize((self.image.width, len(part))), (0, begin))


def darker(color: Color, factor: float) -> Color:
    return tuple(min(255, round(factor * value)) for value in color)


def sky(canvas: Canvas, horizon: float) -> None:
    """The sky with soft clouds, and now and then a small sun."""
    size = (max(8, side // 16) for side in canvas.image.size)
    small = Canvas(*size, canvas.rng)  # it is blurred by being enlarged
    above, below = SKIES[canvas.rng.integers(len(SKIES))]
    small.shade(small.color([above]), small.color([below]), 0, horizon)
    if canvas.rng.random() < 0.3:
        x, y = canvas.uniform(0, canvas.width), canvas.uniform(0.05, 0.5 * horizon)
        small.disc((255, 240, 190), x, y, canvas.uniform(0.02, 0.05))
    for _ in range(canvas.rng.integers(4)):
        x, y = canvas.uniform(0, canvas.width), canvas.uniform(0.05, 0.8 * horizon)
        gray = round(canvas.uniform(190, 250))
        for _ in range(4):
            right, down = canvas.uniform(-0.12, 0.12), canvas.uniform(-0.02, 0.02)
            radius = canvas.uniform(0.04, 0.1)
            small.disc((gray, gray, gray), x + right, y + down, radius, 0.35)
    canvas.image.paste(small.image.resize(canvas.image.size, Image.Resampling.BILINEAR))


def sea(canvas: Canvas, horizon: float) -> None:
    water = canvas.color(SEAS)
    canvas.shade(darker(water, 1.4), darker(water, 0.7), horizon, canvas.height)
    for _ in range(60):
        y = canvas.uniform(horizon, canvas.height)
        x, half = canvas.uniform(0, canvas.width), 0.2 * (y - horizon) + 0.005
        light = darker(water, canvas.uniform(0.8, 1.7))
        canvas.disc(light, x, y, half, 0.08)


def meadow(canvas: Canvas, horizon: float) -> None:
    """Grass with hills behind it."""
    grass = canvas.color(MEADOWS)
    x, height = canvas.uniform(0, canvas.width), canvas.uniform(0, 0.15)
    canvas.disc(darker(grass, 0.7), x, horizon, canvas.uniform(0.4, 0.9), height)
    canvas.shade(darker(grass, 0.9), darker(grass, 1.2), horizon, canvas.height)
    for _ in range(80):
        y = canvas.uniform(horizon, canvas.height)
        x, half = canvas.uniform(0, canvas.width), 0.03 * (y - horizon) + 0.002
        canvas.disc(darker(grass, canvas.uniform(0.7, 1.4)), x, y, half)


def boat(canvas: Canvas, x: float, y: float, size: float) -> None:
    """Hull, mast and one or two sails, on the water line y."""
    hull, sail = canvas.color(PAINTS), canvas.color([(240, 235, 220), (200, 70, 50)])
    half, depth = 0.5 * size, 0.16 * size
    canvas.disc(darker(hull, 0.4), x, y + depth, 0.9 * half, 0.12)
    canvas.polygon(
        hull,
        *((x - half, y - depth), (x + half, y - depth)),
        *((x + 0.7 * half, y + depth), (x - 0.7 * half, y + depth)),
    )
    mast, top = (
        x + canvas.uniform(-0.1, 0.1) * size,
        y - canvas.uniform(0.8, 1.1) * size,
    )
    canvas.box((80, 60, 45), mast - 0.015 * size, top, mast + 0.015 * size, y - depth)
    foot = y - 1.3 * depth
    side = canvas.rng.choice([-1, 1])
    near, far = mast + side * 0.03 * size, mast + side * 0.42 * size
    canvas.polygon(sail, (near, top), (far, foot), (near, foot))
    if canvas.rng.random() < 0.6:
        near, far = mast - side * 0.03 * size, mast - side * 0.3 * size
        jib = (near, top + 0.15 * size), (far, foot), (near, foot)
        canvas.polygon(darker(sail, 0.9), *jib)


def house(canvas: Canvas, x: float, y: float, size: float) -> None:
    """Walls with windows and a door, a roof and often a chimney, standing at y."""
    wall, roof = canvas.color(PAINTS), canvas.color([(140, 60, 45), (80, 75, 75)])
    half, height = 0.5 * size, canvas.uniform(0.45, 0.75) * size
    eaves = y - height
    ridge = eaves - canvas.uniform(0.3, 0.5) * size
    if canvas.rng.random() < 0.7:
        left = x + canvas.uniform(-0.3, 0.15) * size
        canvas.box(darker(roof, 0.8), left, ridge, left + 0.1 * size, eaves)
    gable = canvas.uniform(0, 0.25) * size
    corners = (x - 1.2 * half, eaves), (x - gable, ridge)
    canvas.polygon(roof, *corners, (x + gable, ridge), (x + 1.2 * half, eaves))
    canvas.box(wall, x - half, eaves, x + half, y)
    panes = canvas.color([(60, 75, 95), (245, 215, 130)])
    door = x + canvas.uniform(-0.12, 0.06) * size
    canvas.box(darker(roof, 0.6), door, y - 0.32 * size, door + 0.15 * size, y)
    for left in (-0.4, 0.2):
        top, pane = eaves + 0.1 * size, 0.17 * size
        canvas.box(
            panes, x + left * size, top, x + left * size + pane, top + 0.8 * pane
        )


def sun(canvas: Canvas, x: float, y: float, size: float) -> None:
    """A large sun over the horizon y, with its light on the water."""
    light = canvas.color([(255, 235, 170), (250, 150, 70), (240, 240, 235)])
    radius = 0.3 * size
    height = y - canvas.uniform(0.2, 1.6) * radius
    behind = canvas.pixel(x, height)
    for step in range(6, 0, -1):
        glow = behind + (np.array(light) - behind) * (0.5 - 0.08 * step)
        canvas.disc(tuple(glow.astype(int)), x, height, radius * (1 + 0.1 * step))
    canvas.disc(light, x, height, radius)
    sea(canvas, y)
    while y < canvas.height:
        half = radius * canvas.uniform(0.3, 0.9)
        canvas.disc(light, x + canvas.uniform(-0.3, 0.3) * radius, y, half, 0.06)
        y += canvas.uniform(0.02, 0.05)


def tree(canvas: Canvas, x: float, y: float, size: float) -> None:
    """A round or a pointed crown on a trunk that stands at y."""
    leaves, bark = canvas.color(LEAVES), canvas.color([(90, 65, 45), (120, 110, 100)])
    half = canvas.uniform(0.03, 0.07) * size
    canvas.disc(darker(leaves, 0.5), x, y, 0.35 * size, 0.15)
    canvas.box(bark, x - half, y - 0.6 * size, x + half, y)
    if canvas.rng.random() < 0.4:
        for layer in range(3):
            foot, width = y - (0.2 + 0.27 * layer) * size, (0.42 - 0.1 * layer) * size
            tip, color = (x, foot - 0.48 * size), darker(leaves, 0.7 + 0.15 * layer)
            canvas.polygon(color, (x - width, foot), tip, (x + width, foot))
        return
    for _ in range(40):
        angle, far = canvas.uniform(0, 2 * math.pi), canvas.uniform(0, 0.27) * size
        right, up = far * math.cos(angle), far * math.sin(angle)
        color = darker(leaves, 0.9 + 0.5 * up / size + canvas.uniform(-0.2, 0.2))
        canvas.disc(color, x + right, y - 0.75 * size - up, 0.13 * size)


# Class -> the ground, the thing, and what may stand there too, far away.
Draw = Callable[..., None]
SCENES: dict[str, tuple[Draw, Draw, Draw]] = {
    "boat": (sea, boat, boat),
    "house": (meadow, house, tree),
    "sun": (sea, sun, boat),
    "tree": (meadow, tree, house),
}


def photograph(class_name: str, rng: np.random.Generator) -> Image.Image:
    """A photograph in color, upright."""
    least, most = LONGER_SIDE
    longer = least * (most / least) ** rng.random() ** 2  # more small ones than large
    sides = round(longer), round(longer * rng.choice(PROPORTIONS))
    canvas = Canvas(*(sides if rng.random() < 0.5 else sides[::-1]), rng)
    horizon = canvas.uniform(0.45, 0.65) * canvas.height
    ground, thing, other = SCENES[class_name]
    sky(canvas, horizon)
    ground(canvas, horizon)
    # Not farther from the middle than the middle square shows.
    x = canvas.width / 2 + canvas.uniform(-0.2, 0.2)
    size = canvas.uniform(0.4, 0.65)
    if thing is sun:
        thing(canvas, x, horizon, size)
    if rng.random() < 0.4:
        far = canvas.width / 2 + canvas.rng.choice([-1, 1]) * canvas.uniform(0.25, 0.45)
        other(canvas, far, horizon + 0.02, canvas.uniform(0.08, 0.18))
    if thing is not sun:
        y = min(horizon + canvas.uniform(0.1, 0.3), (canvas.height + 0.8) / 2)
        thing(canvas, x, y, size)
    return exposed(canvas.image.reduce(2), rng)


def exposed(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """An image with the light, the noise and now and then the blur of a camera."""
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(0.005 * image.width))
    light = rng.uniform(0.6, 1.25) * rng.uniform(0.9, 1.1, (3, 1))
    curve = np.clip(light * np.arange(256) / 255, 0, 1) ** rng.uniform(0.8, 1.25)
    image = image.point(np.rint(255 * curve).astype(int).ravel().tolist())
    noise = rng.standard_normal((image.height, image.width, 1), np.float32)
    pixels = np.asarray(image) + noise * np.float32(rng.uniform(2, 14))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
