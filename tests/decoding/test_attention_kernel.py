"""The attention kernel of short passes: right, and the same bits for a token whatever it is computed with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.cpu.grouped_attention import fold_mask
from specbench.decoding.kv_cache import ForwardContext, KVCache
from specbench.decoding.model.layer_stack import attention_mask
from specbench.decoding.tree import Tree
from tests.support.kernel_passes import needs_kernels

pytestmark = needs_kernels

SCALE = 0.3
HIDDEN = float("-inf")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([32, 64, 80, 96, 128]) | st.integers(1, 140)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
ON_CPU = torch.device("cpu")


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None):
    return torch.ops.specbench.attend(query, keys, values, mask, SCALE)


def states(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[b, length, heads, d] as layers make them -> [b, heads, length, d]."""
    return torch.randn(*shape, generator=generator).to(dtype).transpose(1, 2)


def exact(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, 1) for part in (keys, values))
    scores = query.double() @ keys.mT * SCALE
    if mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


def assert_right(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    folded: bool = False,
) -> None:
    groups = query.shape[1] // keys.shape[1]
    out = attend(query, keys, values, fold_mask(mask, groups) if folded else mask)
    assert out.is_contiguous()
    assert out.dtype == query.dtype
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(out.double(), exact(query, keys, values, mask), atol=tolerance, rtol=tolerance)


@st.composite
def passes(draw, most_tokens: int = 9, most_entries: int = 200):
    """Queries, keys, values and a mask, in which each token attends to one entry or more."""
    dtype, d = draw(DTYPES), draw(WIDTHS)
    b, n, kv_heads, groups = (draw(st.integers(1, most)) for most in (3, most_tokens, 3, 4))
    kv_len = draw(st.integers(1, most_entries))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    query = states(generator, b, n, kv_heads * groups, d, dtype=dtype)
    keys, values = (states(generator, b, kv_len, kv_heads, d, dtype=dtype) for _ in range(2))
    masks = draw(st.sampled_from([b, 1]))
    hidden = torch.rand(masks, 1, n, kv_len, generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.95]))
    hidden.scatter_(-1, torch.randint(kv_len, (masks, 1, n, 1), generator=generator), False)
    return query, keys, values, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, HIDDEN)


@settings(max_examples=50)
@given(passes(), st.booleans(), st.booleans())
def test_attention_is_right(tensors, masked, folded):
    *tensors, mask = tensors
    assert_right(*tensors, mask if masked else None, folded)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "groups", "kv_len"), [(64, 3, 70), (1, 1, 9000), (2, 3, 3001), (7, 4, 64)])
def test_attention_is_right_in_large_passes(dtype, n, groups, kv_len):
    generator = torch.Generator().manual_seed(n)
    query = states(generator, 1, n, 2 * groups, 64, dtype=dtype)
    keys, values = (states(generator, 1, kv_len, 2, 64, dtype=dtype) for _ in range(2))
    mask = torch.full((n, kv_len), HIDDEN, dtype=dtype).triu_(kv_len - n + 1).view(1, 1, n, kv_len)
    assert_right(query, keys, values, mask)


