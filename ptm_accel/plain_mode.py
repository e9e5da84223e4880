"""Takes the hooks off where everything fits: parameters, gradients and state are ordinary tensors meanwhile.

Nothing of ours is called in such a step but a hook before the model's forward and the optimizer's `step`. Values and
state stay on their pages, pinned; gradients stay in `p.grad`, with room held for them. The first use of a tensor
through the pool ends it (a checkpoint, `gathered`, another model that comes to the tiers), and so does a batch that
leaves pages too little; it begins again after the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import BudgetError
from ptm_accel.memory.activation_reserve import ActivationReserve, Shapes
from ptm_accel.memory.block import Block, Pin
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.model.addresses import Members
from ptm_accel.model.assignments import take_in
from ptm_accel.model.away import bare, is_transformed
from ptm_accel.model.forwards import shapes_of
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.hooks import RootHook
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.pages import Pages

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")

_MOST_ENDS = 2
"""Times that a batch may be too large for it; the run keeps its hooks after that."""


class PlainMode:
    """Takes the hooks of one model off while everything fits, and puts them on again.

    Args:
        pages: the model.

    Attributes:
        active: whether the hooks are off.
        graphs: of autograd, made while they were off: what these have saved stays where it is.
    """

    def __init__(self, pages: Pages) -> None:
        self.active = False
        self.graphs = LiveGraphs()
        self._pages = pages
        self._pool = pages.pool
        self._optimizer: PagedOptimizer | None = None
        self._gradients: Gradients | None = None
        self._stay = _Stay(self, pages.pool)
        self._hook: RemovableHandle | None = None
        self._seen: list[tuple[nn.Parameter, int, bool]] = []
        self._too_large = 0

    def step_ended(self, optimizer: PagedOptimizer, gradients: Gradients) -> None:
        """Takes the hooks off after a step if everything fits, and puts them on if it no longer does.

        Args:
            optimizer: has made the step.
            gradients: it has used.
        """
        if self.active:
            if gradients.used_up:
                gradients.forget_used()
            # Without a device, only another model changes what there is room for, and its coming ends this.
            if self._pool.admission.activation_reserve is not None and not self._pages.needs.all_fits:
                self._too_large += 1
                self.make_way()
            return
        self.graphs.outdate()
        self._let_values_go()
        if self._may_begin(optimizer, gradients):
            self._begin(optimizer, gradients)

    def _may_begin(self, optimizer: PagedOptimizer, gradients: Gradients) -> bool:
        pages, pool = self._pages, self._pool
        reserve = pool.admission.activation_reserve
        return (
            pages.needs.all_fits
            and self._too_large < _MOST_ENDS
            and not pages.memory.others
            and pages.executor.pending_updates is None
            and (reserve is None or not reserve.warming)
            and not pages.residency.regions.running()
            and not pages.residency.forwards.under_way
            and optimizer.can_be_plain()
            # Sums that no step has used, such as those of parameters that another optimizer has.
            and not gradients.arrived()
        )

    # ---- off and on ------------------------------------------------------------------------------------------------

    def _begin(self, optimizer: PagedOptimizer, gradients: Gradients) -> None:
        pages, pool = self._pages, self._pool
        pages.residency.forwards.regroup()
        arriving = sum(grad.slot.value.nbytes for grad in gradients.slots())
        made = optimizer.states.unmade_bytes() * optimizer.optimizer_memory.state_tensors
        try:
            gradients.leave_alone()
            pool.admission.lend(arriving + made)
            self._stay.hold(arriving, Tag.GRAD, "gradients in p.grad")
            self._stay.hold(made, Tag.STATE, "optimizer state to come")
            self._stay.pin([*pages.slots.blocks(), *optimizer.states.kept()])
        except BudgetError:
            self._too_large += 1
            self._stay.release()
            gradients.take_again(pages.slots)
            return
        pages.remove_hooks()
        for slot in pages.slots:
            slot.show()
            slot.separate()
        self._seen = [(s.param, s.param.data_ptr(), gradients.known(s) is not None) for s in pages.slots]
        optimizer.begin_plain(weakly(self.end, None))
        self._optimizer, self._gradients = optimizer, gradients
        self._hook = pages.model.register_forward_pre_hook(self._root_hook(), prepend=True, with_kwargs=True)
        self.active = True
        pages.executor.pending_updates = self._stay

    def end(self, *, refuses: bool = True, stays: bool = True) -> None:
        """Puts the hooks on again: parameters, gradients and state are what they have become.

        Args:
            refuses: otherwise a parameter that has been given data that it cannot have is as it was before.
            stays: whether all values stay until the next forward or step, since a backward of what was computed
                meanwhile may come; otherwise those alone that a graph refers to, and the others can leave at once.

        Raises:
            PagedModelError: a parameter has been given data of another dtype, or on another device.
        """
        if not self.active:
            return
        pages = self._pages
        for (param, place, _), slot in zip(self._seen, pages.slots, strict=True):
            if param.data_ptr() != place and not slot.can_have(param.data):
                if refuses:
                    slot.check_data(param.data)
                slot.bring_back()
        assert self._optimizer is not None and self._gradients is not None and self._hook is not None
        self.active = False
        self._pages.executor.pending_updates = None
        self._hook.remove()
        self._stay.release()
        for slot in pages.slots:
            slot.hide()
        try:
            take_in(pages.slots, alone=True)
        finally:
            pages.residency.forwards.apart = [slot for slot in pages.slots if slot.apart]
            self._put_on(stays=stays)

    def _put_on(self, *, stays: bool) -> None:
        """Puts the hooks on, with the values of all parameters on their pages."""
        pages = self._pages
        assert self._optimizer is not None and self._gradients is not None
        for slot in pages.slots:
            slot.rejoin()
            slot.generation += 1
            self.graphs.meet(slot)
        self._optimizer.end_plain()
        pages.residency.install(pages.model)
        pages.state_dicts.install(pages.model)
        # Gradients need room, which may have to be made: nothing but what a graph needs is pinned before that.
        self._gradients.take_again(pages.slots)
        if stays:
            for slot in pages.slots:
                self.graphs.values.append(self._pages.executor.pin(slot.value))
            pages.residency.forwards.between = weakly(self._let_values_go, None)
        self._optimizer, self._gradients, self._seen = None, None, []

    def make_way(self) -> None:
        """Ends it where no backward is to come, or somebody else needs the room: values may leave from now on."""
        self._let_values_go()
        self.end(stays=False)

    def close(self) -> None:
        """Ends it for good, whatever parameters have been given."""
        self.end(refuses=False)
        self._let_values_go()
        self.graphs.close()

    def _let_values_go(self) -> None:
        self.graphs.let_go()
        self._pages.residency.forwards.between = None

    def _root_hook(self) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                # Recomputation within a backward.
                return
            if self._pages.slots.given.by_slot:
                self._pages.slots.given.take_over_all()
                if not self.active:
                    self._pages.residency.forwards.enter_root(module, args, kwargs)
                    return
            reserve = self._pool.admission.activation_reserve
            if reserve is not None and self._leaves_too_little(reserve, shapes_of(args, kwargs)):
                self._end_before(module, args, kwargs)
                return
            for param, place, has_room in self._seen:
                if param.data_ptr() != place or param.requires_grad > has_room:
                    # It has been given other data, which is to be on pages, or gets a gradient from now on. One that
                    # is frozen for a while (adapters, in a forward of their base alone) changes nothing.
                    self._end_before(module, args, kwargs)
                    return

        return RootHook(enter, self._pool.stats)

    def _leaves_too_little(self, reserve: ActivationReserve, shapes: Shapes) -> bool:
        """Returns whether a forward, which begins, leaves pages less than all of them take."""
        evaluates = not torch.is_grad_enabled()
        if reserve.least_bytes < self._pool.whole_bytes and not reserve.knows(shapes, evaluates=evaluates):
            # Pages get the least for it, once nothing is pinned but what a graph needs.
            return True
        self._pool.admission.begin_pass(shapes, evaluates=evaluates)
        if self.active and self._pages.needs.all_fits:
            return False
        self._too_large += not evaluates
        return True

    def _end_before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Ends it at the beginning of a forward, which is then as any other."""
        self.end()
        self._pages.residency.forwards.enter_root(module, args, kwargs)


