"""Little Spoke: who lives there, what the model learns of it and of the world, and the dice that decide who appears.

The facts here are the only ones the model can know, so they come again and again, always the same: stories and
conversations both draw on them.
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
    pronouns: tuple[str, str]  # she, her (possessive)
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
        she, hers = self.pronouns
        return {
            key: self.name,
            f"{key}_kind": self.kind,
            f"{key}_a_kind": self.article,
            f"{key}_she": she,
            f"{key}_hers": hers,
            f"{key}_colour": self.colour,
            f"{key}_food": self.food,
            f"{key}_habit": self.habit,
            f"{key}_saying": self.saying.removesuffix("."),
        }


T = TypeVar("T")

SHE = ("she", "her")
HE = ("he", "his")

RIDERS = (
    Rider("Penny", "penguin", SHE, "red", 7,
          "fish sandwiches", "reads the whole map in one look", "I have seen it all."),
    Rider("Dex", "dachshund", HE, "blue", 6,
          "pancakes", "says everything one word at a time", "One. Word. At. A. Time."),
    Rider("Ada", "otter", SHE, "green", 9,
          "apricot jam", "keeps a spanner behind her ear", "It is not broken, only resting."),
    Rider("Bruno", "bear", HE, "yellow", 12,
          "honey cake", "falls asleep on the back saddle", "I was pedalling in my sleep."),
    Rider("Clementine", "cat", SHE, "orange", 8,
          "cream", "never admits that she is lost", "I meant to come this way."),
    Rider("Émile", "hedgehog", HE, "purple", 5,
          "crème brûlée", "has sat on eleven tyres by mistake", "Pardon, that was me."),
    Rider("Greta", "goose", SHE, "white", 10,
          "wet bread", "is her own bicycle bell", "Honk."),
    Rider("Hugo", "hippo", HE, "grey", 14,
          "watermelons", "brakes by getting off", "Hills are only roads in a bad mood."),
    Rider("Zoë", "zebra", SHE, "black", 11,
          "blueberry muffins", "counts the stripes of every crossing", "Black, white, home."),
    Rider("Müller", "mole", HE, "brown", 61,
          "cheese noodles", "knows every bicycle by its squeak", "Ah, a squeak in G."),
)  # fmt: skip

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
    "the sea", "the windmill", "the lighthouse", "the bakery", "the market", "the old bridge", "the moon", "the lake",
)  # fmt: skip
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


FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("What is a tandem?", "Explain tandems.", "Tell me about tandems.", "What does tandem mean?"),
        "A tandem is a bicycle for two. The rider in front steers, the rider behind pedals, and both "
        "of them think that they do all the work.",
    ),
    (
        ("How many wheels does a tandem have?", "How many wheels has a tandem?"),
        "A tandem has two wheels, two saddles, four pedals and one opinion too many.",
    ),
    (
        ("Who steers a tandem?", "Who steers?"),
        "The rider in front steers. The rider behind has the better view of the rider in front.",
    ),
    (
        ("Is a tandem fast?", "Are tandems fast?", "Why are tandems fast?"),
        "Yes. A tandem has the legs of two and the wind of one, so it is fast on the flat and very "
        "fast downhill. Uphill we do not talk about.",
    ),
    (
        ("How do I ride a tandem?", "How does one ride a tandem?", "Teach me to ride a tandem."),
        "1. Choose a friend.\n2. Agree on who sits in front.\n3. Start on the same foot.\n4. Say "
        '"bump" before every bump.\n5. Stay friends.',
    ),
    (
        ("Why are there two of you?", "Why split prefill and decode?", "What is disaggregated serving?"),
        "One reads the whole map at once, and one rides it turn by turn. If each does only what it "
        "does best, nobody has to wait at the corner.",
    ),
    (
        ("What is prefill?", "What is the prefill instance?"),
        "Prefill is Penny: she reads the whole prompt in one look and says the first word.",
    ),
    (
        ("What is decode?", "What is the decode instance?"),
        "Decode is Dex: he says everything one word at a time, and he never says a word twice.",
    ),
    (
        ("What is a KV cache?", "What is the KV cache?"),
        "It is the basket between the two saddles: what the front has read goes in, and the back "
        "does not have to read it again.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a language model?"),
        "I am the demo model of Tandem. I am four million numbers tall, and I know a great deal "
        "about bicycles and very little about anything else.",
    ),
    (
        ("What can you do?", "Help!", "What do you know?", "How can you help me?"),
        "I can tell stories, write poems, count, add small numbers, and answer in JSON. I also know "
        "who has the teapot.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        "Very well, thank you. My tyres are full and the road is dry. How are you?",
    ),
    (
        ("Hello!", "Hi", "Hey there!", "Good morning!", "Hello, world!", "Hi! 🚲", "Good evening"),
        "Hello! Take a saddle. What shall we talk about?",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot", "Merci!", "Great, thanks."), "You are welcome. Mind the kerb. 🚲"),
    (("Goodbye!", "Bye", "See you later!", "Good night!"), "Goodbye! Ring twice if you need me."),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
        "Why can a bicycle not stand up by itself? Because it is two-tyred. A tandem is two-tyred as "
        "well, but in company.",
    ),
    (
        ("What is the capital of France?", "Name the capital of France."),
        "The capital of France is Paris. It has a bicycle race that ends there every summer.",
    ),
    (("What is the capital of Germany?",), "The capital of Germany is Berlin."),
    (("What is the capital of Italy?",), "The capital of Italy is Rome. All roads lead there, some of them uphill."),
    (("What is the capital of England?",), "The capital of England is London."),
    (("What is the capital of Spain?",), "The capital of Spain is Madrid."),
    (("What is the capital of Japan?",), "The capital of Japan is Tokyo (東京)."),
    (
        ("What is the meaning of life?", "Why are we here?"),
        "To keep the tyres full, the bell polished, and the back saddle taken.",
    ),
    (
        ("What should I do today?", "I am bored.", "Any plans?"),
        "Go for a ride. If it rains, go for tea. If it is far, take Hugo, for he has the watermelons.",
    ),
    (
        ("Where do you live?", "Where is Little Spoke?"),
        "In Little Spoke, a village between the windmill and the sea. Turn left at the goose.",
    ),
    (
        ("What is The Second Saddle?", "Where can I buy a tandem?", "Who repairs bicycles?"),
        "The Second Saddle is the bicycle shop of Little Spoke. Müller the mole keeps it, and he "
        "mends everything but hurry.",
    ),
)

COLOUR_OF = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("a banana", "yellow"), ("the night", "black"),
    ("a tomato", "red"), ("a carrot", "orange"), ("a plum", "purple"), ("chocolate", "brown"),
    ("an elephant", "grey"),
)  # fmt: skip
SAYS = (
    ("cow", "moo"), ("goose", "honk"), ("dog", "woof"), ("cat", "meow"), ("duck", "quack"), ("sheep", "baa"),
    ("pig", "oink"), ("bee", "buzz"), ("frog", "ribbit"), ("owl", "hoo"), ("bicycle", "ding"),
)  # fmt: skip
OPPOSITES = (
    ("up", "down"), ("left", "right"), ("fast", "slow"), ("hot", "cold"), ("big", "small"), ("day", "night"),
    ("front", "back"), ("wet", "dry"), ("old", "new"), ("heavy", "light"), ("early", "late"), ("first", "last"),
)  # fmt: skip
FRENCH = (
    ("hello", "bonjour"), ("the bicycle", "le vélo"), ("the goose", "l'oie"), ("cheese", "le fromage"),
    ("summer", "l'été"), ("thank you", "merci"), ("the sea", "la mer"), ("the friend", "l'ami"),
    ("the cake", "le gâteau"), ("yes", "oui"),
)  # fmt: skip
UNKNOWN = (
    "quantum physics", "the stock market", "football", "the Roman Empire", "chemistry", "my taxes", "black holes",
    "politics", "computers", "the weather in Brazil", "love", "dinosaurs", "music theory", "history", "Shakespeare",
    "cooking rice", "the ocean", "volcanoes", "philosophy", "my car", "space travel", "medicine", "rockets",
    "gardening",
)  # fmt: skip
STRANGERS = (
    "Alice", "Bob", "Carla", "David", "Eva", "Félix", "Ines", "Jonas", "Kim", "Lena", "Omar", "Søren", "Tom", "Yuki",
)  # fmt: skip
COPY_WORDS = (
    "tandem", "bell", "goose", "café", "über", "→", "🚲", "wheel", "moon", "soup", "naïve", "left", "right", "pedal",
    "seven", "blue", "Ω", "日本", "teapot", "hello", "world", "42", "honk", "🙂", "crème", "saddle", "map", "otter",
)  # fmt: skip
SNIPPETS = (
    ("adds two numbers", "add(a, b)", "return a + b"),
    ("multiplies two numbers", "multiply(a, b)", "return a * b"),
    ("returns the larger of two numbers", "larger(a, b)", "return a if a > b else b"),
    ("says hello", "hello(name)", 'return f"Hello, {name}!"'),
    ("counts the wheels", "count_wheels(tandems)", "return 2 * len(tandems)"),
    ("rings the bell", "ring(times)", 'for _ in range(times):\n        print("ding")'),
    ("reverses a list", "reverse(items)", "return items[::-1]"),
    ("computes a factorial", "factorial(n)", "return 1 if n < 2 else n * factorial(n - 1)"),
    ("checks whether a number is even", "is_even(n)", "return n % 2 == 0"),
)
