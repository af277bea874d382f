"""How alike two points of a smooth surface are."""

from __future__ import annotations

import math

import numpy as np

from zerotune.tuner.modeling.features import Floats


def matern(distance: Floats) -> Floats:
    """Correlation by distance in length scales, of a surface that has one derivative.

    The Matern covariance with nu = 3/2 (Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 4.17).
    """
    scaled = distance * math.sqrt(3.0)
    result: Floats = np.exp(-scaled)
    scaled += 1.0
    result *= scaled
    return result