def weakly(method: Callable[_Given, _Answer], otherwise: _Answer) -> Callable[_Given, _Answer]:
    """Returns a method that is called without keeping its object alive; `otherwise` is its answer once that is gone."""
    known = weakref.WeakMethod(method)

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Answer:
        alive = known()
        return otherwise if alive is None else alive(*args, **kwargs)

    return call


class LiveGraphs:
    """Pins the values of parameters that a graph has saved as they are, without hooks on saved tensors.

    Autograd saves a parameter by reference: once its values have left, backward would read a placeholder.

    Attributes:
        values: pins of all values, until `let_go`.
    """

    def __init__(self) -> None:
        self.values: list[Pin] = []
        self._held: list[tuple[ParamSlot, int, Pin]] = []

    @staticmethod
    def _refers(param: nn.Parameter) -> bool:
        """Whether a graph has saved a parameter as it is; or is to add up its gradient, if it has been frozen since."""
        with bare(), torch.inference_mode(mode=False):
            # Python's reference, and the node that adds up the gradient, which is made here if there is none.
            node = get_gradient_edge(param).node if param.requires_grad and not is_transformed() else None
            uses: int = torch.Tensor._use_count(param)  # type: ignore[attr-defined]
            return uses > 1 + (node is not None)

    def meet(self, slot: ParamSlot) -> None:
        """Pins a parameter's values if a graph refers to it.

        Args:
            slot: the parameter.
        """
        if self._refers(slot.param):
            self._held.append((slot, slot.generation, slot.executor.pin(slot.value)))

    def blocks(self) -> list[Block]:
        """What is pinned, as often as it is, once the pins of all values have ended."""
        return [slot.value.block for slot, _, _ in self._held]

    def outdate(self) -> None:
        """After a step on pages: a graph that has saved what was updated is out of date, as in torch."""
        for slot, generation, _ in self._held:
            if slot.generation != generation:
                slot.outdate()

    def let_go(self) -> None:
        """Releases the pins of all but those that a graph refers to."""
        for pin in self.values:
            pin.release()
        self.values = []
        held, self._held = self._held, []
        for each in held:
            slot, _, pin = each
            if self._refers(slot.param):
                self._held.append(each)
            else:
                pin.release()

    def close(self) -> None:
        """Releases all pins."""
        for pin in [*self.values, *(pin for *_, pin in self._held)]:
            pin.release()
        self.values, self._held = [], []


