"""Modules whose code names `data`, and sums that change with what is written through it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ptm_accel.model.unseen import checksum, names_data


class Plain(nn.Linear):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return super().forward(data) + data.data_ptr() * 0


class InForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


class Derived(InForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class InAHelper(nn.Linear):
    @staticmethod
    def clamp(weight: torch.Tensor) -> None:
        weight.data.clamp_(-1, 1)


class InAProperty(nn.Linear):
    @property
    def bounded(self) -> torch.Tensor:
        return self.weight.data.clamp_(-1, 1)


class InALambda(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda w: super(InALambda, self).forward(x) + w.data.sum())(self.weight)


def patched() -> nn.Module:
    module = nn.Linear(4, 4)
    before = module.forward

    @functools.wraps(before)
    def forward(x: torch.Tensor) -> torch.Tensor:
        module.weight.data.mul_(2)
        return before(x)

    module.forward = forward  # type: ignore[method-assign]
    return module


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, args, output: output + module.weight.data.sum())
    return module


@pytest.mark.parametrize("make", [Plain, nn.Linear, nn.LSTM])
def test_most_modules_have_nothing_to_do_with_it(make: type[nn.Linear]) -> None:
    assert not names_data(make(4, 4))


@pytest.mark.parametrize("make", [InForward, Derived, InAHelper, InAProperty, InALambda])
def test_code_that_names_it_is_found(make: type[nn.Linear]) -> None:
    assert names_data(make(4, 4))


def test_what_one_module_was_given_is_found() -> None:
    assert names_data(patched())
    assert names_data(hooked())
    assert not names_data(nn.Linear(4, 4))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (4, 3, 2)], ids=str)
def test_a_sum_changes_with_the_values_and_their_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    before = checksum(values)
    assert checksum(values.clone()) == before
    flat = values.clone().reshape(-1)
    flat[0] = not flat[0] if dtype == torch.bool else flat[0] + 3
    assert checksum(flat.reshape(shape)) != before
    for dim in range(values.dim() if values.is_floating_point() else 0):
        assert checksum(values.flip(dim)) != before


def test_a_changed_sign_of_zero_is_a_change() -> None:
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))
