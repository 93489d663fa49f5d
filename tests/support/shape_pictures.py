"""Pictures of one or two shapes, as those that the example's model was trained on."""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (220, 20, 30)),
    "green": ((0, 128, 0), (0, 190, 30), (40, 160, 60)),
    "blue": ((0, 0, 255), (30, 90, 220)),
    "yellow": ((255, 255, 0), (250, 220, 20)),
    "orange": ((255, 150, 0), (250, 130, 20)),
    "purple": ((128, 0, 128), (150, 40, 200)),
    "black": ((0, 0, 0),),
}
"""Names of colours, with some of each, of which a picture has one that is close to it."""
BACKGROUND = (255, 255, 255)
NEAR = 15
"""Largest distance of a colour from the named one, in each channel."""


@dataclass(frozen=True)
class Figure:
    """One shape of a picture."""

    shape: str
    colour: str
    x: float
    """Its centre, as a share of the picture's width."""
    y: float
    radius: float
    """Distance from the centre to the furthest point, as a share of the picture's shorter side."""
    angle: float
    """Degrees by which it is turned."""

    @property
    def name(self) -> str:
        """The figure in words, without an article."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """All that a picture shows, on a white background."""

    figures: tuple[Figure, ...]
    """Figures from left to right."""

    @property
    def description(self) -> str:
        """The scene in words."""
        return " and ".join(with_article(figure.name) for figure in self.figures)


def with_article(name: str) -> str:
    """Return the name with "a" or "an" before it."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def scene(rng: random.Random) -> Scene:
    """Return a random scene: one or two figures, of different shapes and colours."""
    colours = rng.sample(list(COLOURS), 2)
    shapes = rng.sample(SHAPES, 2)
    if rng.random() < 0.5:
        radius = rng.uniform(0.2, 0.45)
        spaces = [(radius, 1 - radius)]
    else:
        radius = rng.uniform(0.18, 0.24)
        middle = rng.uniform(0.45, 0.55)
        spaces = [(radius, middle - radius), (middle + radius, 1 - radius)]
    figures = []
    for (left, right), shape, colour in zip(spaces, shapes, colours, strict=False):
        x = (left + right) / 2 if right <= left else rng.uniform(left, right)
        y = rng.uniform(radius, 1 - radius)
        figures.append(Figure(shape, colour, x, y, radius, rng.uniform(-8, 8)))
    return Scene(tuple(figures))


def draw(scene: Scene, rng: random.Random, size: int | None = None) -> Image.Image:
    """Draw the scene, by default of a random size from 84 to 256 pixels."""
    size = size or rng.randint(84, 256)
    picture = Image.new("RGB", (size, size), _near(BACKGROUND, rng))
    pen = ImageDraw.Draw(picture)
    for figure in scene.figures:
        x, y, radius = figure.x * size, figure.y * size, figure.radius * size
        fill = _near(rng.choice(COLOURS[figure.colour]), rng)
        if figure.shape == "circle":
            radius *= 0.92
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        else:
            turned = math.radians(figure.angle)
            cos, sin = math.cos(turned), math.sin(turned)
            corners = _CORNERS[figure.shape]
            pen.polygon(
                [(x + radius * (cos * a - sin * b), y + radius * (sin * a + cos * b)) for a, b in corners], fill
            )
    return picture


def _near(colour: Colour, rng: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, channel + rng.randint(-NEAR, NEAR))) for channel in colour)
    return red, green, blue


def _around(*points: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return points given as (degrees from the top, distance from the centre)."""
    turned = [(math.radians(degrees), distance) for degrees, distance in points]
    return tuple((distance * math.sin(angle), -distance * math.cos(angle)) for angle, distance in turned)


_ARM = 0.3
_CORNERS = {
    "square": _around(*((45 + 90 * side, 1.0) for side in range(4))),
    "triangle": _around(*((120 * side, 1.0) for side in range(3))),
    "star": _around(*((36 * side, 0.42 if side % 2 else 1.0) for side in range(10))),
    "cross": (
        *((-_ARM, -0.95), (_ARM, -0.95), (_ARM, -_ARM), (0.95, -_ARM), (0.95, _ARM), (_ARM, _ARM)),
        *((_ARM, 0.95), (-_ARM, 0.95), (-_ARM, _ARM), (-0.95, _ARM), (-0.95, -_ARM), (-_ARM, -_ARM)),
    ),
}
"""Corners of each shape, as shares of its radius from the centre; y points down."""
