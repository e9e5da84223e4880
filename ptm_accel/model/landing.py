"""The gradient of a linear layer's weight is computed where it will lie.

Autograd allocates a gradient before anybody hears of it: memory that the C library maps anew, and the kernel clears
page by page as it is touched, for bytes that are copied onto pages as they arrive. But the gradient of a matrix that
was multiplied by is itself the product of two matrices, and a product can be told where to write.

Who unpacks a saved weight is the very node that is about to compute its gradient. A dispatch mode that is pushed by the
unpack hook sees what this node calls, and ends with it, since autograd gives each node the state that the thread had
when backward was called. So nothing of the model's own code is seen, and no other node pays for it.

Only what is taken as it is can be computed in its place: what is added to something else on its way (a weight that is
used several times), or copied, cannot. So the first gradient of each parameter is only watched. Where one has been kept
by somebody, as a hook of theirs may, none is computed on pages any more: what they keep should cost no budget. Nor is
one that will only be added to a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ptm_accel.errors import BudgetError
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pool import Pool
from ptm_accel.model.looks import Look

if TYPE_CHECKING:
    from ptm_accel.model.grad_slot import GradSlot

_C: Any = torch._C
_MM: Any = torch.ops.aten.mm.default
_MM_OUT: Any = torch.ops.aten.mm.out
_NODES = ("MmBackward0", "AddmmBackward0")
"""The nodes of products of matrices: `x @ weight.T` and `bias + x @ weight`, as all kinds of linear layers come to."""
_LEAST_BYTES = 1 << 20
"""Below that a gradient is served from what the C library has, and to copy it takes no longer than to do without."""


class _Landing(TorchDispatchMode):
    """Sees what one node calls, until the gradient has been computed: hooks of somebody's on that node come after it.

    Args:
        multiply: computes a product if it is the gradient, or else returns None.
    """

    def __init__(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._multiply = multiply
        self._done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _MM and not kwargs and not self._done:
            product = self._multiply(*args)
            if product is not None:
                self._done = True
                return product
        return func(*args, **(kwargs or {}))


def set_aside(call: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    """What `call` makes of `packed`, where a node unpacks more than its weight: it may compute a whole layer anew."""
    depth = _C._len_torch_dispatch_stack()
    if not depth or not isinstance(_C._get_dispatch_stack_at(depth - 1), _Landing):
        return call(packed)
    landing = _C._pop_torch_dispatch_stack(None)
    try:
        return call(packed)
    finally:
        _C._push_on_torch_dispatch_stack(landing)


class Landings:
    """Has gradients computed on pages, one at a time.

    Args:
        pool: where gradients live.
        make_way: called before a gradient is given memory.
        ended: called when a backward has ended in which one was.

    Attributes:
        made: how many there were.
    """

    def __init__(self, pool: Pool, make_way: Callable[[GradSlot], None], ended: Callable[[], None]) -> None:
        self.made = 0
        self._pool = pool
        self._make_way = make_way
        self._ended = ended
        # What is being computed on pages, or is on its way from there to its parameter.
        self._landed: tuple[GradSlot, PagedTensor] | None = None
        # The newest of those that are only watched, and where it was computed.
        self._watched: tuple[GradSlot, int] | None = None
        self._task = -1
        self._kept = False

    @property
    def under_way(self) -> bool:
        """Whether one has been given memory, and has not arrived."""
        return self._landed is not None

    def expect(self, grad: GradSlot, weight: torch.Tensor) -> None:
        """Backward has unpacked a view of a parameter: if a product of matrices comes next, its gradient does.

        Args:
            grad: the parameter's.
            weight: the view.
        """
        pool, value = self._pool, grad.slot.value
        # Beside a card a copy is cheap, and what the thread does is not. Where nothing is copied, nothing is saved.
        if grad.direct is False or self._kept or not pool.copies_in or pool.timeline is not None:
            return
        if value.nbytes < _LEAST_BYTES or not value.movable or not pool.copies(value) or torch.is_grad_enabled():
            return
        if grad.value is not None or grad.spent or grad.look is not Look.NONE or grad.slot.param.grad is not None:
            return
        node = _C._current_autograd_node()
        # Another mode counts products, perhaps, or has them carried out elsewhere.
        if node is None or node.name() not in _NODES or _C._len_torch_dispatch_stack():
            return
        if not _is_summed(grad.slot.param):
            return
        address = weight.untyped_storage().data_ptr()
        keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()

        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
            same = (left.shape[0], right.shape[1]) == value.shape and left.dtype == right.dtype == value.dtype
            # That of the input has the weight in it, and may be of the same shape.
            if not same or not all(type(t) is torch.Tensor and _address(t) != address for t in (left, right)):
                return None
            if not grad.direct:
                product = _result(_MM(left, right))
                self._watched = grad, product.data_ptr()
                return product
            # As outside of the mode: tensors that are made below autograd are counted in another way.
            with _C._ForceDispatchKeyGuard(*keys):
                place = self._make(grad)
            return None if place is None else _result(_MM_OUT(left, right, out=place))

        _C._push_on_torch_dispatch_stack(_Landing(multiply))

    def _make(self, grad: GradSlot) -> torch.Tensor | None:
        """Room on pages for a gradient; None where it is to be computed as ever."""
        pool = self._pool
        if self._landed is not None and self._landed[1].viewed:
            # The one before is being added to something else. There is room for one on its way.
            self._landed[0].direct = False
            return None
        self.give_up()
        self._make_way(grad)
        value = grad.paged()
        try:
            # Until it has arrived it is not whole, and nobody says that it is in use.
            with pool.lock:
                made = pool.make(value)
                pool.shelf.keep_off(value)
        except BaseException as error:
            pool.forget(value)
            if isinstance(error, BudgetError):
                # What could not be had here may be there when it arrives.
                return None
            raise
        self._landed = grad, value
        self.made += 1
        if (task := _C._current_graph_task_id()) != self._task:
            self._task = task
            # Who asks for gradients (`torch.autograd.grad`) has them, and nobody else is told.
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        # Not the tensor that is kept: autograd takes only what nobody else has.
        return made.detach()

    def claim(self, grad: GradSlot, gradient: torch.Tensor) -> PagedTensor | None:
        """A gradient has arrived: where it was computed on pages; it stays there until `end` or `give_up`.

        Args:
            grad: whose.
            gradient: as autograd has left it.
        """
        watched, landed = self._watched, self._landed
        if watched is not None and watched[0] is grad:
            grad.direct, self._watched = watched[1] == gradient.data_ptr(), None
        if landed is None or landed[0] is not grad:
            return None
        value = landed[1]
        alike = gradient.shape == value.shape and gradient.dtype == value.dtype and gradient.is_contiguous()
        alike = alike and not (gradient.is_conj() or gradient.is_neg())
        assert value.extent is not None
        if alike and gradient.data_ptr() == value.extent.tensor.data_ptr():
            return value
        grad.direct = False
        # If somebody has it, what has arrived is a copy for that reason.
        self.give_up()
        return None

    def end(self) -> None:
        """What was claimed is the parameter's gradient now."""
        landed, self._landed = self._landed, None
        assert landed is not None
        with self._pool.lock:
            self._pool.shelf.admit(landed[1])

    def give_up(self) -> None:
        """What has not been claimed, or is not wanted any more, gives its memory back once nobody sees it."""
        landed, self._landed = self._landed, None
        if landed is not None:
            # Whoever keeps one may keep all, which should cost no budget.
            self._kept |= landed[1].viewed
            self._pool.forget(landed[1])


def _is_summed(param: torch.Tensor) -> bool:
    """Whether the backward that runs leaves a gradient of a parameter in it, and does not hand it out."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        # So torch says that it is asked for one (`torch.autograd.grad`): that is its caller's, and no budget's.
        return False


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _result(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor
