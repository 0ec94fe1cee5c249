"""How good a model is: the loss on any text (`texts`), and the tasks of lm-eval-harness (`harness`), on one `scorer`."""
