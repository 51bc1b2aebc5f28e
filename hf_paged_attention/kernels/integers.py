"""Integer arithmetic of launches in plain Python: Triton's functions of these names take microseconds each."""


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`; 1 for numbers below 2."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """`number` over `divisor`, rounded up."""
    return -(-number // divisor)
