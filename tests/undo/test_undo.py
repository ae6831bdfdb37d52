"""Undoing a step: what comes back, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import UsageError
from holdfast.undo import rules as undo_rules
from holdfast.undo.lamb import Lamb
from holdfast.undo.undo import check, undo_step

KERNELS: list[dict[str, Any]] = [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}]
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda ps, **kw: SGD(ps, lr=0.1, **kw),
    "momentum": lambda ps, **kw: SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, **kw),
    "nesterov": lambda ps, **kw: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, **kw),
    "adam": lambda ps, **kw: Adam(ps, lr=0.01, weight_decay=0.1, **kw),
    "adamw": lambda ps, **kw: AdamW(ps, lr=0.01, **kw),
    "adagrad": lambda ps, **kw: Adagrad(ps, lr=0.01, initial_accumulator_value=0.25, weight_decay=0.01, **kw),
    "lamb": lambda ps, **kw: Lamb(ps, lr=0.01, weight_decay=0.1),
}


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def step(optimizer: Optimizer, ps: list[Parameter]) -> list[Tensor]:
    """A step with random gradients, which are returned as they were before it."""
    for p in ps:
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in ps if p.grad is not None]
    optimizer.step()
    return grads


def picture(optimizer: Optimizer, ps: list[Parameter]) -> list[Any]:
    """Weights and state, copied."""
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} if p in optimizer.state else None for p in ps]
    return [[p.detach().clone() for p in ps], states]


def near(found: list[Any], wanted: list[Any]) -> bool:
    """The bounds are tested in test_undo_bounds.py: here it matters what is touched."""
    try:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    except AssertionError:
        return False
    return True


def same(found: list[Any], wanted: list[Any]) -> bool:
    try:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kernel", KERNELS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", MAKERS)
def test_state_and_counters_come_back(name: str, kernel: dict[str, Any]) -> None:
    ps = parameters((5, 7), (), (3,), (0, 4))
    optimizer = MAKERS[name](ps, **kernel)
    step(optimizer, ps)
    before = picture(optimizer, ps)
    grads = step(optimizer, ps)
    assert not near(picture(optimizer, ps), before)
    undo_step(optimizer, grads)
    after = picture(optimizer, ps)
    for was, now in zip(before[1], after[1], strict=True):
        if was and "trust_ratio" in was:
            assert now.pop("trust_ratio") == 0  # of the step before: not known any more
            del was["trust_ratio"]
    assert near(after, before)


@pytest.mark.parametrize("kernel", KERNELS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", MAKERS)
def test_after_the_first_step_the_state_is_as_it_was_made(name: str, kernel: dict[str, Any]) -> None:
    ps = parameters((5, 7), (3,))
    optimizer = MAKERS[name](ps, **kernel)
    before = picture(optimizer, ps)
    for told in (None, ps):
        grads = step(optimizer, ps)
        undo_step(optimizer, grads, first=told)
        after = picture(optimizer, ps)
        assert near(after[:1], before[:1])
        assert same(after[1:], before[1:])  # bit for bit


@pytest.mark.parametrize("kernel", KERNELS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_first_step_of_momentum_is_told_from_later_ones(decay: float, kernel: dict[str, Any]) -> None:
    for nesterov in (False, True):
        for steps in (1, 2, 3):
            ps = parameters((50,))
            optimizer = SGD(ps, lr=0.5, momentum=0.01, weight_decay=decay, nesterov=nesterov, **kernel)
            for _ in range(steps):
                grads = step(optimizer, ps)
            undo_step(optimizer, grads)
            assert (ps[0] in optimizer.state) == (steps > 1)


def test_a_buffer_of_zeros_goes_with_the_others() -> None:
    """The fused kernel cannot make a step in which some parameters have a buffer and others have none."""
    ps = parameters((4,), (5,))
    optimizer = SGD(ps, lr=0.5, momentum=0.9, fused=True)
    for steps in (1, 2):
        for p, grad in zip(ps, (torch.randn(4), torch.zeros(5)), strict=True):
            p.grad = grad
        optimizer.step()
        if steps == 1:
            undo_step(optimizer, [p.grad for p in ps])
            assert not optimizer.state
            optimizer.step()
    undo_step(optimizer, [p.grad for p in ps])
    assert all(p in optimizer.state for p in ps)
    optimizer.step()


def test_a_state_that_counted_zero_is_zero_again() -> None:
    """Not the first step by what the caller knows: the state was there, and said that there had been no step."""
    ps = parameters((9,))
    optimizer = Adam(ps)
    grads = step(optimizer, ps)
    undo_step(optimizer, grads, first=())
    assert {key: float(value.abs().sum()) for key, value in optimizer.state[ps[0]].items()} == {
        "step": 0,
        "exp_avg": 0,
        "exp_avg_sq": 0,
    }


def test_several_groups_each_with_its_own_settings() -> None:
    ps = parameters((4,), (5,), (6,))
    groups: list[dict[str, Any]] = [
        {"params": ps[:1], "lr": 0.1, "weight_decay": 0.5},
        {"params": ps[1:2], "lr": 0.01, "betas": (0.5, 0.5), "maximize": True, "fused": True},
        {"params": ps[2:], "lr": 0.0},
    ]
    optimizer = AdamW(groups)
    step(optimizer, ps)
    before = picture(optimizer, ps)
    undo_step(optimizer, dict(zip(ps, step(optimizer, ps), strict=True)))
    assert near(picture(optimizer, ps), before)


def test_parameters_without_a_gradient_are_untouched() -> None:
    ps = parameters((4,), (5,))
    optimizer = AdamW(ps)
    step(optimizer, ps)
    before = picture(optimizer, ps)
    ps[0].grad = None
    ps[1].grad = torch.ones(5)
    optimizer.step()
    undo_step(optimizer, [None, ps[1].grad])
    after = picture(optimizer, ps)
    assert near(after, before)
    assert same([after[0][0], after[1][0]], [before[0][0], before[1][0]])


def test_steps_can_be_undone_back_to_the_begin() -> None:
    ps = parameters((40,), dtype=torch.float64)
    optimizer = Adam(ps, lr=0.1, weight_decay=0.1)
    before = picture(optimizer, ps)
    for grads in reversed([step(optimizer, ps) for _ in range(5)]):
        undo_step(optimizer, grads)
    assert near(picture(optimizer, ps), before)
    assert not optimizer.state


@pytest.mark.parametrize("name", MAKERS)
def test_any_memory_order_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo_rules, "BLOCK", 16)
    torch.manual_seed(0)
    ps = [Parameter(torch.randn(9, 5).t()), Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))]
    optimizer = MAKERS[name](ps)
    for _ in range(2):
        before = picture(optimizer, ps)
        for p in ps:
            p.grad = torch.randn(p.shape)  # contiguous: not as the parameter lies
        grads = [p.grad.clone() for p in ps if p.grad is not None]
        optimizer.step()
    undo_step(optimizer, grads)
    assert near(picture(optimizer, ps)[:1], before[:1])


class Largest(TorchDispatchMode):
    """The largest storage that is made while it is on."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("name", MAKERS)
