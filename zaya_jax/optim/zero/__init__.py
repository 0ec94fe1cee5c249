"""ZeRO-1: the optimizer's state and work spread over all devices that hold the same weights.

Weights of one kind form a bucket, for whose state a layout gives every device its share:

    Muon    all stacks of one matrix shape; a device owns whole matrices, by Newton–Schulz's work (`matrices`)
    AdamW   all weights with the same axes; a device holds boxes of large ones and all of small ones (`vectors`)

For each large bucket a step has

    one reduce-scatter of the gradients (`reduce`), 4 bytes a number, without more padding than a row a device
        (layer by layer during the backward pass, for large stacks if their shapes allow it: `by_layer`)
    an exchange of less than that share, after which each device has whole matrices
    the optimizer on the device's share, with no collective
    the same exchange back, and one all-gather of the directions (`gather`), 4 bytes a number, or 2 for Muon in bfloat16

(of large stacks that devices hold as bfloat16 copies, `copied`, the owner keeps the float32 weights
with its state, and sends them, rounded, in the place of directions)

one all-reduce for all small weights together and one for the directions of small matrices, and one
of a vector with one number a group of weights, for the norms. Everything here runs inside
`jax.shard_map`, on a device's part of each array; gradients come in as each device's own partial
sums.

Six matrices [4, 8] on four devices, for example. They are 24 rows of UNIT = 8 numbers, and a
reduce-scatter leaves six of them to each device. Each matrix goes to the device with the least work
so far, ties at even distances: the devices own 1, 2, 1 and 2.

    matrices         A A A A  B B B B  C C C C  D D D D  E E E E  F F F F
    reduce-scatter   0 0 0 0  0 0 1 1  1 1 1 1  2 2 2 2  2 2 3 3  3 3 3 3      six rows to each device
    owners           0        1        1        2        3        3

One round of the exchange: device 0 sends its half of B to 1, and 2 its half of E to 3. Then 1 and 3
hold two whole matrices, 0 and 2 one and an unused slot; each orthogonalises its own; the same two
halves go back; an all-gather gives every device all six directions.

State in checkpoints is un-padded, one array per weight in the weight's own shape: independent of
the mesh. `Bucket.state_boxes` lists the boxes of each device.

The exchange in rounds (`owners`) is the most complicated code here, for 3% of the bytes. What a
device of ZAYA1-base puts in and gets out in a step, with directions in bfloat16 (`Bucket.traffic`),
against two simpler schemes in the exchange's place:

    devices (data)                                 64      1,024     1,016
    gradients by layer, and back                   48.3    48.4      48.4 GB
    all other matrices: exchange and back          1.44    1.42      1.42 GB, 2 to 9 rounds each way
      whole matrices, padded to equal shares       2.27    31.0      30.8 GB
      summed whole (`Matrices.summed_whole`)       3.78    3.78      3.78 GB

    layout    the buckets, and the collectives that they have together
    matrices, vectors    a bucket of Muon's and of AdamW's weights; `grid.Bucket` is what both offer
    owners    who owns which matrix, and the rounds of the exchange
    by_layer  large stacks, layer by layer
    grid      the terms of all of them: devices, weights, boxes
"""

from zaya_jax.optim.zero.grid import StateBox, Weight
from zaya_jax.optim.zero.layout import Layout

__all__ = ["Layout", "StateBox", "Weight"]
