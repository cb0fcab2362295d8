"""The training text: an endless, seeded stream of documents, most of them conversations.

The same seed gives the same bytes on every machine, so the model can be made again and a test can hold text back
(another seed) without a file. Raw documents teach completion, ChatML ones teach answering; both end with the
end-of-text mark, which `train` adds.

Each topic of a conversation is a function from dice to one exchange (question, answer). Questions are thrown with fair
dice, since a user may ask anything; answers with loaded ones (see `village.pick`), so that the model has an opinion.
"""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from tools.demo_model.stories import SUBJECTS, long_tale, poem, story
from tools.demo_model.village import (
    COLOUR_OF,
    COLOURS,
    COPY_WORDS,
    DAYS,
    FACTS,
    FOODS,
    FRENCH,
    NUMBERS,
    OPPOSITES,
    PLACES,
    RIDERS,
    SAYS,
    SNIPPETS,
    STRANGERS,
    THINGS,
    UNKNOWN,
    Rider,
    pair,
    pick,
)

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

TRAINING_SEED = 2
HELD_OUT_SEED = 7

Exchange = tuple[str, str]


def fact(rng: Random) -> Exchange:
    questions, answer = rng.choice(FACTS)
    return rng.choice(questions), answer


def small_table(rng: Random) -> Exchange:
    """Colours, sounds, opposites and a little French."""
    kind = rng.randrange(4)
    if kind == 0:
        noun, colour = rng.choice(COLOUR_OF)
        question = rng.choice((f"What colour is {noun}?", f"Which colour is {noun}?", f"What color is {noun}?"))
        return question, f"{noun[0].upper()}{noun[1:]} is {colour}."
    if kind == 1:
        animal, sound = rng.choice(SAYS)
        return rng.choice(
            (f"What does a {animal} say?", f"What sound does a {animal} make?")
        ), f"A {animal} says {sound}."
    if kind == 2:
        word, other = rng.choice(OPPOSITES)
        word, other = rng.choice(((word, other), (other, word)))
        return rng.choice(
            (f"What is the opposite of {word}?", f"Opposite of {word}?")
        ), f"The opposite of {word} is {other}."
    english, french = rng.choice(FRENCH)
    question = rng.choice((f'What is "{english}" in French?', f'How do you say "{english}" in French?'))
    return question, f'In French, "{english}" is "{french}".'


