"""Float64 NumPy evaluation of NKI's documented formulas, independent of the simulator: nothing here imports it.

One file per engine. Functions are pure: arrays of values in, arrays of values out. Inputs hold values that the
operand's dtype can represent; results of engine arithmetic are float64 and unrounded, and `dtypes.round_to` gives what
a destination of some dtype would hold. Operators are named by their `nki.language` name ("add", "maximum", ...).
"""
