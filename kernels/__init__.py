"""Tensors in, tensors out: the operations of a decoder with many LoRA adapters.

Knows nothing of requests, tenants or adapters' names. Each file reads reference -> Triton kernel
-> launcher, with the same argument names; the reference is what the kernel is tested against and
what runs on a CPU.

Letters used in shapes everywhere in Lorikeet:

    T tokens in the batch     S requests in the batch     L layers
    E hidden size             I intermediate size         V vocabulary
    H query heads             K key/value heads           D head dimension
    P pages in the arena      B tokens per page           R rank
    A virtual adapters        G segments                  N tile entries
"""
