"""Executors: run the model's steps on the ranks of an engine.

    engine core ─▶ ModelRunner ─▶ Executor ─▶ model of rank 0, in the core's process
     (decides)     (inputs, sampling)  └─ the same inputs ─▶ worker process of every other rank

Rank 0 alone schedules, samples and moves KV. The others hold no request: what they need of a step are its token ids,
positions and block tables, a few kilobytes, which they get through a pipe as rank 0 begins to compute.
"""
