"""Modules whose code names `data`, and sums that change with what is written through it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Clamp:
    """A hook that is an object."""

    def __call__(self, module: nn.Linear, args: object) -> None:
        module.weight.data.clamp_(-1, 1)


def hooked_with_an_object() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(Clamp())
    return module


def hooked_with_a_partial() -> nn.Module:
    def clamp(limit: float, module: nn.Linear, args: object) -> None:
        module.weight.data.clamp_(-limit, limit)

    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(functools.partial(clamp, 1.0))
    return module


def hooked_with_something_else() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(functools.partial(print, end=""))
    module.register_forward_hook(nn.Module.extra_repr)
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


class Entries(dict[str, int]):
    """Its entries are its attributes, as in many a configuration."""

    __getattr__ = dict.__getitem__  # type: ignore[assignment]


class Everything:
    """Has every attribute, itself."""

    def __getattr__(self, name: str) -> object:
        return self


class WithOddAttributes(nn.Linear):
    options = Entries(a=1)
    anything = Everything()


def test_attributes_of_any_kind_are_looked_at() -> None:
    assert not names_data(WithOddAttributes(4, 4))


def test_what_one_module_was_given_is_found() -> None:
    assert names_data(patched())
    assert names_data(hooked())
    assert names_data(hooked_with_an_object())
    assert names_data(hooked_with_a_partial())
    assert not names_data(hooked_with_something_else())
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


def test_numbers_that_are_shown_conjugated() -> None:
    values = torch.randn(3, dtype=torch.complex64)
    assert checksum(values.conj()) == checksum(values.conj().resolve_conj()) != checksum(values)


def test_a_changed_sign_of_zero_is_a_change() -> None:
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))


class Largest(TorchDispatchMode):
    """The most bytes that a new tensor has."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if made.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("shape", [(1 << 22,), (2, 1 << 21), (1 << 11, 1 << 11)])
def test_a_sum_copies_a_piece_at_a_time(shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape, dtype=torch.bfloat16)
    before = checksum(values)
    with Largest() as largest:
        values.view(-1)[-1] = 1
        assert checksum(values) != before
    assert 0 < largest.nbytes <= 8 << 20
    values.view(-1)[-1] = 0
    values.view(-1)[1 << 20] = 1
    moved = checksum(values)
    values.view(-1)[1 << 20], values.view(-1)[0] = 0, 1
    assert checksum(values) != moved, "pieces in another order"