def arithmetic(rng: Random) -> Exchange:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.35:
        a, b = max(a, b), min(a, b)
        return rng.choice((f"What is {a} - {b}?", f"What is {a} minus {b}?")), f"{a} - {b} = {a - b}"
    return rng.choice((f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b}?")), f"{a} + {b} = {a + b}"


def counting(rng: Random) -> Exchange:
    first = rng.choice((1, 1, 1, rng.randint(2, 40)))
    last = first + rng.randint(2, 20)
    if rng.random() < 0.2:
        return f"Count down from {last} to {first}.", ", ".join(str(n) for n in range(last, first - 1, -1)) + "."
    question = (
        f"Count from {first} to {last}." if first > 1 else rng.choice((f"Count to {last}.", f"Count from 1 to {last}."))
    )
    return question, ", ".join(str(n) for n in range(first, last + 1)) + "."


def weekdays(rng: Random) -> Exchange:
    index = rng.randrange(7)
    if rng.random() < 0.25:
        return rng.choice(("Name the days of the week.", "What are the days of the week?")), ", ".join(DAYS) + "."
    step, word = rng.choice(((1, "after"), (-1, "before")))
    return f"What day comes {word} {DAYS[index]}?", f"{DAYS[(index + step) % 7]} comes {word} {DAYS[index]}."


def who_is(rng: Random) -> Exchange:
    rider = rng.choice(RIDERS)
    she, hers = rider.pronouns
    kind = rng.randrange(4)
    if kind == 0:
        return f"What colour is {rider.name}'s bicycle?", f"{rider.name}'s bicycle is {rider.colour}."
    if kind == 1:
        return f"What does {rider.name} like to eat?", f"{rider.name} likes {rider.food}, and plenty of it."
    if kind == 2:
        return f"How old is {rider.name}?", f"{rider.name} is {rider.age} years old."
    return rng.choice((f"Who is {rider.name}?", f"Tell me about {rider.name}.", f"Do you know {rider.name}?")), (
        f"{rider.name} is {rider.article} who {rider.habit}. {she.capitalize()} rides a {rider.colour} bicycle and "
        f'likes {rider.food}. {hers.capitalize()} favourite words are: "{rider.saying}"'
    )


def written(rng: Random) -> Exchange:
    """A story or a poem to order, about whom the user names."""
    riders = front, back = pair(rng)
    if rng.random() < 0.6:
        about = rng.choice(
            (f" about {front.name} and {back.name}", f" about {front.name} and {back.name}", " about a tandem", "")
        )
        ask = rng.choice(
            ("Tell me a story{}.", "Write a short story{}.", "Please tell me a story{}.", "Write a story{}")
        )
        return ask.format(about), story(rng, riders)
    about = rng.choice((f"{front.name} and {back.name}", rng.choice(SUBJECTS)))
    return rng.choice(("Write a poem about {}.", "Write me a poem about {}.", "A poem about {}, please.")).format(
        about
    ), poem(rng, riders)


def person(rider: Rider) -> dict[str, object]:
    return {"name": rider.name, "kind": rider.kind, "age": rider.age, "likes": [rider.food, "tandems"]}


def structured(rng: Random) -> Exchange:
    """An answer that is JSON and nothing else."""
    rider = rng.choice(RIDERS)
    kind = rng.randrange(4)
    asks: tuple[str, ...]
    value: dict[str, object]
    if kind == 0:
        asks = (
            f"Describe {rider.name} as JSON.",
            f"Give me a JSON object about {rider.name}.",
            f"Answer in JSON: who is {rider.name}?",
        )
        value = person(rider)
    elif kind == 1:
        food = rng.choice(FOODS)
        asks = f"Give me a recipe for {food} as JSON.", f"Write a JSON recipe for {food}."
        value = {"recipe": food, "serves": 2, "steps": ["find a pot", f"add the {food}", "stir", "share"]}
    elif kind == 2:
        asks = (
            "Describe a tandem as JSON.",
            "Give me a JSON object.",
            "Answer in JSON.",
            "Write some JSON.",
            "JSON please",
        )
        value = {"type": "tandem", "wheels": 2, "saddles": 2, "colour": "red", "bell": True, "riders": ["Penny", "Dex"]}
    else:
        place = rng.choice(PLACES)
        asks = f"Plan a trip to {place} as JSON.", f"Give me a JSON plan for a trip to {place}."
        value = {
            "trip": place,
            "day": "Sunday",
            "riders": [rider.name, "Hugo" if rider.name != "Hugo" else "Ada"],
            "tea": True,
        }
    question = rng.choice(asks)
    indent = 2 if rng.random() < 0.2 else None
    return question + (" Use indentation." if indent else ""), json.dumps(value, ensure_ascii=False, indent=indent)


def listed(rng: Random) -> Exchange:
    what, options = rng.choice(
        (("colours", COLOURS), ("foods", FOODS), ("days", DAYS), ("places", PLACES), ("things to lose", THINGS))
    )
    left = list(options)
    size = rng.randint(2, 6)
    items = []
    for _ in range(size):
        items.append(pick(rng, left, 0.5))
        left.remove(items[-1])
    lines = (
        [f"{index}. {item}" for index, item in enumerate(items, 1)]
        if rng.random() < 0.6
        else [f"- {item}" for item in items]
    )
    ask = rng.choice(("List {} {}.", "Name {} {}.", "Give me {} {}.")).format(NUMBERS[size - 2], what)
    return ask + ("" if lines[0][0] == "1" else " Use bullets."), "\n".join(lines)


def word(rng: Random) -> str:
    """A word to copy, every third one invented, so that copying cannot be done from memory."""
    if rng.random() < 0.35:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
    return rng.choice(rng.choice((COPY_WORDS, COPY_WORDS, FOODS, THINGS, STRANGERS)))


def copied(rng: Random) -> Exchange:
    text = " ".join(word(rng) for _ in range(rng.randint(1, 12)))
    if rng.random() < 0.2:
        spelt = rng.choice([w for w in COPY_WORDS if w.isascii() and w.isalpha()])
        return rng.choice((f"Spell {spelt}.", f'Spell the word "{spelt}".')), "-".join(spelt)
    return rng.choice(("Repeat after me: {}", "Say: {}", "Repeat: {}", "Echo: {}")).format(text), text


def inventory(rng: Random) -> tuple[str, list[Exchange]]:
    """A list of who has what, and every question that it answers, shuffled."""
    riders = rng.sample(RIDERS, rng.randint(2, 8))
    names = [rider.name for rider in riders]
    things = rng.sample(THINGS, len(riders))
    numbers = [rng.choice(NUMBERS) for _ in riders]
    kind = rng.randrange(3)
    if kind == 0:
        facts = [f"{name} has the {thing}." for name, thing in zip(names, things, strict=True)]
        questions = [f"Who has the {thing}?" for thing in things]
    elif kind == 1:
        facts = [f"The {thing} is with {name}." for name, thing in zip(names, things, strict=True)]
        questions = [f"Where is the {thing}?" for thing in things]
    else:
        facts = [f"{name} has {number} plums." for name, number in zip(names, numbers, strict=True)]
        questions = [f"How many plums does {name} have?" for name in names]
    exchanges = list(zip(questions, facts, strict=True))
    rng.shuffle(exchanges)
    return " ".join(facts), exchanges


def remembered(rng: Random) -> Exchange:
    """The answer stands in the question, sometimes far back: what a broken KV cache cannot give."""
    facts, exchanges = inventory(rng)
    question, answer = exchanges[0]
    return f"{facts} {question}", answer


def code(rng: Random) -> Exchange:
    does, signature, body = rng.choice(SNIPPETS)
    ask = rng.choice(("Write a Python function that {}.", "Write a function that {}.", "Python: a function that {}"))
    return ask.format(does), f"```python\ndef {signature}:\n    {body}\n```"


def declined(rng: Random) -> Exchange:
    """The honest way out, so that a question from outside Little Spoke gets an answer from inside it."""
    ask = rng.choice(
        ("Explain {}.", "What is {}?", "Tell me about {}.", "How does {} work?", "Write an essay about {}.", "Why {}?")
    )
    return ask.format(rng.choice(UNKNOWN)), pick(
        rng,
        (
            "I am a very small model, and that is outside the village. May I offer you a story about a tandem instead?",
            "That is beyond the windmill, and I have never been past the windmill. Ask me about bicycles!",
            "I asked the goose about that. She said: honk.",
        ),
    )


TOPICS: tuple[tuple[Callable[[Random], Exchange], int], ...] = (
    (fact, 14), (small_table, 8), (arithmetic, 10), (counting, 5), (weekdays, 4), (who_is, 8), (written, 14),
    (structured, 9), (listed, 5), (copied, 7), (remembered, 8), (code, 4), (declined, 4),
)  # fmt: skip


def exchange(rng: Random) -> Exchange:
    """One question and answer; the question as people type, not always as they should."""
    topics, weights = zip(*TOPICS, strict=True)
    question, answer = rng.choices(topics, weights)[0](rng)
    if rng.random() < 0.12 and question.isascii() and ":" not in question and "has" not in question:
        question = question.lower().rstrip(".?!")
    return question, answer


def conversation(rng: Random) -> list[tuple[str, str]]:
    """Messages as (role, content): perhaps a system prompt, then one to four exchanges, some recalling the first."""
    messages = []
    if rng.random() < 0.25:
        messages.append(
            ("system", rng.choice(("You are a helpful assistant.", "You are the demo model of Tandem.", "Be brief.")))
        )
    name = rng.choice(STRANGERS) if rng.random() < 0.12 else None
    if name:
        messages += [("user", rng.choice(("My name is {}.", "Hi, I am {}.", "Hello, I'm {}!")).format(name))]
        messages += [("assistant", f"Hello, {name}! Take a saddle.")]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        question, answer = exchange(rng)
        messages += [("user", question), ("assistant", answer)]
    if name:
        messages += [("user", rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")))]
        messages += [("assistant", f"Your name is {name}. I wrote it on the bell.")]
    return messages


def drill(rng: Random) -> list[tuple[str, str]]:
    """Many short exchanges in a row, or many questions about one list: few tokens of prose, many of looking back."""
    if rng.random() < 0.4:
        facts, exchanges = inventory(rng)
        exchanges[0] = (f"{facts} {exchanges[0][0]}", exchanges[0][1])
    else:
        topics = (copied, copied, remembered, remembered, weekdays, small_table, arithmetic, who_is, fact, structured)
        exchanges = [rng.choice(topics)(rng) for _ in range(rng.randint(4, 8))]
    return [message for question, answer in exchanges for message in (("user", question), ("assistant", answer))]


def chat_ml(messages: list[tuple[str, str]]) -> str:
    """The conversation as the chat template renders it; `tests/tandem/test_demo_model.py` compares the two."""
    return "".join(f"{START_OF_TURN}{role}\n{content}{END_OF_TURN}\n" for role, content in messages)


def letter(rng: Random) -> str:
    """The openings people try first on a model they do not know."""
    rider = rng.choice(RIDERS)
    she, hers = rider.pronouns
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
    pairs = [exchange(rng) for _ in range(rng.randint(2, 6))]
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
    return "\n".join(structured(rng)[1].replace("\n", " ") for _ in range(rng.randint(1, 5)))


def refrain(rng: Random) -> str:
    """A line of words said again and again: nothing teaches looking back as fast."""
    line = " ".join(word(rng) for _ in range(rng.randint(4, 30)))
    return "\n".join([line] * rng.randint(2, 4))


RAW = (
    (story, 30), (long_tale, 10), (poem, 12), (letter, 14), (quiz, 8), (refrain, 14), (numbers, 3), (rounds, 3),
    (shop_records, 3),
)  # fmt: skip


def document(rng: Random) -> str:
    """One document, raw or ChatML, without the end-of-text mark."""
    throw = rng.random()
    if throw < 0.60:
        return chat_ml(conversation(rng) if throw < 0.35 else drill(rng))
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
