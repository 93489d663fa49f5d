"""vLLM's part in pictures, sounds and videos: processing, features with their blobs, encoding, embeddings."""
