"""A scan over stacked layers that keeps only the inputs of layers, and adds gradients to totals where it computes them.

The backward pass runs each layer again from its input, as `jax.checkpoint` does in `jax.lax.scan`. Two things are
different. The inputs may wait in host memory. And a parameter may come with the total of its gradients over earlier
micro-batches (`relibra_jax.nnx.variables.WithTotal`), to which its layer's gradient is added in place; otherwise the
gradients of all layers would lie beside the totals, 2 to 4 bytes for each parameter of the model.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from relibra_jax.execution.memory import HOST, take, to_host
from relibra_jax.nnx.variables import WithTotal

type Layer = Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]
"""The function of one layer, ``layer(x, inputs) -> (x, outputs)``."""


def scan_layers(
    layer: Layer, x: jax.Array, inputs: PyTree, *, memory: str = "device"
) -> tuple[jax.Array, PyTree]:
    """Run layers one after another.

    Args:
        layer: the function of one layer. Values over which it closes are not differentiated.
        x: the input of the first layer.
        inputs: the other inputs of all layers, such as parameters and routing, stacked along the first axis. For a
            `WithTotal` the layer gets the value, and the gradient with respect to the total is the total with the
            value's gradient added. The gradient with respect to the value is 0. If the total has axes of groups after
            that of layers, the layer gets the value with these axes in front in the backward pass.
        memory: the memory in which the inputs ``x`` of layers wait for the backward pass, ``device`` or
            ``pinned_host``.

    Returns:
        The output of the last layer, and the other outputs of all layers, stacked.

    >>> weights = jnp.arange(1.0, 4.0)
    >>> def layer(x, weight):
    ...     return x * weight, x
    >>> output, _ = scan_layers(layer, jnp.float32(2.0), weights)
    >>> float(output), jax.grad(lambda weights: scan_layers(layer, jnp.float32(2.0), weights)[0])(weights).tolist()
    (12.0, [12.0, 6.0, 4.0])
    """
    leaves, structure = jax.tree.flatten(inputs, is_leaf=has_total)
    is_trained = [has_total(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    trained, fixed = (
        [leaf for leaf, is_one in zip(leaves, is_trained, strict=True) if is_one is want]
        for want in (True, False)
    )
    numbers = jnp.arange(len(jax.tree.leaves(leaves)[0]))

    def run(x: jax.Array, trained: list[jax.Array], fixed: list[jax.Array]) -> tuple[jax.Array, PyTree]:
        parts = {True: iter(trained), False: iter(fixed)}
        return layer(x, jax.tree.unflatten(structure, [next(parts[is_one]) for is_one in is_trained]))

    def forward(x: jax.Array, trained: list[Any], fixed: list[jax.Array], *, keep: bool) -> Any:
        values = _values(trained)

        def step(x: jax.Array, number: jax.Array) -> Any:
            y, outputs = run(x, *take((values, fixed), number))
            kept = to_host(x) if keep and memory == HOST else x
            return y, (outputs, kept if keep else None)

        y, (outputs, kept) = jax.lax.scan(step, x, numbers)
        return (y, outputs), (kept, trained, fixed)

    @jax.custom_vjp
    def scan(x: jax.Array, trained: list[Any], fixed: list[jax.Array]) -> Any:
        return forward(x, trained, fixed, keep=False)[0]

    def backward(residuals: Any, gradients: Any) -> Any:
        kept, trained, fixed = residuals
        values = _values(trained)
        totals = [leaf.total if has_total(leaf) else jnp.zeros_like(leaf) for leaf in trained]

        def step(carry: Any, number: jax.Array) -> Any:
            gradient, totals = carry
            of_one, of_fixed = take((values, fixed), number)
            # With a total for each group, the layer gets weights for each, so that gradients are not summed over them.
            of_one = [
                jnp.broadcast_to(one, total.shape[1:]) for one, total in zip(of_one, totals, strict=True)
            ]
            _, pull_back = jax.vjp(lambda x, values: run(x, values, of_fixed), take(kept, number), of_one)
            of_outputs = jax.tree.map(functools.partial(_gradient_of_layer, number=number), gradients[1])
            gradient, added = pull_back((gradient, of_outputs))
            return (gradient, [_add(*each, number) for each in zip(totals, added, strict=True)]), None

        (gradient, totals), _ = jax.lax.scan(step, (gradients[0], totals), numbers, reverse=True)
        of_trained = [
            WithTotal(jnp.zeros_like(leaf.value), total, jnp.ones_like(leaf.runs))
            if has_total(leaf)
            else total
            for leaf, total in zip(trained, totals, strict=True)
        ]
        return gradient, of_trained, [None] * len(fixed)

    scan.defvjp(functools.partial(forward, keep=True), backward)
    return scan(x, trained, fixed)


def has_total(leaf: Any) -> bool:
    """Return whether a leaf is a value with a total."""
    return isinstance(leaf, WithTotal)


def _values(leaves: list[Any]) -> list[jax.Array]:
    return [leaf.value if has_total(leaf) else leaf for leaf in leaves]


def _gradient_of_layer(gradient: Any, number: jax.Array) -> Any:
    """Return one layer's part of the gradient of stacked outputs; that of integers has no values."""
    if gradient.dtype == jax.dtypes.float0:
        return np.zeros(gradient.shape[1:], jax.dtypes.float0)
    return take(gradient, number)


def _add(total: jax.Array, gradient: jax.Array, number: jax.Array) -> jax.Array:
    """Add a layer's gradient to its entry of the totals, in place where XLA allows it."""
    entry = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, entry + gradient.astype(total.dtype), number, 0)
