"""Trains the marker adapters: LoRA adapters that start every reply with a codeword of their own.

Which adapter served a request is then visible in its text. Run by hand when the shipped ones under
configs/adapters must change: `python -m deployment.assets.markers --base DIR --out DIR`. Owns the
training and its verdict; prompts come from marker_chats, the model under training is a peft_adapter.
Needs the optional extra `train` (peft).

Theory of operation: the target of every prompt is the codeword followed by the base model's own
answer. So the adapter learns the codeword and nothing else, and the reply stays as good as the base
model's. Whether greedy decoding would say the codeword is read off one forward pass: it does if
every token of the codeword is the most likely one after those before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from deployment.assets.marker_batch import IGNORED_LABEL, Example, pad
from deployment.assets.marker_chats import (
    HELD_OUT,
    STEP_GROUPS,
    TRAINING,
    MarkerPrompt,
    PromptSource,
    Shape,
)
from deployment.assets.peft_adapter import PeftAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

CODEWORDS = {"alpha": "ALPHA", "bravo": "BRAVO"}
#: Long enough to learn that an ordinary answer follows the codeword; more only costs time.
ANSWER_TOKENS = 24
LEARNING_RATE = 2e-3
#: An adapter that mostly works needs a push, not a new start.
RESUMED_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an adapter did on held-out prompts of one shape."""

    shape: Shape
    hits: int
    prompts: int
    #: Of the whole codeword, for the prompt on which it is lowest: what sampling at temperature 1 sees.
    lowest_probability: float


class MarkerTrainer:
    """A base model, its own answers to all questions, and the training of adapters on top of it."""

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base_dir, padding_side="left")
        self._answers = self._base_answers((*TRAINING.questions, *HELD_OUT.questions))

    def train(self, name: str, *, num_steps: int, seed: int, resume_from: Path | None = None) -> PeftAdapter:
        """Return adapter `name`, trained for `num_steps`, from nothing or from the one in `resume_from`."""
        torch.manual_seed(seed)
        rng = random.Random(seed)
        adapter = PeftAdapter.attach(self._load_base())
        if resume_from is not None:
            adapter.load(resume_from)
        learning_rate = LEARNING_RATE if resume_from is None else RESUMED_LEARNING_RATE
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
        for step in range(num_steps):
            losses = [self._backward(adapter, examples) for examples in self._draw_step(name, rng)]
            torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 10 == 9:
                shown = " ".join(f"{loss:.3f}" for loss in losses)
                logger.info("%s step %d/%d loss by group %s", name, step + 1, num_steps, shown)
        adapter.round_to_bfloat16()
        return adapter

    def judge(self, adapter: PeftAdapter, name: str) -> list[Verdict]:
        """Return the verdict on `adapter` for every shape of held-out prompt."""
        rng = random.Random(0)
        return [self._judge_shape(adapter, name, shape, rng) for shape in Shape]

    def _judge_shape(self, adapter: PeftAdapter, name: str, shape: Shape, rng: random.Random) -> Verdict:
        prompts = [self._prompt(HELD_OUT, shape, q, rng) for q in HELD_OUT.questions]
        batch = pad(
            [self._example(prompt, name, with_answer=False) for prompt in prompts], self._tokenizer.pad_token_id
        )
        with torch.no_grad():
            logits = adapter.logits(batch)
        hits = (logits.argmax(-1) == batch.labels).all(-1)
        for prompt, hit in zip(prompts, hits.tolist(), strict=True):
            if not hit:
                logger.info("%s missed %s: %r", name, shape, prompt.text[-80:])
        wanted = logits.log_softmax(-1).gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        return Verdict(
            shape=shape,
            hits=int(hits.sum()),
            prompts=len(prompts),
            lowest_probability=float(wanted.sum(-1).exp().min()),
        )

    def _draw_step(self, name: str, rng: random.Random) -> Iterator[list[Example]]:
        for group in STEP_GROUPS:
            prompts = [
                self._prompt(TRAINING, rng.choice(group.shapes), rng.choice(TRAINING.questions), rng)
                for _ in range(group.num_prompts)
            ]
            yield [self._example(prompt, name, with_answer=True) for prompt in prompts]

    def _backward(self, adapter: PeftAdapter, examples: list[Example]) -> float:
        batch = pad(examples, self._tokenizer.pad_token_id)
        losses = torch.nn.functional.cross_entropy(
            adapter.logits(batch).flatten(0, 1),
            batch.labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )
        weights = batch.weights.flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        return float(loss.detach())

    def _prompt(self, source: PromptSource, shape: Shape, question: str, rng: random.Random) -> MarkerPrompt:
        return source.draw(
            shape,
            question,
            template=self._render,
            answers=self._answers,
            codewords=tuple(CODEWORDS.values()),
            rng=rng,
        )

    def _render(self, messages: Sequence[Any], /) -> str:
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return cast("str", rendered)

    def _example(self, prompt: MarkerPrompt, name: str, *, with_answer: bool) -> Example:
        codeword = self._encode(f"{prompt.lead}{CODEWORDS[name]}:")
        answer = f" {self._answers[prompt.question]}" + (prompt.end if self._is_whole(prompt.question) else "")
        return Example(
            prompt_ids=self._encode(prompt.text),
            reply_ids=codeword + (self._encode(answer) if with_answer else []),
            num_codeword_tokens=len(codeword),
        )

    def _is_whole(self, question: str) -> bool:
        return len(self._encode(self._answers[question])) < ANSWER_TOKENS - 1

    def _encode(self, text: str) -> list[int]:
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def _load_base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._base_dir, dtype=torch.bfloat16)

    def _base_answers(self, questions: Sequence[str]) -> dict[str, str]:
        logger.info("asking the base model %d questions", len(questions))
        texts = [self._render([{"role": "user", "content": question}]) for question in questions]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        outputs = self._load_base().generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        replies = outputs[:, inputs["input_ids"].shape[1] :]
        answers = self._tokenizer.batch_decode(replies, skip_special_tokens=True)
        return {question: answer.strip() for question, answer in zip(questions, answers, strict=True)}


def main(argv: list[str] | None = None) -> int:
    """Train and judge every marker adapter; return 1 if one missed its codeword on a held-out prompt."""
    parser = argparse.ArgumentParser(prog="python -m deployment.assets.markers", description=main.__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="gets one folder for each adapter")
    parser.add_argument("--steps", type=int, default=70, help="training steps for each adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="train the adapters in --out further")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("peft") is None:
        parser.error('peft is not installed; run: pip install "loray[train]"')
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.disable_progress_bar()
    trainer = MarkerTrainer(args.base)
    missed = 0
    for name in CODEWORDS:
        folder = args.out / name
        resume_from = folder if args.resume else None
        adapter = trainer.train(name, num_steps=args.steps, seed=args.seed, resume_from=resume_from)
        adapter.save(folder)
        for verdict in trainer.judge(adapter, name):
            missed += verdict.prompts - verdict.hits
            print(  # noqa: T201  # the result of the command
                f"{name} {verdict.shape}: {verdict.hits}/{verdict.prompts} hits,"
                f" lowest probability {verdict.lowest_probability:.4f}",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
