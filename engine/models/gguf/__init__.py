"""Models in the file format of llama.cpp, GGUF, served as they are."""
