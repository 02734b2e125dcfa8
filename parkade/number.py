"""The type of options that are numbers with a range."""

import math
from typing import Any

import click


class Real(click.FloatRange):
    """A float within its range. "nan", which compares with nothing and so lies in every range of click's, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid float range.", param, ctx)
        return number
