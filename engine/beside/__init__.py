"""Training beside serving: one engine's weights, memory and device for both, in one thread.

Start reading at `engine.beside.room.TrainingRoom.give_way`.

    trainer's child                   worker's engine process, one thread
    rows, jobs       -- open, add --> takes pages of the arena for the runs' parameters and moments
                     -- step -------> a micro-batch of at most 4,096 tokens (CPU: 256):
                                      layer 0 | ... | loss | ... | layer 0 | update
                                      between any two: read commands, then
                                        a request has no first token yet -> step until it has one
                                        requests only continue           -> step as the share allows
                                        nothing to serve                 -> the next layer
    progress,        <-- events -----
    adapters, states <-- checkpoint -
"""
