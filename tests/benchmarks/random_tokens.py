"""Random tokens, the same for everyone."""

from __future__ import annotations

import torch


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`rows` sequences of `length` tokens, which are their own labels."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, vocabulary, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
