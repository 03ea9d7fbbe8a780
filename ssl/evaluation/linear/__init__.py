"""Linear probes of frozen features: many heads at once, one of them chosen, never on the test set.

`settings` what a user sets, `heads` many heads as few weights, `descent` SGD for all of them, `augmented`
and `cached` the two ways of training, `logistic` L-BFGS, `choice` the split and the chosen head, `probe`
the whole of it, `saved` the file of a head.
"""
