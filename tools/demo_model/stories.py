"""Tales and poems of Little Spoke.

A plot is a list of moments and a moment a list of ways to tell it, the likeliest first; an empty way leaves the moment
out. That is all the grammar a model of this size needs, and all that it can learn.
"""

from random import Random

from tools.demo_model.village import DAYS, HIDING_PLACES, NUMBERS, PLACES, RIDERS, THINGS, WEATHERS, Rider, pair, pick

Plot = tuple[tuple[str, ...], ...]

OPENINGS: Plot = (
    (
        "Once upon a time there was {a_a_kind} called {a} who had a tandem, but nobody to sit on the "
        "back of it. Then {b} the {b_kind} came by.",
        "Once upon a time, in the village of Little Spoke, {a} the {a_kind} and {b} the {b_kind} "
        "shared a {a_colour} tandem.",
        "One {weather} morning in Little Spoke, {a} the {a_kind} knocked on the door of {b} the {b_kind}.",
        "It was {day} in Little Spoke. {a} the {a_kind} had a plan, and {b} the {b_kind} had a sandwich.",
        "Every {day}, {a} the {a_kind} and {b} the {b_kind} went for a ride on their tandem.",
    ),
    (
        "{a} lived above the bicycle shop and was known for one thing: {a_she} {a_habit}.",
        "Everybody knows two things about them: {a} {a_habit}, and {b} {b_habit}.",
        "Now {a} {a_habit}, which is a fine thing until it is not.",
        "",
    ),
)

