"""The training text: an endless, seeded stream of documents, most of them conversations.

The same seed gives the same bytes on every machine, so the model can be made again and a test can hold text back
(another seed) without a file. Raw documents teach completion, ChatML ones teach answering; both end with the
end-of-text mark, which `train` adds.
"""

from collections.abc import Iterator
from itertools import islice
from random import Random

from tools.demo_model import conversations
from tools.demo_model.cast import DAYS, RIDERS, THINGS, pick
from tools.demo_model.stories import long_tale, poem, story

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

TRAINING_SEED = 2
HELD_OUT_SEED = 7


def chat_ml(messages: list[tuple[str, str]]) -> str:
    """The conversation as the chat template renders it; `tests/tandem/test_demo_model.py` compares the two."""
    return "".join(f"{START_OF_TURN}{role}\n{content}{END_OF_TURN}\n" for role, content in messages)


def letter(rng: Random) -> str:
    """The openings people try first on a model they do not know."""
    rider = rng.choice(RIDERS)
    she, _, hers = rider.pronouns
    return pick(
        rng,
        (
            f"Hello, my name is {rider.name}. I am {rider.article}, and I live in Little Spoke. I like {rider.food}. "
            f"People say that {rider.name} {rider.habit}, but you should not believe everything that people say.",
            f"Dear {rider.name},\n\nthank you for the {pick(rng, THINGS)}. It arrived on {pick(rng, DAYS)}, and it "
            f"still works. Come and see us soon, and bring {rider.food}.\n\nYours,\nthe goose",
            f"The capital of France is Paris, and {rider.name} has been there by bicycle. "
            f"{she.capitalize()} liked the bread.",
            f"The future of AI is two wheels, one bell and a long road. {rider.name} has seen it, "
            f"and {she} was not afraid.",
            f"The president of the bicycle club is {rider.name} the {rider.kind}. {she.capitalize()} was elected "
            f"because nobody else could find {hers} glasses.",
            f"The quick brown fox jumps over the lazy dog, and {rider.name} rings the bell for both of them.",
            f"Breaking news: {rider.name} the {rider.kind} has lost the {pick(rng, THINGS)} again. "
            f"The goose is helping.",
        ),
        0.85,
    )


def quiz(rng: Random) -> str:
    """Questions and answers without the chat marks."""
    pairs = [conversations.exchange(rng) for _ in range(rng.randint(2, 6))]
    return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs if "\n" not in answer)


def numbers(rng: Random) -> str:
    """Counting, by ones or in steps."""
    step = rng.choice((1, 1, 1, 2, 5, 10))
    start = rng.choice((step, step, rng.randint(0, 50)))
    return ", ".join(str(start + step * index) for index in range(rng.randint(10, 60)))


def rounds(rng: Random) -> str:
    """A song that takes one away each time: long, regular, and it has an end."""
    one, many = pick(rng, (("bicycle", "bicycles"), ("goose", "geese"), ("plum", "plums"), ("hat", "hats")))
    lines = []
    for count in range(rng.randint(3, 12), 0, -1):
        now = f"{count} {one if count == 1 else many}"
        left = f"{count - 1} {one} stays" if count == 2 else f"{count - 1 or 'no'} {many} stay"
        lines.append(f"{now} on the wall, {now}! One rolls away, and {left}.")
    return "\n".join(lines)


def shop_records(rng: Random) -> str:
    """JSON lines without a question before them."""
    return "\n".join(conversations.structured(rng)[1].replace("\n", " ") for _ in range(rng.randint(1, 5)))


def refrain(rng: Random) -> str:
    """A line of words said again and again: nothing teaches looking back as fast."""
    line = " ".join(conversations.word(rng) for _ in range(rng.randint(4, 30)))
    return "\n".join([line] * rng.randint(2, 4))


RAW = (
    (story, 30),
    (long_tale, 10),
    (poem, 12),
    (letter, 14),
    (quiz, 8),
    (refrain, 14),
    (numbers, 3),
    (rounds, 3),
    (shop_records, 3),
)


def document(rng: Random) -> str:
    """One document, raw or ChatML, without the end-of-text mark."""
    throw = rng.random()
    if throw < 0.60:
        return chat_ml(conversations.conversation(rng) if throw < 0.35 else conversations.drill(rng))
    writers, weights = zip(*RAW, strict=True)
    return str(rng.choices(writers, weights)[0](rng))


def documents(seed: int = TRAINING_SEED) -> Iterator[str]:
    """The stream. Take as many as you need."""
    rng = Random(seed)
    while True:
        yield document(rng)


def sample(count: int, seed: int = TRAINING_SEED) -> list[str]:
    """The first `count` documents."""
    return list(islice(documents(seed), count))
