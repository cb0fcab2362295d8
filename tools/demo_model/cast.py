"""Who lives in Little Spoke, and the dice that decide who appears.

The facts here are the only ones the model can know, so they come again and again, always the same: stories and
conversations both draw on this cast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Rider:
    """One inhabitant. `habit` completes "X ..."; `saying` is a sentence of its own."""

    name: str
    kind: str
    pronouns: tuple[str, str, str]  # she, her (object), her (possessive)
    colour: str
    age: int
    food: str
    habit: str
    saying: str

    @property
    def article(self) -> str:
        """The kind with its article: "an otter"."""
        return ("an " if self.kind[0] in "aeiou" else "a ") + self.kind

    def slots(self, key: str) -> dict[str, str]:
        """What a template may say about this rider, each word under `key_...`."""
        she, her, hers = self.pronouns
        return {
            key: self.name,
            f"{key}_kind": self.kind,
            f"{key}_a_kind": self.article,
            f"{key}_she": she,
            f"{key}_She": she.capitalize(),
            f"{key}_her": her,
            f"{key}_hers": hers,
            f"{key}_Hers": hers.capitalize(),
            f"{key}_colour": self.colour,
            f"{key}_food": self.food,
            f"{key}_habit": self.habit,
            f"{key}_saying": self.saying.removesuffix("."),
        }


T = TypeVar("T")

SHE = ("she", "her", "her")
HE = ("he", "him", "his")

RIDERS = (
    Rider(
        "Penny", "penguin", SHE, "red", 7, "fish sandwiches", "reads the whole map in one look", "I have seen it all."
    ),
    Rider(
        "Dex", "dachshund", HE, "blue", 6, "pancakes", "says everything one word at a time", "One. Word. At. A. Time."
    ),
    Rider(
        "Ada",
        "otter",
        SHE,
        "green",
        9,
        "apricot jam",
        "keeps a spanner behind her ear",
        "It is not broken, only resting.",
    ),
    Rider(
        "Bruno",
        "bear",
        HE,
        "yellow",
        12,
        "honey cake",
        "falls asleep on the back saddle",
        "I was pedalling in my sleep.",
    ),
    Rider("Clementine", "cat", SHE, "orange", 8, "cream", "never admits that she is lost", "I meant to come this way."),
    Rider(
        "Émile",
        "hedgehog",
        HE,
        "purple",
        5,
        "crème brûlée",
        "has sat on eleven tyres by mistake",
        "Pardon, that was me.",
    ),
    Rider("Greta", "goose", SHE, "white", 10, "wet bread", "is her own bicycle bell", "Honk."),
    Rider(
        "Hugo", "hippo", HE, "grey", 14, "watermelons", "brakes by getting off", "Hills are only roads in a bad mood."
    ),
    Rider(
        "Zoë",
        "zebra",
        SHE,
        "black",
        11,
        "blueberry muffins",
        "counts the stripes of every crossing",
        "Black, white, home.",
    ),
    Rider(
        "Müller", "mole", HE, "brown", 61, "cheese noodles", "knows every bicycle by its squeak", "Ah, a squeak in G."
    ),
)

THINGS = ("bell", "map", "left pedal", "saddle", "lamp", "pump", "red scarf", "sandwich", "lucky button", "teapot")
HIDING_PLACES = (
    "under the saddle",
    "behind the teapot",
    "inside a left boot",
    "in the soup",
    "on top of the church clock",
    "under a sleeping goose",
    "in the letter box",
    "exactly where it had always been",
)
PLACES = (
    "the sea",
    "the windmill",
    "the lighthouse",
    "the bakery",
    "the market",
    "the old bridge",
    "the moon",
    "the lake",
)
WEATHERS = ("sunny", "windy", "rainy", "foggy", "snowy", "warm")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FOODS = ("apples", "soup", "pancakes", "honey cake", "plums", "toast", "cheese", "muffins", "noodles", "pears")
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "white", "grey", "black", "brown")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def pick(rng: Random, options: Sequence[T], ratio: float = 0.62) -> T:
    """Choose one option, each `ratio` times as likely as the one before it.

    Fair dice would teach the model exact ties, and greedy text would then hang on the last bit of a logit: two correct
    attention kernels would tell two different stories. Loaded dice leave a gap of -ln(ratio) nats at every fork.
    """
    return rng.choices(options, [ratio**index for index in range(len(options))])[0]


def pair(rng: Random) -> tuple[Rider, Rider]:
    """Two different riders, the first on the front saddle."""
    front = pick(rng, RIDERS, 0.8)
    return front, pick(rng, [rider for rider in RIDERS if rider is not front], 0.8)
