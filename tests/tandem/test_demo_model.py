"""The demo model is small, reproducible in its text, and worth reading.

The functions import transformers' models themselves: at the top, every process that collects tests would.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer

from engine import LLM, SamplingParams
from tandem.demo import MODEL_DIR
from tools.demo_model.corpus import END_OF_TEXT, END_OF_TURN, HELD_OUT_SEED, chat_ml, sample
from tools.demo_model.village import FACTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
MAX_FOLDER_BYTES = 10 * 1000**2
MAX_HELD_OUT_LOSS = 0.60  # nats per token; measured 0.52


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@cache
def llm() -> LLM:
    return LLM("demo", dtype="float32")


def complete(prompt: str, *, max_tokens: int) -> list[int]:
    """Greedy continuation, the prompt's ids left out."""
    [output] = llm().generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return output.outputs[0].token_ids


def answers(*questions: str) -> list[str]:
    """The greedy answers in chats, each of which must come to its own end."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm().chat(chats, SamplingParams(temperature=0.0, max_tokens=250), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
    return [output.outputs[0].text for output in outputs]


def digest(seed: int) -> str:
    return hashlib.sha256("\0".join(sample(200, seed)).encode()).hexdigest()


def test_folder_holds_a_whole_model_and_stays_small() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed <= files.keys()
    assert sum(files.values()) <= MAX_FOLDER_BYTES


def test_same_seed_writes_the_same_corpus_and_another_seed_another() -> None:
    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_tokenizer_gives_back_every_byte_of_the_corpus() -> None:
    plain = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    texts = [*sample(50, HELD_OUT_SEED), "crème brûlée → 🚲 日本 Ω\n\tnever seen: ☂ \u0000"]
    for text in texts:
        assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_renders_the_training_format_without_a_bos() -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Who is Ada?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat_ml(turns) + "<|im_start|>assistant\n"
    ids = tokenizer()(rendered).input_ids
    assert tokenizer().convert_ids_to_tokens(ids[:2]) == ["<|im_start|>", "system"]
    assert tokenizer().bos_token is None


def test_both_ends_of_text_stop_generation() -> None:
    config = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer().convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])


def test_held_out_text_is_no_surprise() -> None:
    from transformers import Qwen3ForCausalLM

    from tools.demo_model.train import held_out_loss

    model = Qwen3ForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    loss = held_out_loss(model, tokenizer().backend_tokenizer)
    assert loss < MAX_HELD_OUT_LOSS, f"perplexity {math.exp(loss):.2f}"


def test_a_request_for_json_gets_json() -> None:
    for answer in answers("Describe Penny as JSON.", "Write some JSON.", "Give me a recipe for soup as JSON."):
        assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 7 + 5?", "7 + 5 = 12"),
        ("What colour is grass?", "Grass is green."),
        ("What day comes after Sunday?", "Monday comes after Sunday."),
        ('What is "the bicycle" in French?', 'In French, "the bicycle" is "le vélo".'),
    ],
)
def test_it_knows_the_facts_of_its_training(question: str, expected: str) -> None:
    assert answers(question) == [expected]


def test_the_examples_ask_what_it_answers_well() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "tandem").rglob("*.py")]
    pages += [path for path in (ROOT / "examples").rglob("*.md") if "node_modules" not in path.parts]
    for constrained in ("structured_output", "tools"):  # constraints decide what its answers look like
        pages.remove(ROOT / f"docs/{constrained}.md")
    asked = re.compile(r"""(?:--chat |"content": )"([^"<…]+)\"""")
    questions = sorted({question for page in pages for question in asked.findall(page.read_text())})
    assert questions
    for question, answer in zip(questions, answers(*questions), strict=True):
        assert answer in {fact for asked_as, fact in FACTS if question in asked_as}, question


def test_a_story_is_about_those_the_prompt_names() -> None:
    casts = (("Penny", "Dex", "Bruno"), ("Bruno", "Clementine", "Dex"))
    stories = answers(*(f"Tell me a story about {front} and {back}." for front, back, _ in casts))
    for (front, back, absent), story in zip(casts, stories, strict=True):
        assert story.count(front) > 2
        assert story.count(back) > 2
        assert story.count(absent) < 2


def test_greedy_story_varies_and_ends() -> None:
    ids = complete("Once upon a time", max_tokens=400)
    assert tokenizer().decode(ids[-1:]) == END_OF_TEXT
    assert len(set(ids)) > 60
