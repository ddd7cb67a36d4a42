"""Training beside serving: one engine's weights, memory and device for both, in one thread.

Start reading at `engine.beside.room.TrainingRoom.give_way`; docs/training.md has a picture.
"""
