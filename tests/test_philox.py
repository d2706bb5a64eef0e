"""The published generator, and values of its words."""

from __future__ import annotations

import torch

from sparseautomodel.philox import _log, philox


def test_words_are_those_of_the_published_generator() -> None:
    """The known answers of Random123 for philox4x32-10."""
    zero = philox(torch.zeros(1, dtype=torch.int64), 0, (0, 0))
    assert [int(word) for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = _philox_by_hand((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    for counter, draw, key in ((5, 0, (1, 2)), (0x1234567890, 3, (0xFFFFFFFF, 0xDEADBEEF)), (2**40 - 1, 7, (9, 0))):
        words = philox(torch.tensor([counter]), draw, key)
        assert [int(word) for word in words] == _philox_by_hand((counter & 0xFFFFFFFF, counter >> 32, draw, 0), key)


def test_logarithm_is_near_the_true_one() -> None:
    x = (torch.arange(1, 2**24 + 1, 997).float()) * 2.0**-24
    true = x.double().log()
    assert ((_log(x) - true).abs() <= 3e-7 * true.abs().clamp(min=1e-7)).all()


def _philox_by_hand(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """The generator in plain Python, as the paper has it."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ d ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]