PLOTS: dict[str, Plot] = {
    "The Lost {Thing}": (
        (
            "That day the {thing} was gone.",
            "But something was missing: the {thing}.",
            'Then {a} cried, "Where is my {thing}?"',
        ),
        (
            "{a} looked under the bed and found only a sock.",
            "{a} looked in the cupboard, and the cupboard looked back.",
        ),
        (
            "{b} looked in the garden and found {number} snails, all of them busy.",
            "{b} looked up the chimney and sneezed.",
        ),
        (
            '"Let us think," said {b}, so they thought, and had {b_food} to help.',
            'They asked {c} the {c_kind}. "{c_saying}," said {c}.',
        ),
        ("In the end the {thing} was {hiding_place}.", "And there it was, the {thing}, {hiding_place}!"),
        (
            '"{a_saying}," said {a}, and they rode home before dark.',
            "{a} laughed, {b} laughed, and they rode home singing.",
        ),
    ),
    "The Long Hill": (
        (
            "They wanted to ride to {place}, but in between stood a hill.",
            "The road to {place} went up, and then it went up again.",
        ),
        ('"I will steer," said {a}. "And I will push," said {b}.', "{a} sat in front and {b} sat behind, as always."),
        ("They pedalled past one tree, two trees, three trees.", "They pedalled until the birds were below them."),
        ("Half way up, the tandem felt very heavy.", "Half way up, {a} looked round, and the back saddle was asleep."),
        (
            '"Are you pedalling, {b}?" asked {a}. "{b_saying}," said {b}.',
            '"Are you pedalling?" asked {a}. "I was thinking about it," said {b}.',
        ),
        (
            "So they stopped for {b_food}, and after that the hill was only a slope.",
            "So they sang a song, and nobody noticed the rest of the hill.",
        ),
        (
            "From the top they could see {place}, and it was all downhill.",
            "At the top there was a bench, a view, and {c} the {c_kind} with a flask of tea.",
        ),
    ),
    "Who Steers": (
        ('"Today I want to steer," said {b}.', '"Why do you always sit in front?" asked {b}.'),
        ('"You cannot see over me," said {a}.', '"Because I know the way," said {a}, who did not.'),
        (
            "So they both sat in front, and the tandem fell over.",
            "So they both sat behind, and the tandem went nowhere at all.",
        ),
        ("Then {c} the {c_kind} came by with {c_food}.", "{c} the {c_kind} watched them for a while."),
        (
            '"The front sees the road and the back gives the push," said {c}. "A tandem needs both."',
            '"{c_saying}," said {c}, and somehow that helped.',
        ),
        (
            "So they took turns: {a} steered to {place}, and {b} steered home.",
            "So {a} steered on the way there and {b} steered on the way back.",
        ),
        ("They were late, but they were late together.", "It took all day, and it was the best day of the week."),
    ),
    "The Puncture": (
        ("On the way to {place} there was a loud bang.", "Near {place} the back tyre said pffft."),
        (
            '"{c_saying}," said a voice. It was {c} the {c_kind}.',
            '"Was that you?" asked {a}. "That was the tyre," said {b}.',
        ),
        (
            "{a} pumped, and {b} counted: one, two, three, four, five.",
            "{a} held the wheel while {b} looked for the hole.",
        ),
        ("The air went in at one end and out at the other.", "The hole was small, but it was very sure of itself."),
        ("Then {b} had an idea and closed it with {b_food}.", "Then {a} closed it with a plaster and a kind word."),
        ("It held all the way home, and it smelled delicious.", "The tyre has a little smile on it to this day."),
    ),
    "The Race": (
        (
            "There was to be a race to {place}, and the prize was a cake.",
            'A notice hung on the door of the shop: "Race to {place}! First prize: one cake."',
        ),
        ("{c} the {c_kind} was there, on {number} wheels.", "The snail was there too, and it had trained all year."),
        (
            "{a} and {b} went so fast that their hats stayed behind.",
            "{a} and {b} started well, and then they saw a duck with a map.",
        ),
        (
            "They stopped to help a beetle across the road.",
            "They stopped to pick up their hats, which were rather good hats.",
        ),
        ("When they came to {place}, everyone had already gone home.", "They came last, just behind a snail."),
        (
            "But the cake was still there, because nobody could carry it alone.",
            "But the winner did not like cake and had left it on the bench.",
        ),
        (
            "So they put it between the two saddles and rode home in triumph.",
            '"{b_saying}," said {b}, with {b_hers} mouth full.',
        ),
    ),
    "The Map": (
        ("They had a map to {place}, and it was very long.", "The way to {place} was long, so they took a map."),
        (
            "{a} read the whole map at once, from the top to the bottom.",
            "{a} looked at the whole map, folded it, and handed it over.",
        ),
        ("Then {b} followed it, one turn at a time.", "Then {b} read out the turns, one after the other."),
        (
            '"Left," said {b}. "Right. Left. Left. Duck."',
            '"Straight on," said {b}. "Still straight on. Still straight on. Duck!"',
        ),
        (
            '"Duck?" asked {a}, and then they rode into the branch.',
            '"Are we there?" asked {a}. "Nearly," said {b}, {number} times.',
        ),
        (
            "In this way they came to {place} in time for supper.",
            "They found {place}, and they also found the pond beside it.",
        ),
        ("One reads and one rides: that is how it is done.", "It is good to know the way, and better to share it."),
    ),
    "The Squeak": (
        ("The tandem had a squeak.", "One day the tandem began to sing, and not well."),
        ('"Eek," it said. "Eek, eek, eek."', "It squeaked on the way to {place}, and it squeaked on the way back."),
        (
            "They took it to the shop, which is called The Second Saddle.",
            "So they went to see Müller the mole, who keeps the bicycle shop.",
        ),
        (
            'Müller put an ear to the frame. "Ah, a squeak in G," he said.',
            "Müller cannot see the bicycles, but he can hear them.",
        ),
        (
            "He oiled the chain, he oiled the pedals, and he oiled {b} a little.",
            "He took off the wheels and put them on again in a better mood.",
        ),
        (
            "Still it squeaked. It was a mouse, and it lived in the lamp.",
            "And then there was silence, apart from the clock and the {a_kind}.",
        ),
        ("They gave the mouse a ticket and took it along.", "They paid with {a_food}, and everyone was happy."),
    ),
    "The Rain": (
        (
            "They packed {a_food} and {b_food}, and they rode to {place} for a picnic.",
            "They wanted to have a picnic at {place}.",
        ),
        (
            "Then it began to rain, first a little and then in earnest.",
            "A small grey cloud came with them all the way.",
        ),
        (
            '"It is only water," said {a}. "So is the sea," said {b}.',
            '"{a_saying}," said {a}, and opened an umbrella with {number} holes.',
        ),
        ("They turned the tandem upside down and sat beneath it.", "They hid under a tree, and so did everybody else."),
        (
            "{c} the {c_kind} was there already, with {c_food} for three.",
            "It dripped on the {a_kind}, it dripped on the {b_kind}, and it dripped on the tea.",
        ),
        (
            "When the sun came out they had eaten everything, even the list.",
            "When the sun came out there was a rainbow, and it ended at the bakery.",
        ),
    ),
}

