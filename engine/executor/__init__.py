"""Executors: run the model's steps on the ranks of an engine.

    engine core ─▶ ModelRunner ─▶ Executor ─▶ model of one rank, in the core's process
     (decides)     (inputs, sampling)  └─ the same inputs ─▶ worker process of every other rank

The core's process alone schedules, samples and moves KV. It has the first rank of the last pipeline stage, where logits
are computed; without stages that is rank 0. The other ranks hold no request: what they need of a step are its token
ids, positions and block tables, a few kilobytes, which they get through a pipe as the step begins.
"""
