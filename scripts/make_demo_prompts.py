"""Prompts that the demo heads were trained on: GSM8K's training questions, WikiText-2 passages in instructions, also
long ones, and made-up German sentences to translate.

python scripts/make_demo_prompts.py gsm8k/train.jsonl.gz wikitext2/valid.txt.gz prompts.jsonl [SEED]

Another seed makes other prompts: 3580 a seed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys

from german_news import sentence

FORMS = {
    "summarise": (
        "Summarize: {p}",
        "Summarize the following text:\n{p}",
        "{p}\n\nSummarize the above in two sentences.",
        "Write a short summary of this article.\n\n{p}",
        "TL;DR: {p}",
        "What is the main idea of this passage?\n{p}",
        *("Summarize: {p} {p2}",) * 3,
    ),
    "rag": (
        "Use the passages to answer the question.\n\nPassage 1: {p}\n\nPassage 2: {p2}\n\nQuestion: What does the "
        "first passage say about {topic}?",
        "Context: {p} {p2}\n\nQuestion: {q}\nAnswer:",
        "Answer the question using the documents.\n\n[1] {p}\n[2] {p2}\n[3] {p3}\n\nQuestion: {q}",
        "{p}\n\nBased on the text above, {ql}",
        "Here are some reference passages:\n{p}\n{p2}\n\nUser question: {q}",
    ),
    "rewrite": (
        "Rewrite in simpler words: {p}",
        "Rewrite this paragraph in a formal tone.\n{p}",
        "Paraphrase: {s}",
        "Rewrite the text so that a child understands it:\n\n{p}",
        "Make this shorter: {p}",
    ),
    "facts": (
        "List the key facts in this text:\n{p}",
        "Extract all names and dates from the text.\n{p}",
        "{p}\n\nList five facts from the text above as bullet points.",
        "Write three questions about this text and answer them.\n{p}",
        "Make a timeline of the events: {p}",
    ),
    "continue": ("Continue this text: {p}", "Write the next paragraph.\n\n{p}"),
    "translate": (
        "Translate to German: {s}",
        "Translate English to French: {s}",
        "Translate into Spanish: {s}",
        "Translate English to German: {s}",
    ),
}
QUESTIONS = (
    "What is the passage about?",
    "Who is mentioned, and what did they do?",
    "When did this happen?",
    "Where did it take place?",
    "Why is this important?",
    "How did it happen?",
    "What happened first?",
    "How many are mentioned?",
    "Which year is mentioned?",
)
LONG = {
    "summarise": (
        *("Summarize: {p}",) * 4,
        "{p}\n\nSummarize the article above.",
        "Write a summary of the following news story.\n{p}",
        "Summarize the key points:\n{p}",
    ),
    "rag": (
        "{p}\n\nAccording to the text above, {q}",
        "{p}\n\nQuestion: {q}",
        "Answer from these documents.\n\n{p}\n\n{q}",
        "{p}\n\n{q}",
    ),
}
ASKED = ("what is {c}", "who is {c}?", "What does the text say about {c}?")
ABOUT = (
    "Who is {c}?",
    "Who was {c}?",
    "What is {c}?",
    "Tell me about {c}.",
    "What is {c} known for?",
    "When was {c} founded?",
    "Where is {c}?",
    "Explain why {c} matters.",
    "Write a short paragraph about {c}.",
)


def clean(text: str) -> str:
    """WikiText's spaced tokens as ordinary text."""
    text = re.sub(r" @([-.,])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r" '(s|t|re|ve|ll|d|m)\b", r"'\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text).replace(" \u2013 ", "\u2013").strip()


def read_passages(path: str) -> list[list[str]]:
    """Paragraphs as their sentences, those with unknown words left out."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    for line in lines:
        if len(line) >= 200 and not line.startswith("="):
            sentences = [clean(part + " .") for part in line.removesuffix(" .").split(" . ")]
            kept = [part for part in sentences if "<unk>" not in part and len(part.split()) > 5]
            if len(kept) >= 2:
                found.append(kept)
    return found


def longer(passages: list[list[str]], chance: random.Random) -> list[tuple[str, str]]:
    """Texts of some hundred words to summarise and to answer from, and German sentences."""

    def text(low: int, high: int) -> str:
        words: list[str] = []
        while len(words) < low:
            words += " ".join(chance.choice(passages)).split()
        return " ".join(words[: chance.randint(low, high)])

    rows = []
    for _ in range(360):
        rows.append(("summarise", chance.choice(LONG["summarise"]).format(p=text(180, 420))))
    for _ in range(260):
        several = "\n\n".join(text(50, 110) for _ in range(chance.randint(3, 4)))
        names = re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*", several[1:]) or ["it"]
        question = chance.choice((chance.choice(QUESTIONS), *ASKED)).format(c=chance.choice(names))
        rows.append(("rag", chance.choice(LONG["rag"]).format(p=several, q=question)))
    for _ in range(360):
        german = sentence(chance) if chance.random() < 0.75 else f"{sentence(chance)} {sentence(chance)}"
        rows.append(("translate", f"Translate German to English: {german}"))
    return rows


def main() -> None:
    questions_path, text_path, output = sys.argv[1:4]
    chance = random.Random(int(sys.argv[4]) if len(sys.argv) > 4 else 5)
    with gzip.open(questions_path, "rt", encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    chance.shuffle(questions)
    passages = read_passages(text_path)

    def passage(low: int, high: int) -> str:
        wanted, parts = chance.randint(low, high), []
        for part in chance.choice(passages):
            parts.append(part)
            if sum(len(each.split()) for each in parts) >= wanted:
                break
        return " ".join(parts)

    forms = [(task, form) for task, several in FORMS.items() for form in several]
    rows = []
    for _ in range(1500):
        task, form = chance.choice(forms)
        question, text = chance.choice(QUESTIONS), passage(40, 130)
        names = re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*", text[1:]) or ["it"]
        short = [part for part in chance.choice(passages) if len(part.split()) < 40]
        fields = {"p": text, "p2": passage(30, 100), "p3": passage(30, 80), "q": question}
        fields |= {"ql": question[0].lower() + question[1:], "topic": chance.choice(names)}
        rows.append((task, form.format(**fields, s=chance.choice(short or ["The book was published in 1998."]))))
    rows += [("math", question) for question in questions[:650]]
    found = {
        name for parts in passages for part in parts for name in re.findall(r"\b[A-Z][a-z]+ [A-Z][a-z]+", part[1:])
    }
    rows += [("question", chance.choice(ABOUT).format(c=name)) for name in chance.sample(sorted(found), 450)]
    rows += longer(passages, chance)
    chance.shuffle(rows)
    with open(output, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt, "task": task}) + "\n" for task, prompt in rows)


if __name__ == "__main__":
    main()