def test_temporaries_are_small(name: str) -> None:
    ps = parameters((1 << 18,))
    optimizer = MAKERS[name](ps)
    step(optimizer, ps)
    grads = step(optimizer, ps)
    with Largest() as largest:
        undo_step(optimizer, grads)
    assert 0 < largest.bytes <= 256 << 10
    with Largest() as largest:  # the control: a step has temporaries of the parameter's size
        Adam(ps, foreach=False).step()
    assert largest.bytes >= ps[0].nbytes


def test_what_zero_betas_wiped_out_is_zero() -> None:
    ps = parameters((30,))
    optimizer = Adam(ps, lr=0.1, betas=(0.0, 0.0))
    step(optimizer, ps)
    before = picture(optimizer, ps)
    grads = step(optimizer, ps)
    after = picture(optimizer, ps)
    undo_step(optimizer, grads)
    assert near(picture(optimizer, ps)[0], before[0])
    assert not optimizer.state[ps[0]]["exp_avg"].any()
    for p, grad in zip(ps, grads, strict=True):
        p.grad = grad
    optimizer.step()
    assert near(picture(optimizer, ps), after)


def test_gradients_are_not_written() -> None:
    for make in MAKERS.values():
        ps = parameters((30,))
        optimizer = make(ps, foreach=False)
        step(optimizer, ps)
        kept = [grad.clone() for grad in step(optimizer, ps)]
        undo_step(optimizer, [p.grad for p in ps])
        assert same([p.grad for p in ps], kept)