ENDINGS = (
    "The end.",
    "And that is why a tandem has two saddles.",
    "And if they have not stopped, they are pedalling still. 🚲",
    "Two riders, one road, no hurry.",
    "The moral: always ask who is pedalling.",
)

REFRAINS = (
    ("Pedal, pedal, you and me,", "all the way down to the sea."),
    ("Round and round the wheels go by,", "two small hats against the sky."),
    ("One in front and one behind,", "slow is fine and rain is kind."),
    ("Ring the bell and hold on tight,", "home again before the night."),
)
COUPLETS = (
    ("{a} sits in front and sings,", "dreaming of electric wings."),
    ("{b} sits behind and sighs,", "counting crumbs and butterflies."),
    ("Up the hill and past the mill,", "one is moving, one sits still."),
    ("Down the lane the tandem flies,", "past the bakery and its pies."),
    ("In the basket, warm and round,", "lies the bun that {a} found."),
    ("If it rains we do not mind,", "{b} has the umbrella behind."),
    ("Müller oils the chain with care,", "listens to it, nods: all there."),
    ("Through the puddle, through the snow,", "where we are we do not know."),
    ("Stars come out and lamps are lit,", "move up, moon, and share a bit."),
)
SUBJECTS = ("a tandem", "the sea", "two friends", "the rain", "bicycles", "the moon", "a bell", "the bakery")


def tell(rng: Random, plot: Plot, slots: dict[str, str]) -> str:
    """One way through the plot, as a paragraph."""
    sentences = (pick(rng, moment).format_map(slots) for moment in plot)
    return " ".join(sentence for sentence in sentences if sentence)


def slots_for(rng: Random, front: Rider, back: Rider) -> dict[str, str]:
    """Everything a plot may mention, thrown once so that a story agrees with itself."""
    third = pick(rng, [rider for rider in RIDERS if rider not in (front, back)], 0.8)
    thing = pick(rng, THINGS, 0.75)
    return {
        **front.slots("a"),
        **back.slots("b"),
        **third.slots("c"),
        "thing": thing,
        "Thing": thing.title(),
        "hiding_place": pick(rng, HIDING_PLACES, 0.75),
        "place": pick(rng, PLACES, 0.75),
        "weather": pick(rng, WEATHERS, 0.75),
        "day": pick(rng, DAYS, 0.75),
        "number": pick(rng, NUMBERS[1:], 0.75),
    }


def episode(rng: Random, slots: dict[str, str], told: set[str]) -> tuple[str, str]:
    """A title and its story, without opening or ending: a plot that is not in `told` yet, and then is."""
    at_the_shop = "Müller" in (slots["a"], slots["b"])  # he does not call on himself
    title = pick(rng, [t for t in PLOTS if t not in told and not (at_the_shop and t == "The Squeak")], 0.8)
    told.add(title)
    return title.format_map(slots), tell(rng, PLOTS[title], slots)


def story(rng: Random, riders: tuple[Rider, Rider] | None = None) -> str:
    """A whole tale in three paragraphs or one."""
    slots = slots_for(rng, *(riders or pair(rng)))
    _, middle = episode(rng, slots, set())
    parts = [tell(rng, OPENINGS, slots), middle, pick(rng, ENDINGS)]
    return pick(rng, ("\n\n", " "), 0.5).join(parts)


def long_tale(rng: Random) -> str:
    """Chapters about one pair: some hundreds of tokens that keep their heroes, for text at late positions."""
    riders = pair(rng)
    slots = slots_for(rng, *riders)
    chapters = [f"# The Tales of {slots['a']} and {slots['b']}", tell(rng, OPENINGS, slots)]
    told: set[str] = set()
    for number in range(1, rng.randint(4, 7)):
        title, middle = episode(rng, slots_for(rng, *riders), told)
        chapters.append(f"## Chapter {number}: {title}\n\n{middle}")
    return "\n\n".join([*chapters, pick(rng, ENDINGS)])


def poem(rng: Random, riders: tuple[Rider, Rider] | None = None) -> str:
    """Couplets with a refrain that comes back after each of them."""
    front, back = riders or pair(rng)
    refrain = "\n".join(pick(rng, REFRAINS))
    left = list(COUPLETS)
    stanzas = [refrain] if rng.random() < 0.3 else []
    for _ in range(rng.randint(2, 4)):
        couplet = pick(rng, left, 0.75)
        left.remove(couplet)
        stanzas.append("\n".join(couplet).format(a=front.name, b=back.name) + "\n" + refrain)
    return "\n\n".join(stanzas)