class _Stay:
    """Keeps blocks in the compute tier while the hooks are off. Whoever uses it through the pool ends that first.

    Keeps no model alive: the pool, which has it as what is pending, outlives the model.
    """

    def __init__(self, mode: PlainMode, pool: Pool) -> None:
        self._mode = weakref.ref(mode)
        self._pool = pool
        self._held: list[Pin | Reservation] = []
        self._tensors: list[Block] = []

    def hold(self, nbytes: int, tag: Tag, name: str) -> None:
        """Keeps room free."""
        if nbytes:
            self._held.append(self._pool.hold(nbytes, tag, name))

    def pin(self, tensors: list[Block]) -> None:
        """Keeps tensors in the compute tier."""
        for tensor in tensors:
            self._held.append(self._pool.pin(tensor))
            self._tensors.append(tensor)

    def release(self) -> None:
        """Ends all that."""
        for each in self._held:
            each.release()
        self._held, self._tensors = [], []
        self._pool.admission.lend(0)

    def before_use(self, tensor: Block) -> None:
        """Puts the hooks on again."""
        self.finish()

    def before_evaluation(self) -> None:
        """Does nothing: nothing is pending."""

    def elsewhere(self, tensor: Block) -> bool:
        """Nothing is changed in a backing store."""
        return False

    def finish(self) -> None:
        """Puts the hooks on again."""
        mode = self._mode()
        if mode is not None:
            mode.end()

    def give_way(self) -> bool:
        """Puts the hooks on again, so that pages can leave."""
        mode = self._mode()
        if mode is None or not mode.active:
            return False
        mode.make_way()
        return True

    def give_up(self) -> None:
        """The pool is closed: lets go of what is on it. Whoever has kept a parameter finds it away."""
        tensors = self._tensors
        self.release()
        for tensor in tensors:
            if isinstance(tensor.occupant, Members):
                for slot in tensor.occupant.slots:
                    slot.hide()