@pytest.mark.parametrize("given", ["as the step left it", "a copy made before", "a copy put back"])
def test_the_foreach_kernel_of_nesterov_writes_into_the_gradient(given: str) -> None:
    ps = parameters((30,))
    optimizer = SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    step(optimizer, ps)
    before = picture(optimizer, ps)
    copies = step(optimizer, ps)
    assert not torch.equal(copies[0], ps[0].grad)  # type: ignore[arg-type]  # if not, torch has mended it
    if given == "a copy made before":
        copies[0].mul_(1)  # written into, as p.grad is
    if given == "a copy put back":
        ps[0].grad = copies[0]
    undo_step(optimizer, copies if given == "a copy made before" else [ps[0].grad])
    assert near(picture(optimizer, ps), before)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "undo.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert float(capsys.readouterr().out.split("(")[1].split(",")[0].rstrip(")\n")) < 1e-7


# --- refusals --------------------------------------------------------------------------------------------------------


class Slower(Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Elsewhere(SGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class Named(AdamW):
    """Changes nothing of a step."""


class Sign(Optimizer):
    """A user's own, with its inverse."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(torch.sign(p.grad), alpha=group["lr"])

    def undo(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(torch.sign(grad), alpha=group["lr"])
        state["steps"] -= 1
        if state["steps"] == 0:
            state.clear()


class Bare(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def tensors(**kw: Any) -> list[Parameter]:
    return [Parameter(torch.ones(2, 2, **kw))]


REFUSED: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "amsgrad": (lambda: Adam(tensors(), amsgrad=True), "Adam with amsgrad=True"),
    "amsgrad in a group": (lambda: AdamW([{"params": tensors(), "amsgrad": True}]), "AdamW with amsgrad=True"),
    "capturable": (lambda: Adam(tensors(), capturable=True), "capturable=True"),
    "differentiable": (lambda: SGD(tensors(), lr=0.1, differentiable=True), "differentiable=True"),
    "bfloat16": (lambda: SGD(tensors(dtype=torch.bfloat16), lr=0.1), "bfloat16 parameters"),
    "float16": (lambda: Adam(tensors(dtype=torch.float16)), "float16 parameters"),
    "complex": (lambda: Adam(tensors(dtype=torch.complex64)), "complex64 parameters"),
    "LBFGS": (lambda: optim.LBFGS(tensors()), "LBFGS"),
    "SparseAdam": (lambda: optim.SparseAdam(tensors()), "SparseAdam"),
    "Rprop": (lambda: optim.Rprop(tensors()), "Rprop"),
    "Adamax": (lambda: optim.Adamax(tensors()), "Adamax"),
    "Adadelta": (lambda: optim.Adadelta(tensors()), "Adadelta"),
    "RMSprop": (lambda: optim.RMSprop(tensors()), "RMSprop"),
    "NAdam": (lambda: optim.NAdam(tensors()), "NAdam"),
    "RAdam": (lambda: optim.RAdam(tensors()), "RAdam"),
    "ASGD": (lambda: optim.ASGD(tensors()), "ASGD"),
    "Adafactor": (lambda: optim.Adafactor(tensors()), "Adafactor"),
    "Muon": (lambda: optim.Muon(tensors()), "Muon"),
    "another step": (lambda: Slower(tensors()), "Slower .* changes what Adam does"),
    "another part of a step": (lambda: Elsewhere(tensors(), lr=0.1), "Elsewhere .* changes what SGD does"),
    "unknown": (lambda: Bare(tensors()), "Bare .* no.* known inverse"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_inverted_is_refused_by_name(case: str) -> None:
    make, words = REFUSED[case]
    optimizer = make()
    with pytest.raises(UsageError, match=words):
        check(optimizer)
    with pytest.raises(UsageError, match=words):
        undo_step(optimizer, [torch.ones(2, 2)])


def test_all_of_torch_is_either_inverted_or_refused_with_a_reason() -> None:
    from holdfast.undo.undo import REFUSED as REASONS
    from holdfast.undo.undo import RULES

    found = {each.__name__ for each in vars(optim).values() if isinstance(each, type) and issubclass(each, Optimizer)}
    assert found - {"Optimizer"} == set(REASONS) | {each.__name__ for each in RULES} - {"Lamb"}


def test_what_may_be_added_to_an_optimizer() -> None:
    optimizer = Named(tensors())
    optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step
    check(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match="hook"):
        check(optimizer)
    replaced = Adam(tensors())
    replaced.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    with pytest.raises(UsageError, match="changes what Adam does"):
        check(replaced)


def test_an_optimizer_may_bring_its_inverse() -> None:
    ps = parameters((4,))
    optimizer = Sign(ps)
    before = picture(optimizer, ps)
    check(optimizer)
    grads = step(optimizer, ps)
    undo_step(optimizer, grads)
    assert near(picture(optimizer, ps), before)
    assert not optimizer.state


def refused_unchanged(optimizer: Optimizer, ps: list[Parameter], grads: Any, words: str, **kw: Any) -> None:
    before = picture(optimizer, ps)
    with pytest.raises(UsageError, match=words):
        undo_step(optimizer, grads, **kw)
    assert same(picture(optimizer, ps), before)


def test_gradients_that_do_not_fit_change_nothing() -> None:
    ps = parameters((4,), (5,))
    optimizer = Adam(ps)
    good = step(optimizer, ps)
    refused_unchanged(optimizer, ps, [good[0]], "1 gradients for an optimizer of 2 parameters")
    refused_unchanged(optimizer, ps, [good[0], good[0]], "is not a gradient of a parameter of 5 ")
    refused_unchanged(optimizer, ps, [good[0], good[1].double()], "float64")
    refused_unchanged(optimizer, ps, [good[0], good[1].to_sparse()], "is not a gradient")
    refused_unchanged(optimizer, ps, {ps[0]: good[0], Parameter(torch.ones(5)): good[1]}, "1 of the gradients belong")
    refused_unchanged(optimizer, ps, [good[0], torch.full((5,), torch.nan)], "finite")
    undo_step(optimizer, good)  # the control


@pytest.mark.parametrize("name", ["momentum", "adam", "lamb", "adagrad"])
def test_a_step_that_was_not_done_is_not_undone(name: str) -> None:
    ps = parameters((4,), (5,))
    optimizer = MAKERS[name](ps)
    ps[0].grad = torch.ones(4)
    optimizer.step()
    refused_unchanged(optimizer, ps, [ps[0].grad, torch.ones(5)], "no step to undo for a parameter of 5 ")


def test_the_first_step_cannot_be_the_third() -> None:
    ps = parameters((4,))
    optimizer = Adam(ps)
    for _ in range(3):
        grads = step(optimizer, ps)
    refused_unchanged(optimizer, ps, grads, "said to be the first step, but the state counts 3", first=ps)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: SGD([{"params": ps[:1]}, {"params": ps[1:], "weight_decay": 2.0}], lr=0.5),
        lambda ps: SGD(
            [{"params": ps[:1]}, {"params": ps[1:], "weight_decay": 2}], lr=0.5, momentum=0.9, nesterov=True
        ),
        lambda ps: AdamW([{"params": ps[:1]}, {"params": ps[1:], "weight_decay": 2.0}], lr=0.5),
    ],
)
def test_a_decay_that_leaves_nothing_is_refused(make: Callable[[list[Parameter]], Optimizer]) -> None:
    ps = parameters((4,), (5,))
    optimizer = make(ps)
    grads = step(optimizer, ps)
    refused_unchanged(optimizer, ps, grads, r"1 - lr \* weight_decay is about 0 \(lr=0.5, weight_decay=2\)")


def test_a_decay_that_leaves_nothing_of_one_weight_is_refused() -> None:
    """Adagrad's first step moves a weight without a gradient by lr: one that is lr large may have been -lr as well."""
    ps = [Parameter(torch.tensor([1.0, 0.125]))]
    optimizer = Adagrad(ps, lr=0.125, weight_decay=0.5)
    ps[0].grad = torch.zeros(2)
    optimizer.step()
    assert ps[0].tolist() == pytest.approx([0.875, 0])
    refused_unchanged(optimizer, ps, [ps[0].grad], "weight decay took all of some weights")


def test_lamb_can_be_undone_once() -> None:
    ps = parameters((4,))
    optimizer = Lamb(ps)
    grads = [step(optimizer, ps) for _ in range(2)]
    undo_step(optimizer, grads[1])
    refused_unchanged(optimizer, ps, grads[0], "trust ratio is not there")


def test_fused_kernels_go_by_memory() -> None:
    ps = parameters((3, 5))
    optimizer = AdamW(ps, fused=True)
    ps[0].grad = torch.randn(5, 3).t()
    optimizer.step()
    refused_unchanged(optimizer, ps, [ps[0].grad], "another memory order")


# --- Lamb ------------------------------------------------------------------------------------------------------------


def test_lamb_is_adam_scaled_by_norms() -> None:
    """Against Adam's own step: the direction is what Adam moves by at lr = 1."""
    ps = parameters((6, 4), dtype=torch.float64)
    twin = [Parameter(ps[0].detach().clone())]
    lamb, adam = Lamb(ps, lr=0.02, eps=1e-8, weight_decay=0.1), Adam(twin, lr=1.0, eps=1e-8, foreach=False)
    for _ in range(4):
        before = ps[0].detach().clone()
        step(lamb, ps)
        with torch.no_grad():
            twin[0].copy_(before)
        twin[0].grad = ps[0].grad
        adam.step()
        u = before - twin[0].detach() + 0.1 * before
        torch.testing.assert_close(ps[0].detach(), before - 0.02 * (before.norm() / u.norm()) * u)


def test_lamb_without_norms_moves_as_adam() -> None:
    p = Parameter(torch.zeros(3))
    optimizer = Lamb([p], lr=0.5)
    p.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    assert float(optimizer.state[p]["trust_ratio"]) == 1
    assert p.tolist() == pytest.approx([-0.5, 0.5, 0], abs=1e-5)
    p.grad = None
    assert optimizer.step(lambda: 7) == 7


@pytest.mark.parametrize("options", [{"lr": -1}, {"eps": -1}, {"weight_decay": -1}, {"betas": (0.9, 1.0)}])
def test_lamb_refuses_what_makes_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Lamb"):
        Lamb(parameters((2,)), **options)


def test_methods_that_torch_compile_has_wrapped_are_still_known() -> None:
    """It wraps those of each class by itself, so that AdamW's are not Adam's any more."""
    from torch._dynamo.eval_frame import TorchPatcher

    TorchPatcher.patch()
    optimizer = AdamW([Parameter(torch.ones(1))])
    assert type(optimizer)._init_group is not Adam._init_group
    check(optimizer)