@settings(max_examples=50)
@given(passes())
def test_the_bits_of_a_token_depend_on_its_query_and_its_visible_entries(tensors):
    """Not on other tokens or sequences, nor on how many entries are invisible or where these lie."""
    query, keys, values, mask = tensors
    out = attend(*tensors)
    for b in range(query.shape[0]):
        for i, row in enumerate(mask.expand(query.shape[0], -1, -1, -1)[b, 0]):
            visible = row == 0
            alone = attend(
                query[b : b + 1, :, i : i + 1], keys[b : b + 1, :, visible], values[b : b + 1, :, visible]
            )
            assert torch.equal(alone[0, 0], out[b, i])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d", [32, 64, 80])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(dtype, d):
    """In the cache, where its entries lie among those of its siblings and of another sequence."""
    base, tree = 37, Tree.of(torch.tensor([-1, -1, 0, 0, 1, 3, 3]))  # the root, and nodes after it
    n = tree.visible.shape[-1]
    generator = torch.Generator().manual_seed(d)
    query, keys, values = (states(generator, 1, n, heads, d, dtype=dtype) for heads in (6, 2, 2))
    earlier = [states(generator, 1, base, 2, d, dtype=dtype) for _ in range(2)]

    def verified(nodes: list[int], ctx: ForwardContext) -> torch.Tensor:
        cache = KVCache([ON_CPU], 2, d, slots=2, capacity=64, dtype=dtype)
        cache.segments[0].fill_(3.0)
        cache.begin_pass(0, 1, ForwardContext.consecutive(0, base), 1, base)
        cache.update(*earlier, 0)
        cache.begin_pass(0, 1, ctx, 1, len(nodes))
        views = cache.update(keys[:, :, nodes], values[:, :, nodes], 0)
        mask = attention_mask(ctx, len(nodes), query)
        return attend(query[:, :, nodes], *views, fold_mask(mask, 3))[0]

    together = verified(list(range(n)), ForwardContext.nodes(base, tree.offsets()[0], tree.visible[0]))
    for visible in tree.visible[0]:
        path = visible.nonzero().flatten().tolist()
        chain = verified(path, ForwardContext.consecutive(base, len(path)))
        assert torch.equal(chain, together[path])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    generator = torch.Generator().manual_seed(0)
    query, *both = (
        states(generator, 2, length, heads, 64, dtype=dtype) for length, heads in ((5, 9), *[(700, 3)] * 2)
    )
    mask = torch.full((5, 700), HIDDEN, dtype=dtype).triu_(696).view(1, 1, 5, 700)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(attend(query, *both, mask))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extreme_scores(dtype):
    """Weights that are exactly one and zero, and keys without a meaning in an invisible entry."""
    query, keys = torch.ones(1, 1, 1, 64, dtype=dtype), torch.full((1, 1, 20, 64), -100.0, dtype=dtype)
    values = torch.arange(20.0).to(dtype).view(1, 1, 20, 1).repeat(1, 1, 1, 64)
    keys[0, 0, 7], keys[0, 0, 9] = 100.0, float("nan")
    mask = torch.zeros(1, 1, 1, 20, dtype=dtype)
    mask[..., 9] = HIDDEN
    assert torch.equal(attend(query, keys, values, mask), torch.full((1, 1, 1, 64), 7.0, dtype=dtype))
    assert attend(query, keys, values).isnan().all()
    assert attend(query * float("nan"), keys, values, mask).isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1])
def test_no_nan_is_taken_for_a_weight(bits):
    """Whichever of them it is: memory that nobody wrote may hold any."""
    query, keys = torch.ones(1, 1, 1, 64), torch.ones(1, 1, 20, 64)
    keys.view(torch.int32)[0, 0, 7] = bits
    assert keys[0, 0, 7].isnan().all()
    assert attend(query, keys, torch.ones_like(keys)).isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_that_sees_nothing_gives_zeros_as_in_torch(dtype):
    query, keys = torch.ones(1, 2, 2, 64, dtype=dtype), torch.ones(1, 1, 20, 64, dtype=dtype)
    mask = torch.full((1, 1, 2, 20), HIDDEN, dtype=dtype)
    assert not attend(query, keys, keys, mask).any()
    mask[:, :, 1] = 0.0
    assert torch.equal(attend(query, keys, keys, mask)[0, :, 0, 0], torch.tensor([0.0, 1.0], dtype=dtype))
    assert attend(query, keys[:, :, :0], keys[:, :, :0]).shape == (1, 2, 2, 64)


def test_what_does_not_fit_is_refused():
    query, keys, mask = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 5, 8), torch.zeros(1, 1, 2, 5)
    wrong = [
        (query[:, :3], keys, keys, None),
        (query, keys.bfloat16(), keys.bfloat16(), None),
        (query.double(), keys.double(), keys.double(), None),
        (query, keys, keys[:, :, 1:], None),
        (query, keys, keys, mask[..., 1:]),
        (query, keys, keys, mask[:, :, 1:]),
        (query, keys, keys, mask.bfloat16()),
        (query, keys, keys.mT.contiguous().mT, None),
    ]
    for tensors in wrong:
        with pytest.raises(RuntimeError, match="attend"):
            attend(*tensors)
