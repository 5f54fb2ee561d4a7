"""Inside vLLM's worker process: receive beside the serving engine, apply in place, prove it.

Knows neither Ray nor the API, so the same extension can serve in an engine that
someone else started. Every import of vLLM internals is in `vllm_compat`.
"""
