"""How good a model is: the loss on any text (`texts`) and lm-eval-harness's tasks (`harness`), on one `scorer`."""
