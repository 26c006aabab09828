"""What a fine-tune does to a head, and what training it again brings back: the whole round on a real model.

A target is fine-tuned for a few hundred steps on worked solutions (GSM8K's training set, as chats), in bfloat16 with
AdamW. Then, with the command line alone: the old target's bundle records its acceptance on prompts of the test set
(``train calibrate``), ``drift`` compares the new target's bundle with that record, the head is trained again from where
it was on answers of the new target (``train eagle3 --init``), and ``drift`` looks once more.

    python scripts/measure_drift.py MODEL HEADS gsm8k/train.jsonl.gz gsm8k/test.jsonl.gz --work DIR

Each part that is there already is kept; threads as torch and ONNX Runtime choose.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch

from specexport.exporter.cli import main as specexport
from specexport.exporter.progress import Progress
from specexport.exporter.train.target import open_target
from specexport.exporter.verify import load_transformers


def rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def fine_tune(arguments: argparse.Namespace, folder: Path) -> None:
    """Write the target after some hundred steps on questions and solutions."""
    torch.manual_seed(0)
    opened = open_target(arguments.model, Progress(quiet=True))
    model = load_transformers(Path(arguments.model)).train().requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)
    examples = rows(arguments.train)
    random.Random(0).shuffle(examples)
    losses = []
    for step in range(arguments.steps):
        optimiser.zero_grad()
        for example in examples[step * arguments.batch : (step + 1) * arguments.batch]:
            messages = [
                {"role": "user", "content": example["question"]},
                {"role": "assistant", "content": example["answer"]},
            ]
            tokens, spans = opened.chat.turns(messages)
            ids = torch.tensor(tokens)
            labels = torch.full_like(ids, -100)
            for begin, end in spans:
                labels[begin:end] = ids[begin:end]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids[None], labels=labels[None]).loss / arguments.batch
            loss.backward()
            losses.append(float(loss.detach()) * arguments.batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {sum(losses[-50:]) / len(losses[-50:]):.3f}", flush=True)
    model.save_pretrained(str(folder), safe_serialization=True)
    files = opened.chat.files
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    texts = {**files.tokenizer_config, "chat_template": files.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")


def call(*arguments: object) -> int:
    """One command as a user types it."""
    words = [str(argument) for argument in arguments]
    print("\nspecexport", *words, flush=True)
    return specexport(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("heads", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--prompts", type=int, default=400, help="Answered by the new target to train the head again.")
    parser.add_argument("--visits", type=int, default=150_000)
    parser.add_argument("--count", type=int, default=24, help="Test prompts that acceptance is counted on.")
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tuned, again, asked, tested = (work / name for name in ("tuned", "again", "asked.jsonl", "tested.jsonl"))
    examples = rows(arguments.train)
    random.Random(1).shuffle(examples)
    asked.write_text("".join(json.dumps({"prompt": e["question"]}) + "\n" for e in examples[: arguments.prompts]))
    tested.write_text("".join(json.dumps({"prompt": e["question"]}) + "\n" for e in rows(arguments.test)[:200]))
    if not (tuned / "config.json").exists():
        fine_tune(arguments, tuned)
    count = ("--count", arguments.count, "--max-tokens", 96, "--drafter", "eagle3")
    for name, model in (("old", arguments.model), ("stale", tuned)):
        if not (work / name).exists():
            assert (
                call("build", model, "--heads", f"eagle3={arguments.heads}", "--window", 1024, "-o", work / name) == 0
            )
    assert call("train", "calibrate", work / "old", "--data", tested, *count) == 0
    judged = ("--data", tested, "--baseline", work / "old", *count)
    stale = call("drift", work / "stale", "--target", arguments.model, *judged)
    options = ("--visits", arguments.visits, "--batch", 128, "--matrix-lr", 1e-3, "--max-prompt", 512)
    learn = ("train", "eagle3", "--target", tuned, "--data", asked, "--init", arguments.heads)
    assert call(*learn, *options, "-o", again) == 0
    if not (work / "new").exists():
        assert call("build", tuned, "--heads", f"eagle3={again}", "--window", 1024, "-o", work / "new") == 0
    fresh = call("drift", work / "new", *judged)
    print(f"\nexit codes: {stale} with the old head (1: drifted), {fresh} with the head trained again (0: fits)")


if __name__ == "__main__":
    main()
