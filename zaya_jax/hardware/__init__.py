"""What is known of hardware: `chips` and `clusters` by their data sheets, `measured` by what
`experiments.characterize` measured on a machine.

`sizing` settles from both what depends on a machine's speed, and judges a config's sizes;
`targets` describes absent chips to their compilers; `host` sets up this machine's process.
"""
