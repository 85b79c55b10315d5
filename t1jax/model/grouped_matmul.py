"""Grouped matmul: rows sorted by expert, each group of rows times its expert's matrix.

One function with one gradient rule and four back ends. A back end is two plain functions: the
product, and the gradient of the weights (the rows' gradient is the product with the transpose).

| back end | for | how |
|---|---|---|
| blocked | CPU | loops over experts and blocks of rows; one dense product a block |
| ragged  | TPU | `jax.lax.ragged_dot` and its general form |
| tokamax | TPU | tokamax's Pallas kernels (extra `tpu`) |
| dense   | tests | every expert on every row, then a mask: the oracle |

`jax.lax.ragged_dot` on CPU computes every expert for every row (40 to 67 times the work at 32 to
64 experts), hence `blocked`.
"""

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

# Rows of the blocks that an expert's rows are cut into, largest first; the last one may read past
# the group's end. docs/model.md has the measurement behind both choices.
BLOCKS_MANY = (256, 128, 64, 32, 16)
BLOCKS_FEW = (8,)  # decoding: a handful of rows per expert
FEW_ROWS = 16  # mean rows per expert below which BLOCKS_FEW is used

ROW_PADDING = BLOCKS_MANY[-1]  # rows that the caller appends after the last group


class BackEnd(Protocol):
    """What a grouped-matmul back end provides."""

    def product(
        self, x_RD: jax.Array, w_EDF: jax.Array, first: jax.Array | int, sizes_E: jax.Array,
        transposed: bool,
    ) -> jax.Array: ...

    def weight_gradient(
        self, x_RD: jax.Array, dy_RF: jax.Array, sizes_E: jax.Array
    ) -> jax.Array: ...


class Stack(NamedTuple):
    """Matrices of several layers one after another, of which the groups' own begin at `first`.

    Reading them there saves copying a layer's matrices out of a stack (blocked back end).
    """

    w_EDF: jax.Array
    first: jax.Array | int


def grouped_matmul(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    backend: str = "blocked",
    stack: Stack | None = None,
) -> jax.Array:
    """y[r] = x[r] @ w[e] for the rows r of group e, groups lying one after another from row 0.

    Args:
      x_RD: [R, D] rows sorted by group. R must be at least sum(sizes) + ROW_PADDING, and the rows
        after the last group must be zero.
      w_EDF: [E, D, F], one matrix per group. The gradient goes to it.
      sizes_E: int32 [E], rows of each group; their sum may be anything from 0 to R - ROW_PADDING.
      backend: one of `BACK_ENDS`.
      stack: where to read the same matrices instead of `w_EDF`; it gets no gradient.

    Returns:
      [R, F] in x's dtype. Rows that belong to no group are zero.
    """
    stack = Stack(w_EDF, 0) if stack is None else stack
    return _differentiable(backend, x_RD, w_EDF, sizes_E, jax.lax.stop_gradient(stack))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(backend, x_RD, w_EDF, sizes_E, stack):
    return BACK_ENDS[backend].product(x_RD, *stack, sizes_E, False)


def _forward(backend, x_RD, w_EDF, sizes_E, stack):
    return _differentiable(backend, x_RD, w_EDF, sizes_E, stack), (x_RD, sizes_E, stack)


def _backward(backend, residuals, dy_RF):
    x_RD, sizes_E, stack = residuals
    dx_RD = BACK_ENDS[backend].product(dy_RF, *stack, sizes_E, True)
    dw_EDF = BACK_ENDS[backend].weight_gradient(x_RD, dy_RF, sizes_E)
    return dx_RD, dw_EDF.astype(stack.w_EDF.dtype), None, None


_differentiable.defvjp(_forward, _backward)


# ---- blocked ------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """Non-empty groups first, so that empty experts cost nothing: their weights are not read."""

    order_E: jax.Array
    filled: jax.Array  # how many groups are not empty
    end_E: jax.Array

    @classmethod
    def of(cls, sizes_E):
        return cls(
            jnp.argsort(sizes_E == 0, stable=True), (sizes_E > 0).sum(), jnp.cumsum(sizes_E)
        )


def _blocks(rows: int, experts: int) -> tuple[int, ...]:
    sizes = BLOCKS_FEW if rows - ROW_PADDING < FEW_ROWS * experts else BLOCKS_MANY
    return tuple(size for size in sizes if size <= rows)


