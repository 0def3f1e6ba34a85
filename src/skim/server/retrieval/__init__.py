"""Routes that read texts and generate nothing: embeddings, rankings and plans."""
