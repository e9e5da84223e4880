"""Torch functions on a tensor that is away: they read its description, convert it, or write to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptm_accel.errors import PagedModelError

_T: Any = torch.Tensor

_PROPERTIES = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xla",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "_is_view",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_conj",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "__len__",
)
_FUNCTIONS = (
    "_has_compatible_shallow_copy_type",
    "empty_like",
    "full_like",
    "get_device",
    "is_complex",
    "is_conj",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_signed",
    "numel",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
)

METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
        *(getattr(_T, name).__set__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad")),
        *(getattr(_T, name) for name in _METHODS if hasattr(_T, name)),
        *(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)),
    ]
)
"""Functions that need no values."""

LAYOUT: frozenset[Any] = frozenset(
    (_T.stride, _T.is_contiguous, torch._C.TensorBase.stride, _T.storage_offset, _T.dim_order)
)
"""Functions about how the values lie in memory, which is contiguously."""

CONVERSIONS: frozenset[Any] = frozenset(
    (
        _T.to,
        _T.cpu,
        _T.cuda,
        _T.contiguous,
        _T.bfloat16,
        _T.double,
        _T.float,
        _T.half,
        _T.type_as,
    )
)
"""Functions that give the tensor itself where there is nothing to convert."""

WRITES: frozenset[Any] = frozenset(
    (
        _T.data.__get__,
        _T.data_ptr,
        _T.untyped_storage,
        _T.storage,
        _T.numpy,
        _T.__array__,
        _T.__dlpack__,
    )
)
"""Functions through whose result the values can be written without torch counting it."""


def converts(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a conversion changes anything: tried on a small tensor of the same kind.

    Raises:
        PagedModelError: it changes how the values lie in memory, which is the pages' own affair.
    """
    with torch._C.DisableTorchFunctionSubclass():
        dim, dtype, device = args[0].dim(), args[0].dtype, args[0].device
    # As many dimensions, none of which is empty or one: another memory format shows in nothing less.
    probe = torch.empty((2,) * dim, dtype=dtype, device=device)
    found = func(probe, *args[1:], **kwargs)
    if found is probe:
        return False
    if found.device.type == "meta":
        raise PagedModelError(
            f"cannot convert a parameter of {dim} dimensions ({dtype} on {device}) to the meta device: it is on pages. "
            "Call `ptm_accel.engine_of(model).detach()` first."
        )
    if found.dtype == dtype and found.device == device and found.stride() != probe.stride():
        raise PagedModelError(
            f"cannot change the memory format of a parameter of {dim} dimensions (as to channels_last): it is on "
            "pages. Call `ptm_accel.engine_of(model).detach()` first."
        )
    return True


def one_tensor_at_a_time(call: Callable[[Any, Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a `torch._foreach_*` or `torch._fused_*` function for one element of its lists after the other.

    They do with each element what they would do with it alone, so that only one has to be in memory.
    """
    count = next(len(value) for value in args if isinstance(value, (list, tuple)))

    def element(value: Any, number: int) -> Any:
        return [value[number]] if isinstance(value, (list, tuple)) and len(value) == count else value

    results = []
    for number in range(count):
        rest = {key: element(value, number) for key, value in kwargs.items()}
        results.append(call(func, [element(value, number) for value in args], rest))
    if all(result is None for result in results):
        return None
    return [each for result in results for each in result]
