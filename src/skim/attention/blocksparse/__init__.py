"""Block-sparse prefill: selects the key blocks of each query block, in plain torch and in Triton."""
