"""One logger for the package, and lines that are said once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("hf_paged_attention")


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


@functools.cache
def info_once(message: str) -> None:
    logger.info(message)
