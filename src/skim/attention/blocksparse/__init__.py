"""Block-sparse prefill: which blocks of keys a block of queries reads, in plain torch and in Triton."""
