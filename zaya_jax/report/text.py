"""Values as people read them, and text made safe for HTML."""

import html
import math
from typing import Any

UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
# What stands for a control character: its symbol, or a mark where it has none.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


class Markup(str):
    """Text that is HTML already, for templates too."""

    def __html__(self) -> str:
        return self


def escape(text: object) -> Markup:
    """Text made safe for HTML, with control characters shown as their symbols; markup stays as it
    is."""
    if hasattr(text, "__html__"):
        return Markup(text)
    return Markup(html.escape(str(text).translate(CONTROLS), quote=True))


def wrapped(opening: str, content: str, closing: str) -> str:
    """HTML with its tags around it; nothing where there is no content."""
    return f"{opening}{content}{closing}" if content else ""


def number(value: float, digits: int = 4) -> str:
    """A value with four significant digits, and k, M, B, T for large ones."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return _digits(value, digits).replace("-", "−")


def _digits(value: float, digits: int) -> str:
    """A finite number in ASCII."""
    size = abs(value)
    if value == int(value) and size < 10_000:
        return f"{int(value)}"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if max(limit * 0.99995, 9999.5) <= size < 1e15:
            return f"{value / limit:.{digits}g}{suffix}"
    if size >= 1000:
        return f"{float(f'{value:.{digits}g}'):g}"
    if size >= 1e-4:
        return f"{value:.{digits}g}"
    mantissa, power = f"{value:.{max(1, digits - 2)}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def known(value: float) -> str:
    """A value, a dash where it is not finite."""
    return number(value) if math.isfinite(value) else "–"


def percent(value: float) -> str:
    """A share, a dash where it is not known."""
    return f"{number(100 * value, 3)} %" if math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """1 d 3 h, 2 min 5 s, 4.25 s, 35 ms or 12 µs; a dash where it is not known."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        for least, factor, unit in ((0.1, 1, "s"), (1e-4, 1e3, "ms")):
            if seconds >= least or not seconds:
                return f"{factor * seconds:.3g} {unit}"
        return f"{1e6 * seconds:.3g} µs"
    rest = round(seconds)
    parts: list[tuple[int, str]] = []
    for unit, size in UNITS:
        amount, rest = divmod(rest, size)
        if amount or parts:  # not the zeros in front
            parts.append((amount, unit))
    return " ".join(f"{amount} {unit}" for amount, unit in parts[:2] if amount)


def byte_size(size: float) -> str:
    """1.25 TB, 181.3 GB, 34 MB, 2 kB or 12 B."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.4g} {unit}"
    return f"{round(size)} B"


def counted(count: int, word: str, several: str = "s") -> str:
    """1 step, 2,000 steps, 2 batches."""
    return f"{count:,} {word}{'' if count == 1 else several}"


def shape_of_step(row: dict[str, Any]) -> str:
    """The batch and the mesh of a phase, in words, from the plain numbers of a plan or a compiled
    program."""
    axes, switches = [], ""
    for name, size in row["mesh"].items():
        if size is True:
            switches += f", {name}"
        elif size > 1:
            axes.append(f"{name} {size}")
    micro_batches = counted(row["micro_batches"], "micro-batch", "es")
    return (
        f"{row['sequences']:,} sequences of {row['seq_len']:,} tokens per step in"
        f" {micro_batches} on {' x '.join(axes) or 'one device'}{switches}:"
        f" {row['tokens_per_device']:,.0f} tokens a device; remat {row['remat']}"
    )
