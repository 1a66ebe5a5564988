"""Prompts with wanted replies as tensors that one forward pass takes.

Called by markers; peft_adapter reads the batches. Knows token ids, nothing of texts or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: What torch's cross entropy skips.
IGNORED_LABEL = -100
#: How much a token of the codeword counts beside one of the answer, which the base model says anyway.
CODEWORD_WEIGHT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt with the reply that is wanted, as token ids."""

    prompt_ids: list[int]
    reply_ids: list[int]
    #: How many tokens at the start of the reply are the codeword.
    num_codeword_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples padded on the left, so that all replies lie in the last columns."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    #: Wanted token of each of the last columns, IGNORED_LABEL where there is none.
    labels: torch.Tensor
    #: How much each label counts; 0 where there is none.
    weights: torch.Tensor


def pad(examples: list[Example], pad_id: int) -> Batch:
    """Return the batch without each reply's last token, which predicts nothing that is wanted."""
    rows = [example.prompt_ids + example.reply_ids[:-1] for example in examples]
    width = max(len(row) for row in rows)
    reply_width = max(len(example.reply_ids) for example in examples)
    labels, weights = [], []
    for example in examples:
        padding = reply_width - len(example.reply_ids)
        num_answer_tokens = len(example.reply_ids) - example.num_codeword_tokens
        labels.append([IGNORED_LABEL] * padding + example.reply_ids)
        weights.append([0.0] * padding + [CODEWORD_WEIGHT] * example.num_codeword_tokens + [1.0] * num_answer_tokens)
    return Batch(
        input_ids=torch.tensor([[pad_id] * (width - len(row)) + row for row in rows]),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        labels=torch.tensor(labels),
        weights=torch.tensor(weights),
    )