def _for_each_block(row, end, blocks, visit, carry):
    """Covers rows [row, end) with blocks of falling size; the last size rounds up."""
    for size in blocks:
        left = end - row
        count = -(-left // size) if size == blocks[-1] else left // size

        def body(i, carry, row=row, size=size):
            return visit(row + i * size, size, carry)

        carry = jax.lax.fori_loop(0, count, body, carry)
        row = row + count * size
    return carry


class Blocked:
    """Dense products over blocks of one expert's rows, in a loop: XLA's CPU matmul at full speed.

    Groups are visited in row order, and a block that reaches past its group writes rows that the
    next groups write again; the padding rows are zero, so theirs stay zero.
    """

    def product(self, x_RD, w_EDF, first, sizes_E, transposed):
        groups = _Groups.of(sizes_E)
        blocks = _blocks(x_RD.shape[0], sizes_E.shape[0])
        contracted = 2 if transposed else 1
        dimensions = (((1,), (contracted - 1,)), ((), ()))

        def visit_expert(i, y_RF):
            expert = groups.order_E[i]
            w_DF = jax.lax.dynamic_index_in_dim(w_EDF, first + expert, keepdims=False)
            end = groups.end_E[expert]

            def visit_block(row, size, y_RF):
                block = jax.lax.dynamic_slice_in_dim(x_RD, row, size)
                done = jax.lax.dot_general(
                    block, w_DF.astype(block.dtype), dimensions,
                    preferred_element_type=x_RD.dtype,
                )
                return jax.lax.dynamic_update_slice_in_dim(y_RF, done, row, 0)

            return _for_each_block(end - sizes_E[expert], end, blocks, visit_block, y_RF)

        y_RF = jnp.zeros((x_RD.shape[0], w_EDF.shape[3 - contracted]), x_RD.dtype)
        return jax.lax.fori_loop(0, groups.filled, visit_expert, y_RF)

    def weight_gradient(self, x_RD, dy_RF, sizes_E):
        groups = _Groups.of(sizes_E)
        blocks = _blocks(x_RD.shape[0], sizes_E.shape[0])
        shape = (x_RD.shape[1], dy_RF.shape[1])

        def visit_expert(i, dw_EDF):
            expert = groups.order_E[i]
            end = groups.end_E[expert]

            def visit_block(row, size, dw_DF):
                x = jax.lax.dynamic_slice_in_dim(x_RD, row, size)
                if size == blocks[-1]:  # may reach into the next group
                    x = jnp.where((row + jnp.arange(size) < end)[:, None], x, 0)
                dy = jax.lax.dynamic_slice_in_dim(dy_RF, row, size)
                return dw_DF + jnp.einsum("RD,RF->DF", x, dy, preferred_element_type=jnp.float32)

            dw_DF = jnp.zeros(shape, jnp.float32)
            dw_DF = _for_each_block(end - sizes_E[expert], end, blocks, visit_block, dw_DF)
            return jax.lax.dynamic_update_index_in_dim(
                dw_EDF, dw_DF.astype(dw_EDF.dtype), expert, 0
            )

        dw_EDF = jnp.zeros((sizes_E.shape[0], *shape), x_RD.dtype)
        return jax.lax.fori_loop(0, groups.filled, visit_expert, dw_EDF)


# ---- native ragged products ---------------------------------------------------------------------

_ROWS_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _layer(w_EDF, first, sizes_E, transposed):
    w = jax.lax.dynamic_slice_in_dim(w_EDF, first, sizes_E.shape[0])
    return jnp.swapaxes(w, 1, 2) if transposed else w


class Ragged:
    """XLA's own ragged product: a native kernel on TPU, every expert for every row elsewhere."""

    def product(self, x_RD, w_EDF, first, sizes_E, transposed):
        w = _layer(w_EDF, first, sizes_E, transposed).astype(x_RD.dtype)
        return jax.lax.ragged_dot(x_RD, w, sizes_E, preferred_element_type=x_RD.dtype)

    def weight_gradient(self, x_RD, dy_RF, sizes_E):
        return jax.lax.ragged_dot_general(
            x_RD, dy_RF, sizes_E, _ROWS_CONTRACTED, preferred_element_type=x_RD.dtype
        )


class Dense:
    """Every expert on every row, then a mask. Written to be obviously right; used by tests."""

    def product(self, x_RD, w_EDF, first, sizes_E, transposed):
        w = _layer(w_EDF, first, sizes_E, transposed).astype(x_RD.dtype)
        return jnp.einsum("RE,RD,EDF->RF", _membership(x_RD, sizes_E), x_RD, w)

    def weight_gradient(self, x_RD, dy_RF, sizes_E):
        return jnp.einsum("RE,RD,RF->EDF", _membership(x_RD, sizes_E), x_RD, dy_RF)


def _membership(x_RD, sizes_E):
    """1 where row r belongs to group e."""
    row_R1 = jnp.arange(x_RD.shape[0])[:, None]
    end_E = jnp.cumsum(sizes_E)
    return ((row_R1 >= end_E - sizes_E) & (row_R1 < end_E)).astype(x_RD.dtype)


class Tokamax:
    """tokamax's ragged products (Pallas on TPU); imported when first used."""

    def product(self, x_RD, w_EDF, first, sizes_E, transposed):
        import tokamax

        w = _layer(w_EDF, first, sizes_E, transposed).astype(x_RD.dtype)
        return tokamax.ragged_dot(x_RD, w, sizes_E, preferred_element_type=x_RD.dtype)

    def weight_gradient(self, x_RD, dy_RF, sizes_E):
        import tokamax

        return tokamax.ragged_dot_general(
            x_RD, dy_RF, sizes_E, _ROWS_CONTRACTED, preferred_element_type=x_RD.dtype
        )


BACK_ENDS: dict[str, BackEnd] = {
    "blocked": Blocked(),
    "ragged": Ragged(),
    "tokamax": Tokamax(),
    "dense": Dense(),
}
