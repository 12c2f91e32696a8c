"""nki-parallel-attn: KV-sharded attention for AWS Trainium."""
