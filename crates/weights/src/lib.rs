//! Model files: safetensors and its shards, PyTorch archives, GGUF. Reads headers without data and
//! data into buffers the caller owns; writes atomically. Knows nothing of tensors or training.
