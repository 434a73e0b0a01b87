"""Test-time augmentation: policies (data), views (ops and their way back), methods (how views are merged)."""

from unstride.recipe import policies
from unstride.recipe.policies import PRESETS, BudgetPair, Policy
from unstride.recipe.view import Op, View
from unstride.tta.fitting import FitReport
from unstride.tta.methods import GPS, AugTTA, ClassTTA, MaxTTA, MeanTTA, Method, gps_shanmugam, merge
from unstride.tta.tta import TTA

__all__ = [
    "GPS", "PRESETS", "TTA", "AugTTA", "BudgetPair", "ClassTTA", "FitReport", "MaxTTA", "MeanTTA", "Method", "Op",
    "Policy", "View", "gps_shanmugam", "merge", "policies",
]  # fmt: skip
