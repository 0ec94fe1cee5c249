"""Evaluates a model: the loss on any text (`texts`) and lm-eval-harness's tasks (`harness`), on one
`scorer`."""
