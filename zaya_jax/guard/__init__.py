"""Guards a run from inside: spikes of the loss, devices that compute wrongly, going back.

`guard` is what the loop asks after each step; `spikes` and `replay` find what is wrong, `decisions`
writes down where the run goes back to. `aegis` supervises from outside.
"""
