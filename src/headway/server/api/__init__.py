"""The OpenAI and Anthropic APIs: request records, endpoints, whole answers and streams."""
