"""Runs that tests start in this process trace each program once."""

from traced_once import traced_once

__all__ = ["traced_once"]
