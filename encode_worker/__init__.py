"""The encode worker: computes embeddings of pictures, sounds and videos once, for all workers of a model.

worker ──Encode──▶ service.py ──▶ child_encoder.py ══pipe══▶ child.py (the model's encoder, alone)
                       └──Fetch──▶ preprocessor (the tensors that the encoder reads)
"""
