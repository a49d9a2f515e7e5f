"""Prompts from which the draft for SmolLM2-135M-Instruct is trained:
`python -m research.demo.draft_prompts DATA PROMPTS`.

Questions of GSM8K, passages of children's books with a question about them, first turns of
dialogues, Alpaca's seed tasks and HumanEval, and requests that are put together here from lists of
topics. No record that is held out (`data.py`), and no prompt of Spec-Bench, which measures the
draft.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from research.demo.data import Document, read_documents

Record = dict[str, object]

_PASSAGE_CHARACTERS = (300, 1100)
_NUM_PASSAGES, _NUM_PROBLEMS, _NUM_DIALOGUES, _NUM_REQUESTS, _NUM_SENTENCES, _NUM_QUESTIONS = (
    2400,
    1800,
    500,
    2600,
    700,
    1200,
)

_ABOUT_PASSAGES = (
    "Summarize the following text: {}",
    "Summarize: {}",
    "{}\n\nSummarize the text above in two sentences.",
    "{}\n\nWho are the people in this text, and what do they do?",
    "Give a short summary of this passage.\n\n{}",
    "Read the passage and answer the question.\n\nPassage: {}\n\nQuestion: What happens, and why?",
    "Use the passages below to answer the question.\n\nPassage 1: {}\n\nPassage 2: {}\n\n"
    "Question: What is the first passage about?",
    "Extract the names of all persons and places from this text as a list.\n\n{}",
    "Continue the story:\n\n{}",
    "Rewrite this text in simple modern English:\n\n{}",
)

_TOPICS = """
the French Revolution; photosynthesis; the Roman Empire; black holes; healthy breakfasts; electric cars; the
water cycle; chess; inflation; volcanoes; the human heart; public libraries; solar panels; dogs; learning a
language; the Great Wall; time management; the Industrial Revolution; honey bees; space travel; job
interviews; remote work; climate change; coffee; vaccines; the stock market; jazz; Shakespeare; gravity;
recycling; football; the Internet; machine learning; a trip to Italy; a trip to Japan; bread baking;
gardening; the moon; earthquakes; online privacy; small businesses; a birthday party; whales; yoga; public
transport; the printing press; democracy; Mount Everest; plastic in the oceans; photography; a new smartphone;
a mystery in an old house; a lonely robot; a dragon who is afraid of fire; friendship; the Amazon rainforest;
credit cards; sleep; painting; mathematics in daily life; a lost dog; the Olympic Games; wind energy; museums;
the immune system; DNA; atoms; the Second World War; ancient Egypt; antibiotics; a school project; tea; the
Nile; the piano; mobile games; a job as a nurse; teaching; city parks; robots in factories; a rainy day; the
desert; penguins; sharks; trains
""".replace("\n", " ")

_REQUESTS = (
    "Explain {} to a ten year old child.",
    "What are the main facts about {}?",
    "Write a short essay about {}.",
    "List five interesting facts about {}.",
    "Write a poem about {}.",
    "Write a short story about {}.",
    "What are the advantages and disadvantages of {}?",
    "How does {} affect our daily life?",
    "Write an email to a friend about {}.",
    "Give me three tips about {}.",
    "What should I know about {} before I start?",
    "Write a blog post about {}.",
    "Write an introduction for a talk about {}.",
    "Imagine you are an expert on {}. What would you tell a beginner?",
    "Compare {} with {}.",
    "Write a dialogue between two friends about {}.",
    "Why is {} important?",
    "Describe {} in one paragraph.",
    "Create a table of contents for a book about {}.",
    "Write a product review about {}.",
    "What is the history of {}?",
    "Ask me five quiz questions about {}, with answers.",
    "Write a news article about {}.",
    "Suggest a title and an outline for an article about {}.",
    "Give a definition of {} and an example.",
    "How can I learn more about {}? Make a plan for one week.",
    "Write a formal letter to the mayor about {}.",
    "Pretend you are a pirate and tell me about {}.",
    "What would happen without {}?",
    "Write a haiku about {}.",
    "Answer in JSON with the keys topic, summary and keywords: {}",
    "Write a Python program about {}.",
    "Explain step by step how to make a presentation about {}.",
    "Is {} good or bad? Give reasons for your opinion.",
)

_QUESTIONS = (
    "what is the capital of {}",
    "where is {} located",
    "when did {} become independent",
    "who is the president of {}",
    "what language do people speak in {}",
    "how many people live in {}",
    "what is the largest city in {}",
    "what food is {} known for",
    "which countries border {}",
    "what is the currency of {}",
    "who discovered {}",
    "what is the longest river in {}",
    "who wrote the national anthem of {}",
    "what is the climate like in {}",
    "when was the first railway built in {}",
    "what is {} famous for",
    "who won the last world cup in {}",
    "what sports are popular in {}",
    "what is the highest mountain in {}",
    "how old is the constitution of {}",
)
_COUNTRIES = """
France; Germany; Italy; Spain; Portugal; Poland; Norway; Sweden; Finland; Greece; Turkey; Egypt; Kenya;
Nigeria; South Africa; India; China; Japan; Korea; Thailand; Vietnam; Australia; New Zealand; Canada; Mexico;
Brazil; Argentina; Chile; Peru; Cuba; Ireland; Scotland; Iceland; Austria; Switzerland; Hungary; Romania;
Ukraine; Iran; Iraq; Israel; Pakistan; Indonesia; Malaysia; Ghana; Ethiopia; Morocco; Colombia; Texas;
California; Alaska; Florida
""".replace("\n", " ")

_WHO = (
    "Der Präsident",
    "Die Regierung",
    "Ein Sprecher der Polizei",
    "Die Lehrerin",
    "Mein Bruder",
    "Der Trainer",
    "Die Firma",
    "Eine junge Ärztin",
    "Der Bürgermeister",
    "Die Opposition",
    "Das Gericht",
    "Unser Nachbar",
    "Die Forscher",
    "Der Minister",
)
_WHEN = (
    "am Montag",
    "gestern",
    "in der vergangenen Woche",
    "nach langen Gesprächen",
    "im Jahr 2010",
    "heute Morgen",
    "trotz der Kritik",
    "vor der Wahl",
    "zum ersten Mal",
    "mit großer Freude",
    "in Berlin",
    "auf dem Land",
)
_DID = (
    "hat {} angekündigt, die Preise zu senken.",
    "hat {} einen neuen Vertrag unterschrieben.",
    "wollte {} nicht darüber sprechen.",
    "hat {} zwei Häuser in der Altstadt gekauft.",
    "sagte {}, dass die Zahl der Arbeitslosen gestiegen ist.",
    "hat {} viele Menschen getroffen, die helfen wollten.",
    "musste {} das Spiel absagen, weil es stark regnete.",
    "hat {} eine Studie über das Klima veröffentlicht.",
    "wird {} über die neuen Regeln entscheiden.",
    "fand {} eine einfache Lösung für das Problem.",
    "hat {} die Schule besucht und mit den Kindern gesprochen.",
)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


def _passage(document: Document, chance: random.Random) -> str:
    """Return whole sentences from the beginning of a text."""
    most = chance.randint(*_PASSAGE_CHARACTERS)
    text = " ".join(document.text.split())[:most]
    return text[: text.rfind(".") + 1] or text


def _about_passages(documents: list[Document], chance: random.Random) -> Iterator[Record]:
    texts = [document for document in documents if document.source == "gutenberg"]
    for document in chance.sample(texts, _NUM_PASSAGES):
        form = chance.choice(_ABOUT_PASSAGES)
        other = chance.choice(texts)
        yield {"prompt": form.format(_passage(document, chance), _passage(other, chance)[:400])}


def _from_conversations(documents: list[Document], chance: random.Random) -> Iterator[Record]:
    """Yield word problems, and the first turns of dialogues."""
    problems = [document for document in documents if document.source == "gsm8k"]
    for document in chance.sample(problems, _NUM_PROBLEMS):
        yield {"prompt": document.messages[0]["content"]}
    dialogues = [document for document in documents if document.source in ("sgd", "persona", "taskmaster")]
    for document in chance.sample(dialogues, _NUM_DIALOGUES):
        asked = [message["content"] for message in document.messages if message["role"] == "user"]
        yield {"turns": asked[: chance.randint(1, 3)]}


def _put_together(chance: random.Random) -> Iterator[Record]:
    """Yield requests, questions and German sentences from the lists above."""
    topics, countries = _listed(_TOPICS), _listed(_COUNTRIES)
    for _ in range(_NUM_REQUESTS):
        yield {"prompt": chance.choice(_REQUESTS).format(*chance.sample(topics, 2))}
    for _ in range(_NUM_QUESTIONS):
        yield {"prompt": chance.choice(_QUESTIONS).format(chance.choice(countries))}
    for _ in range(_NUM_SENTENCES):
        sentence = f"{chance.choice(_WHO)} {chance.choice(_DID).format(chance.choice(_WHEN))}"
        yield {"prompt": f"Translate German to English: {sentence}"}


def _from_tasks(folder: Path) -> Iterator[Record]:
    """Yield Alpaca's seed tasks and HumanEval."""
    for name, form in (("alpaca_seed_tasks", "{}"), ("humaneval_full", "Complete this Python function:\n\n{}")):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf8").strip().split("\n"):
            yield {"prompt": form.format(json.loads(line)["turns"][0])}


def prompts(data: Path, seed: int) -> list[Record]:
    """Return all prompts in a random order. data: a folder with `train` and `prompts`."""
    chance = random.Random(seed)
    documents = [document for document in read_documents(data / "train") if not document.held_out]
    collected = [
        *_about_passages(documents, chance),
        *_from_conversations(documents, chance),
        *_put_together(chance),
        *_from_tasks(data / "prompts"),
    ]
    different = {json.dumps(record, ensure_ascii=False): record for record in collected}
    records = list(different.values())
    chance.shuffle(records)
    return records


def main() -> None:
    """Write the prompts as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m research.demo.draft_prompts", description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train/*.jsonl.zst and prompts/*.jsonl")
    parser.add_argument("output", type=Path, help="file that is written")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in prompts(options.data, options.seed)]
    options.output.write_text("".join(lines), encoding="utf8")
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
