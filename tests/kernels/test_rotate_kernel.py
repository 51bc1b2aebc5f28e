"""Turned queries and keys have the products that they had."""

import pytest
import torch

from hf_paged_attention.kernels import reference_rotate_heads, rotate_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]


def heads(tokens, heads, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)


def factors(kv_heads, dim):
    exponents = torch.randint(-3, 4, (kv_heads, dim), generator=torch.Generator().manual_seed(9))
    return torch.exp2(exponents.float()).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("divide", [False, True])
def test_kernel_gives_the_reference(dim, divide, dtype):
    states, factor = heads(5, 6 if not divide else 2, dim, dtype), factors(2, dim)
    wanted = reference_rotate_heads(states.double(), factor.double(), divide=divide)
    got = rotate_heads(states, factor, divide=divide)
    assert got.dtype == (torch.float32 if divide else dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}[got.dtype]
    torch.testing.assert_close(got.double(), wanted, atol=tolerance * 8, rtol=tolerance)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_products_of_queries_and_keys_are_unchanged(dim):
    query, key, factor = heads(3, 6, dim, seed=1), heads(7, 2, dim, seed=2), factors(2, dim)
    turned_query = reference_rotate_heads(query.double(), factor.double(), divide=False)
    turned_key = reference_rotate_heads(key.double(), factor.double(), divide=True)
    for head in range(6):
        before = query[:, head].double() @ key[:, head // 3].double().T
        torch.testing.assert_close(turned_query[:, head] @ turned_key[:, head // 3].T, before)


def test_an_outlier_channel_is_spread():
    key = torch.zeros(1, 1, 128, device=DEVICE)
    key[..., 5] = 100.0
    turned = rotate_heads(key, torch.ones(1, 128, device=DEVICE), divide=True)
    torch.testing.assert_close(turned.abs(), torch.full_like(turned, 100.0 / 128**0.5))


def test_strided_heads_and_no_tokens():
    wide = heads(4, 4, 64).unsqueeze(0).transpose(1, 2)  # [1, H, T, D]
    states = wide.transpose(1, 2).flatten(0, 1)
    factor = factors(2, 64)
    torch.testing.assert_close(
        rotate_heads(states, factor, divide=False),
        reference_rotate_heads(states, factor, divide=False),
        atol=1e-5,
        rtol=1e-5,
    )
    assert rotate_heads(states[:0], factor, divide=True).shape == (0, 4, 64)
