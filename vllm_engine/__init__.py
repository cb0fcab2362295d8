"""vLLM in the place of the engine core: a process that holds vLLM's AsyncLLM and speaks engine/core/messages.py.

No other package imports this one, and it alone imports vllm. The instance starts `python -m vllm_engine.process` where
it would start `engine.core.process`, with an interpreter that has vLLM (`engine.python`). Everything else, from gRPC to
text, is the same for both engines.
"""
