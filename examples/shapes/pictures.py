"""Pictures of one or two shapes, and what one may ask about them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
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


@dataclass(frozen=True)
class Question:
    """A question about a scene, in one of several wordings, and its answer."""

    text: str
    answer: str


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


def questions(scene: Scene, rng: random.Random, others: int) -> list[Question]:
    """Return what_is_there and so many questions of other kinds, in random order."""
    asked = [kind(scene, rng) for kind in (what_is_there, *rng.sample(OTHERS, others))]
    rng.shuffle(asked)
    return asked


def what_is_there(scene: Scene, rng: random.Random) -> Question:
    """Ask for the whole picture."""
    wordings = (
        *("What is in the picture?", "What is in this picture?", "What is this?", "What do you see?"),
        *("What's in the picture?", "What's this?", "What does the picture show?", "What is in the image?"),
        *("Describe the picture.", "Describe this picture.", "Describe the image.", "What is in this image?"),
    )
    return Question(rng.choice(wordings), f"{scene.description}.".capitalize())


def which_colour(scene: Scene, rng: random.Random) -> Question:
    """Ask for the colour of a shape, which is there or not."""
    figure = rng.choice(scene.figures)
    shape = figure.shape if rng.random() < 0.85 else rng.choice(SHAPES)
    found = next((each for each in scene.figures if each.shape == shape), None)
    wordings = ("Which colour is the {}?", "What colour is the {}?", "Which color is the {}?", "What color is the {}?")
    answer = f"The {shape} is {found.colour}." if found else f"There is no {shape}."
    return Question(rng.choice(wordings).format(shape), answer)


def which_shape(scene: Scene, rng: random.Random) -> Question:
    """Ask for the shape of a colour, which is there or not."""
    figure = rng.choice(scene.figures)
    colour = figure.colour if rng.random() < 0.85 else rng.choice(list(COLOURS))
    found = next((each for each in scene.figures if each.colour == colour), None)
    answer = f"The {found.shape} is {colour}." if found else f"Nothing is {colour}."
    return Question(rng.choice(("Which shape is {}?", "What is {}?")).format(colour), answer)


def how_many(scene: Scene, rng: random.Random) -> Question:
    """Ask for the number of shapes."""
    wordings = ("How many shapes are there?", "How many shapes are in the picture?", "How many shapes do you see?")
    return Question(rng.choice(wordings), "One shape." if len(scene.figures) == 1 else "Two shapes.")


OTHERS: tuple[Callable[[Scene, random.Random], Question], ...] = (which_colour, which_shape, how_many)


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
