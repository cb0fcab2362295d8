"""OpenAI's HTTP API at the router: another door to the same calls. docs/openai.md says what is served."""
