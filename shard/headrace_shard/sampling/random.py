"""Random numbers as a pure function of (seed, index): the same whatever else is in the batch, and after a resume."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): a bijection that scatters every bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, index), with 53 random bits."""
    with np.errstate(over="ignore"):
        key = _mix(seeds + _GAMMA)
        bits = _mix(key + (indices.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
